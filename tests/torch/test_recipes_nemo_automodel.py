"""docs/recipes/nemo_automodel.md: its YAML, used as Automodel creates, schedules and saves an optimizer."""

import copy
import importlib
import inspect
import re
import warnings
from typing import Any

import frameworks
import pytest
import recipes
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from training import bits, everything

import torch_ext

yaml = frameworks.module("yaml")
pytestmark = frameworks.needs("yaml")
BF16 = torch.bfloat16
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _rebuilt(model: torch.nn.Module, section: dict[str, Any], tensor_parallel: bool = False) -> Any:
    """Creates the optimizer as Automodel does: the class by its path, called with params= and the section's keys. With
    tensor parallelism foreach=False is added if the class has that argument. Parameters that match an override's
    pattern form a group with its factors."""
    options = dict(section)
    module, _, name = options.pop("_target_").rpartition(".")
    factory = getattr(importlib.import_module(module), name)
    if tensor_parallel and "foreach" in inspect.signature(factory).parameters:
        options.setdefault("foreach", False)
    overrides = options.pop("param_group_overrides", [])
    params: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if overrides:
        groups: list[dict[str, Any]] = [{"params": []}]
        groups += [{"params": [], "lr_mult": one["lr_mult"], "wd_mult": one["wd_mult"]} for one in overrides]
        for parameter, p in model.named_parameters():
            hits = [i for i, one in enumerate(overrides, 1) if re.search(one["pattern"], parameter)]
            groups[hits[0] if hits else 0]["params"].append(p)
        params = groups
    return factory(params=params, **options)


def _automodels(model: torch.nn.Module, section: dict[str, Any], tensor_parallel: bool = False) -> Any:
    """Creates the optimizer with Automodel itself."""
    loader = importlib.import_module("nemo_automodel.components.config.loader")
    optim = importlib.import_module("nemo_automodel.components.optim.optimizer")
    options = loader.ConfigNode(section).to_dict()
    if tensor_parallel:
        options["foreach"] = False
    (optimizer,) = optim.build_optimizer_config(options.pop("_target_"), options).build(model)
    return optimizer


BUILDERS = [
    pytest.param(_rebuilt, id="rebuilt"),
    pytest.param(_automodels, id="nemo_automodel", marks=recipes.needs("nemo_automodel")),
]


def _section(block: int, **more: Any) -> dict[str, Any]:
    """Returns the optimizer section of one of the page's YAML blocks."""
    return {**yaml.safe_load(recipes.blocks("nemo_automodel", "yaml")[block])["optimizer"], **more}


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16)).to(BF16)


def _train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    """Automodel's schedule writes lr and weight decay into the groups; its clip scales gradients by a norm that it
    computes itself."""
    base = 1e-2, 0.1
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = base[0] / (1 + step) * group.get("lr_mult", 1.0)
            group["weight_decay"] = base[1] * group.get("wd_mult", 1.0)
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("build", BUILDERS)
def test_the_sections_make_our_optimizer(build: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = build(_model(), _section(0), tensor_parallel=True)
    assert isinstance(optimizer, torch_ext.Adam)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-5, (0.9, 0.95), 1e-8, 0.1)
    assert group["foreach"] is False
    assert (optimizer.policy.exp_avg_dtype, optimizer.policy.main_params_dtype) == (BF16, torch.float32)
    optimizer = build(_model(), _section(1))
    assert (optimizer.policy.exp_avg_dtype, optimizer.policy.main_params_dtype) == (torch.uint8, torch.float32)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(("block", "states"), [(0, None), (1, None), (0, "bf16_remainder"), (0, "8bit")])
def test_a_flattened_checkpoint_resumes_bit_for_bit(build: Any, block: int, states: str | None) -> None:
    overrides = [{"pattern": r"^1\.", "lr_mult": 0.5, "wd_mult": 0.0}]
    section = _section(block, param_group_overrides=overrides, **({} if states is None else {"states": states}))
    model = _model()
    optimizer = build(model, section)
    _train(model, optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FLAT))
    keys = {key.removeprefix("state.0.weight.") for key in saved if key.startswith("state.0.weight.")}
    assert keys == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    resumed = copy.deepcopy(model)
    other = build(resumed, section)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*torch_ext.*")
        set_optimizer_state_dict(resumed, other, saved, options=FLAT)
    _train(model, optimizer, range(3, 6))
    _train(resumed, other, range(3, 6))
    assert everything(optimizer) == everything(other)
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in resumed.parameters()]
    assert [group["lr"] for group in other.param_groups] == [1e-2 / 6, 0.5e-2 / 6]


@pytest.mark.parametrize("key", ["master_weights", "adam_w_mode", "bias_correction", "exp_avg_dtype"])
def test_keys_of_another_optimizer_are_named(key: str) -> None:
    with pytest.raises(TypeError, match=key):
        _rebuilt(_model(), _section(0, **{key: True}))
