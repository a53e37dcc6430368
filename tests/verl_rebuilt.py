"""Rebuilds how verl 0.9 creates the optimizer of its FSDP engine, for tests of the recipe without verl."""

import importlib
from typing import Any

OPTIM = "actor_rollout_ref.actor.optim."
DEFAULTS: dict[str, Any] = {  # verl's defaults for optimizers under FSDP
    "optimizer": "AdamW",
    "optimizer_impl": "torch.optim",
    "lr": 1e-3,
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
    "override_optimizer_config": None,
}


def configured(lines: str, **given: Any) -> dict[str, Any]:
    """Returns verl's configuration of an optimizer, given these arguments of its command line. A + adds a key."""
    config = DEFAULTS | given
    for path, value in (line.removeprefix("+").split("=", 1) for line in lines.split()):
        if path.startswith(OPTIM):
            *folders, key = path.removeprefix(OPTIM).split(".")
            node = config
            for folder in folders:
                node[folder] = dict(node.get(folder) or {})
                node = node[folder]
            node[key] = value
    return config


def build_optimizer(params: Any, config: dict[str, Any]) -> Any:
    """Creates an optimizer as verl does: its class by module and name, with lr, weight_decay, betas for any Adam, and
    the keys of override_optimizer_config."""
    options = {key: config[key] for key in ("lr", "weight_decay")}
    if "adam" in config["optimizer"].lower():
        options["betas"] = config["betas"]
    options.update(config["override_optimizer_config"] or {})
    return getattr(importlib.import_module(config["optimizer_impl"]), config["optimizer"])(params, **options)
