"""The optimizer configurations that the benchmark measures, stepped through torch_ext.AdamW as a user would; and the
wall, the time of memory traffic alone (docs/benchmarks.md)."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bench import workload
from bench.workload import Shapes
from torch_ext.cli import info
from torch_ext.native import library
from torch_ext.optim.adamw import AdamW


@dataclass(frozen=True)
class Configuration:
    """A configuration of torch_ext.AdamW."""

    name: str
    """The value of AdamW's `states`."""
    about: str
    dtype: torch.dtype  # of parameters and gradients
    traffic: float  # bytes read + written per parameter in a step


CONFIGURATIONS = {
    c.name: c
    for c in (
        Configuration("fp32", "everything fp32", torch.float32, 28),
        Configuration("bf16", "bf16 p, g, m, v; fp32 master", torch.bfloat16, 20),
        Configuration("bf16_remainder", "bf16 p, g, m, v; 16-bit remainder", torch.bfloat16, 18),
        # For 128 elements, m and v have a scale of one byte each, which is read and written.
        Configuration("8bit", "bf16 p, g; 8-bit m, v; 16-bit remainder", torch.bfloat16, 14 + 4 / 128),
    )
}

# Bytes per parameter that a step on the host reads and writes in addition, for copies: the gradient comes to the host
# and the weight goes back (2 bytes read and 2 written each). With remainders the weight comes to the host as well.
COPIED = {"bf16": 8, "bf16_remainder": 12}


class Stepper(Protocol):
    """An optimizer with its parameters: ours or a peer's."""

    def step(self) -> None: ...

    def tensors(self) -> Iterator[Tensor]:
        """Yields everything that stays resident from step to step."""
        ...


class Training:
    """An optimizer and its parameters. Their gradients are the same in every step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors(self) -> Iterator[Tensor]:
        """Yields parameters, gradients and optimizer state."""
        for p in self.params:
            yield p
            if p.grad is not None:
                yield p.grad
            yield from (t for t in self.optimizer.state[p].values() if isinstance(t, Tensor))


def ours(configuration: Configuration, shapes: Shapes, seed: int, device: str = "cpu", **options: Any) -> Training:
    """Returns torch_ext.AdamW in a configuration, on new parameters of these shapes. options: further ones of AdamW."""
    params = workload.make(shapes, configuration.dtype, seed, device)
    states: Any = configuration.name
    return Training(AdamW(params, lr=1e-4, states=states, seed=seed, **options))


def wall(traffic: float, params: int) -> Callable[[], None]:
    """Returns the wall: torch's in-place scale of an fp32 buffer, which reads and writes `traffic` bytes per
    parameter."""
    buffer = torch.full((max(int(traffic * params / 8), 1),), 1.0)

    def scale() -> None:
        buffer.mul_(0.999999)  # so close to 1 that no value becomes subnormal in thousands of calls

    return scale


def resident(stepper: Stepper, params: int) -> float:
    """Returns the bytes per parameter of the storages that stay between steps."""
    return workload.unique_bytes(stepper.tensors()) / params


def select_isa(name: str | None) -> None:
    """Selects the instruction set of the steps that begin afterwards; None: the library's own choice."""
    library.function("tx_isa_select", ctypes.c_char_p)(name.encode() if name else None)


@contextmanager
def default_isa() -> Iterator[None]:
    """Restores the library's own choice of an instruction set when the context ends."""
    try:
        yield
    finally:
        select_isa(None)


def has_isa(name: str) -> bool:
    return name in info.isas()
