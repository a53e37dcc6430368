"""Which parameters a backward reached, where FSDP2 sends zeros for the others: once they are sent, nothing tells a zero
from a gradient."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

Place: TypeAlias = tuple[weakref.ref[nn.Module], str]
"""Where a parameter is: a module, which is not kept alive, and the name there."""


class Used:
    """Autograd says so, of whole parameters: by hooks, which they get when the first forward shows them."""

    def __init__(
        self, params: Sequence[nn.Parameter], units: Sequence[Sequence[nn.Module]], places: Sequence[Sequence[Place]]
    ) -> None:
        """params: the shards. units: the modules of each, and the places of its parameters."""
        self._params = params
        self._whole: dict[int, torch.Tensor] = {}
        self._reached: set[int] = set()
        position = {id(p): i for i, p in enumerate(params)}
        self._hooks: list[Any] = []
        for unit, of_unit in zip(units, places, strict=True):
            known = [(module, name, position.get(_at(module, name))) for module, name in of_unit]
            self._hooks += [module.register_forward_pre_hook(partial(self._watch, known)) for module in unit]

    def _watch(self, places: Sequence[tuple[weakref.ref[nn.Module], str, int | None]], *_: Any) -> None:
        """Behind FSDP2's hook, which puts whole parameters into a unit's modules."""
        for module, name, i in places:
            if i is None or (owner := module()) is None or (whole := owner._parameters.get(name)) is None:
                continue
            if whole.requires_grad and whole is not self._params[i] and whole is not self._whole.get(i):
                self._whole[i] = whole
                self._hooks.append(whole.register_post_accumulate_grad_hook(partial(_reach, self._reached, i)))

    def take(self, i: int) -> bool:
        """Whether a gradient came since this was asked before. Of a parameter that was not seen whole, one did."""
        reached = i in self._reached or i not in self._whole
        self._reached.discard(i)
        return reached

    def forget(self) -> None:
        """Gradients that FSDP2 has not sent are dropped."""
        self._reached.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _at(module: weakref.ref[nn.Module], name: str) -> int:
    owner = module()
    return id(None if owner is None else owner._parameters[name])


def _reach(reached: set[int], i: int, _whole: torch.Tensor) -> None:
    reached.add(i)
