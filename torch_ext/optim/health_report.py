"""The result of a measured step, parameter by parameter: as a table, as numbers, and as warnings."""

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torch_ext.native import library, structs
from torch_ext.native.adamw_args import TensorArgument, argument

_LARGE_RATIO = 0.1  # rms(update) / rms(weight) above which there is a warning; usual are 1e-4 to 1e-2
_LOST = 0.5  # the share of lost updates above which there is a warning
_LARGEST_FP16 = 65504.0


@structs.mirror("tx_health")
class _Sums(library.Struct):
    """The figures that the library computes from a row of tx_adamw_args.healths."""


@functools.cache
def _health_of() -> Callable[..., None]:
    return library.function("tx_health_of", TensorArgument, ctypes.POINTER(_Sums))


class ParamHealth(NamedTuple):
    """The measurements of one parameter in one step."""

    name: str
    elements: int
    update_rms: float
    """rms of the change of its masters; NaN where a weight is not finite."""
    weight_rms: float
    """rms of its masters (of its weights, where there are none)."""
    moved: float
    """The share of weights whose bits changed."""
    below_half_ulp: float
    """The share of updates below half an ulp of their weight; without masters, the share of weights that did not
    change."""
    largest_weight: float
    keeps: bool
    """Whether it keeps updates that are too small for the weight's dtype: it has a master, is fp32, or is not rounded
    to nearest."""
    fp16: bool

    @property
    def update_ratio(self) -> float:
        """rms(update) / rms(weight); 0 where nothing changed, infinite where weights are zero."""
        if self.weight_rms == 0:
            return math.inf if self.update_rms > 0 else 0.0
        return self.update_rms / self.weight_rms

    @classmethod
    def of(cls, name: str, row: Tensor, keeps: bool, fp16: bool) -> "ParamHealth":
        """Computes the measurements from a row of tx_adamw_args.healths, which is on the host."""
        sums = _Sums(ctypes.sizeof(_Sums))
        _health_of()(argument(row), ctypes.byref(sums))
        numbers = (sums.update_rms, sums.weight_rms, sums.moved, sums.below, sums.largest)
        return cls(name, sums.elements, *numbers, keeps, fp16)

    def warnings(self) -> Iterator[str]:
        """Yields a sentence for each measurement that deserves a warning."""
        if not math.isfinite(self.update_rms) or not math.isfinite(self.largest_weight):
            yield f"{self.name}: a weight is not finite, or too large to be squared"
            return
        if self.update_rms == 0:
            yield f"{self.name}: nothing changed: its gradient or its learning rate is zero"
        elif self.update_ratio > _LARGE_RATIO and self.weight_rms > 0:
            yield (
                f"{self.name}: the update is {self.update_ratio:.1%} of the weights (0.01 to 1 % is usual): a smaller "
                "learning rate, or warm-up, may be better"
            )
        if not self.keeps and self.update_rms > 0 and self.below_half_ulp > _LOST:
            yield (
                f"{self.name}: {self.below_half_ulp:.0%} of the weights lose their updates, which are too small for "
                "their dtype: give it masters, or weight_rounding='dithered'"
            )
        if self.fp16 and self.largest_weight > _LARGEST_FP16 / 4:
            yield (
                f"{self.name}: its largest weight is {self.largest_weight:.3g}; the largest float16 is "
                f"{_LARGEST_FP16:.0f}"
            )


_COLUMNS = ("update/weight", "moved", "< ulp/2", "largest")


class Health:
    """A measured step: `print` it, put `as_dict()` into TensorBoard or wandb, read `warnings`."""

    def __init__(self, params: Sequence[ParamHealth], step: int) -> None:
        self.params, self.step = tuple(params), step

    @property
    def warnings(self) -> list[str]:
        """A sentence for each measurement that deserves a warning; empty where all is well."""
        if not self.params:
            return ["nothing was measured: the step was skipped, because a gradient was not finite"]
        return [text for p in self.params for text in p.warnings()]

    def as_dict(self, prefix: str = "health/") -> dict[str, float]:
        """Returns the numbers by keys such as "health/update_ratio/layer.weight"; likewise moved, below_half_ulp and
        largest_weight."""
        keys = ("update_ratio", "moved", "below_half_ulp", "largest_weight")
        return {f"{prefix}{key}/{p.name}": float(getattr(p, key)) for key in keys for p in self.params}

    def __str__(self) -> str:
        rows = [
            (p.name, f"{p.update_ratio:.2e}", *map("{:.1%}".format, (p.moved, p.below_half_ulp))) for p in self.params
        ]
        table: list[Any] = [(f"step {self.step}", *_COLUMNS)]
        table += [(*row, f"{p.largest_weight:.3g}") for row, p in zip(rows, self.params, strict=True)]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
        return "\n".join([*lines, *(f"! {text}" for text in self.warnings)])

    __repr__ = __str__
