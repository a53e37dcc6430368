"""One reduce-scatter of one unit of FSDP2: where its sum goes, and which gradients lie in it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext._exchange import Handle
from torch_ext._nonfinite import ALL_FINITE, first_nonfinite


class UnitPlan(NamedTuple):
    """What is decided about a unit before its first gradient."""

    number: int
    name: str
    main_grads_dtype: torch.dtype
    grad_comm_dtype: torch.dtype
    replicas: int
    """How many there are of each shard; more than one: FSDP2 itself adds up their gradients (HSDP)."""

    def __str__(self) -> str:
        return unit_called(self.name)


def unit_called(*names: str) -> str:
    """A unit in messages, by its modules' names; the model's own is empty."""
    return "the root's unit" if names == ("",) else f"unit {', '.join(map(repr, names))}"


class Slice(NamedTuple):
    """The gradient of one parameter's shard in a reduction, padded as all ranks' are."""

    param: int
    begin: int
    grad: Any
    """What FSDP2 made of it: a DTensor over the reduction's output, or over a copy in the parameter's dtype."""


class Reduction:
    """Begins when FSDP2 hands over a unit's gradients; which they are is learnt from the hooks that it calls next."""

    def __init__(self, unit: UnitPlan, output: Tensor, sums: Tensor, handle: Handle | None) -> None:
        """output: where FSDP2 expects the sum. sums: where it will be, flat, of output's numel; maybe output itself."""
        self.unit, self.output, self.sums, self.handle = unit, output, sums, handle
        self.slices: list[Slice] = []
        self.settled = False
        """Whether the sums were added to the gradient shards."""
        self.suspect: Tensor | None = None
        """What this rank handed over, [ranks, output's numel], where an element of it is not finite."""

    def add(self, param: int, begin: int, grad: Any) -> None:
        """FSDP2 says that the gradient of the parameter's shard begins there."""
        self.slices.append(Slice(param, begin, grad))

    def wait(self, guarded: Callable[[Callable[[], None]], None]) -> None:
        """Until the sums are there. guarded: calls what it is given."""
        if self.handle is not None:
            guarded(self.handle.result)
            self.handle = None

    def sum_of(self, one: Slice, shape: torch.Size) -> Tensor:
        """A view."""
        return self.sums[one.begin : one.begin + shape.numel()].view(shape)

    def first_nonfinite(self) -> int:
        """The parameter whose gradient on this rank is not finite, or ALL_FINITE."""
        if self.suspect is None:
            return ALL_FINITE
        ordered = sorted(self.slices, key=lambda one: one.begin)
        ends = [one.begin for one in ordered[1:]] + [self.suspect.shape[1]]
        found = first_nonfinite(
            [self.suspect[:, one.begin : end].contiguous() for one, end in zip(ordered, ends, strict=True)]
        )
        return ALL_FINITE if found == ALL_FINITE else ordered[found].param
