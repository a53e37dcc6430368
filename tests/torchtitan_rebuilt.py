"""Rebuilds how torchtitan 0.3 creates, saves and loads optimizers, for tests of the recipe without torchtitan."""

import dataclasses
import re
import sys
import types
from collections import defaultdict
from typing import Any

import torch


@dataclasses.dataclass(kw_only=True, slots=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def default_adamw(lr: float = 8e-4) -> Any:
    options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return OptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=options)]
    )


class OptimizersContainer(torch.optim.Optimizer):
    """One optimizer for each model part and name; a parameter is in the group of the first pattern that it matches."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list[Any] = dataclasses.field(default_factory=list)
        implementation: str = "fused"
        optimizer_factory_kwargs_by_name: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

        def build(self, *, model_parts: list[torch.nn.Module]) -> Any:
            return self._owner(self, model_parts=model_parts)  # type: ignore[attr-defined]

    def __init_subclass__(cls) -> None:
        cls.Config._owner = cls  # type: ignore[attr-defined]

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name]

    def __init__(self, config: Any, *, model_parts: list[torch.nn.Module]) -> None:
        self.optimizers = []
        for part in model_parts:
            groups = defaultdict(list)
            taken: set[str] = set()
            for wanted in config.param_groups:
                named = [(n, p) for n, p in part.named_parameters() if n not in taken and re.search(wanted.pattern, n)]
                taken.update(name for name, _ in named)
                flags = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
                group = {"params": [p for _, p in named], "param_names": [name for name, _ in named]}
                groups[wanted.optimizer_name].append({**group, **flags, **wanted.optimizer_kwargs})
            for name, members in groups.items():
                more = config.optimizer_factory_kwargs_by_name.get(name, {})
                self.optimizers.append(self._resolve_optimizer_factory(name)(members, **more))
        params = [p for one in self.optimizers for group in one.param_groups for p in group["params"]]
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns state.NAME.KEY and param_groups.NAME.KEY of all optimizers."""
        flat: dict[str, Any] = {}
        for one in self.optimizers:
            _init_state(one)
            found = one.state_dict()
            for group in found["param_groups"]:
                for i, name in zip(group["params"], group["param_names"], strict=True):
                    flat.update({f"state.{name}.{key}": value for key, value in found["state"][i].items()})
                    flat.update({f"param_groups.{name}.{key}": value for key, value in group.items()})
                    del flat[f"param_groups.{name}.params"], flat[f"param_groups.{name}.param_names"]
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads, for each parameter, the keys that its optimizer's state has in memory."""
        for one in self.optimizers:
            _init_state(one)
            state: dict[int, Any] = {}
            groups: list[dict[str, Any]] = []
            for group in one.param_groups:
                names = group["param_names"]
                kept = group.keys() - {"params", "param_names"}
                groups.append({key: state_dict[f"param_groups.{names[0]}.{key}"] for key in kept})
                groups[-1]["params"] = list(range(len(state), len(state) + len(names)))
                for name, p in zip(names, group["params"], strict=True):
                    keys = [key for key in one.state[p] if f"state.{name}.{key}" in state_dict]
                    state[len(state)] = {key: state_dict[f"state.{name}.{key}"] for key in keys}
            one.load_state_dict({"state": state, "param_groups": groups})


def _init_state(optimizer: torch.optim.Optimizer) -> None:
    """Checks that there is state. torchtitan creates it by a step with zero gradients and lr 0, as
    torch.distributed.checkpoint does; our optimizer creates it when `state` is read."""
    assert optimizer.state


def install() -> None:
    """Installs this module as torchtitan.components.optimizer."""
    here = sys.modules[__name__]
    for name in ("torchtitan", "torchtitan.components"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["torchtitan.components.optimizer"] = here
