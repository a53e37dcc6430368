"""The configurations that the benchmark is about, stepped through torch_ext.AdamW as a user would, and the wall."""

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
    name: str
    """What AdamW takes as `states`."""
    about: str
    dtype: torch.dtype  # of parameters and gradients
    traffic: float  # bytes read + written per parameter in a step


CONFIGURATIONS = {
    c.name: c
    for c in (
        Configuration("fp32", "everything fp32", torch.float32, 28),
        Configuration("bf16", "bf16 p, g, m, v; fp32 master", torch.bfloat16, 20),
        Configuration("bf16_remainder", "bf16 p, g, m, v; 16-bit remainder", torch.bfloat16, 18),
        # A byte of scale per 128 elements of m and of v, read and written.
        Configuration("8bit", "bf16 p, g; 8-bit m, v; 16-bit remainder", torch.bfloat16, 14 + 4 / 128),
    )
}

# Bytes that copies read and write per parameter beside the step, where that is on the host: the gradient comes down and
# the weight goes up (2 bytes read and 2 written each); beside remainders the weight comes down as well.
COPIED = {"bf16": 8, "bf16_remainder": 12}


class Stepper(Protocol):
    """Whatever steps parameters: ours or a peer."""

    def step(self) -> None: ...

    def tensors(self) -> Iterator[Tensor]:
        """Everything that stays resident from step to step."""
        ...


class Training:
    """Parameters with gradients and the optimizer that steps them; the gradients stay the same in every step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors(self) -> Iterator[Tensor]:
        """Parameters, gradients, state."""
        for p in self.params:
            yield p
            if p.grad is not None:
                yield p.grad
            yield from (t for t in self.optimizer.state[p].values() if isinstance(t, Tensor))


def ours(configuration: Configuration, shapes: Shapes, seed: int, device: str = "cpu", **options: Any) -> Training:
    """options: of AdamW."""
    params = workload.make(shapes, configuration.dtype, seed, device)
    states: Any = configuration.name
    return Training(AdamW(params, lr=1e-4, states=states, seed=seed, **options))


def wall(traffic: float, params: int) -> Callable[[], None]:
    """torch's in-place scale of an fp32 buffer, which reads and writes `traffic` bytes per parameter."""
    buffer = torch.full((max(int(traffic * params / 8), 1),), 1.0)

    def scale() -> None:
        buffer.mul_(0.999999)  # thousands of times, and it is still no subnormal

    return scale


def resident(stepper: Stepper, params: int) -> float:
    """Bytes per parameter of the storages that stay between steps."""
    return workload.unique_bytes(stepper.tensors()) / params


def select_isa(name: str | None) -> None:
    """For steps that begin afterwards; None: what the library takes by itself."""
    library.function("tx_isa_select", ctypes.c_char_p)(name.encode() if name else None)


@contextmanager
def default_isa() -> Iterator[None]:
    """Whatever is selected inside, the library's own choice is back afterwards."""
    try:
        yield
    finally:
        select_isa(None)


def has_isa(name: str) -> bool:
    return name in info.isas()
