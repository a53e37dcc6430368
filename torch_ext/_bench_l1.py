"""The time that a kernel needs where memory costs nothing: on a block that stays in the first-level cache."""

import ctypes
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext import _bench_configurations, _dtypes, _groups, _header, _library
from torch_ext._bench_configurations import Configuration, Training

# Elements of a call. The widest configuration has 16 bytes an element: 20 KB of 32 or more.
_SMALL, _LARGE = 256, 1280
_CALLS, _BATCHES = 100, 10


class TensorArgument(_library.Struct):
    c_name = "tx_tensor"
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class GroupArgument(_library.Struct):
    c_name = "tx_adamw_group"
    _fields_ = [
        (name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "decoupled")
    ]


class AdamWArguments(_library.Struct):
    c_name = "tx_adamw_args"
    _fields_ = [
        ("size", ctypes.c_uint64),
        ("n", ctypes.c_int64),
        *((name, ctypes.POINTER(TensorArgument)) for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")),
        *((name, ctypes.POINTER(TensorArgument)) for name in ("masters", "scales", "steps")),
        ("n_groups", ctypes.c_int64),
        ("groups", ctypes.POINTER(GroupArgument)),
        ("lrs", ctypes.POINTER(TensorArgument)),
        ("meta", ctypes.c_void_p),
        *((name, TensorArgument) for name in ("grad_scale", "clip_coef", "found_inf", "skipped")),
        ("seed", ctypes.c_uint64),
        ("moment_rounding", ctypes.c_int32),
        ("weight_rounding", ctypes.c_int32),
        ("witnesses", ctypes.POINTER(TensorArgument)),
        ("resynced", TensorArgument),
        ("on_external_write", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class InL1(NamedTuple):
    """ns per element, on one thread."""

    alone: float
    together: float  # while the other threads do the same


class InCache:
    """Calls of tx_adamw on one thread, on few and on more elements: what they differ in is the time of the elements
    alone. Each step is a round of both, alone and beside others, and leaves what it found in `found`.

    Of a round's batches the median counts: the scheduler leaves most of them alone.
    """

    def __init__(
        self,
        configuration: Configuration,
        seed: int,
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """beside: others run for as long as its context lasts."""
        self._adamw = _library.function("tx_adamw", *[ctypes.c_void_p] * 3, restype=ctypes.c_int32)
        self._owned: list[Any] = []  # what the calls point to
        self.trainings = [_bench_configurations.ours(configuration, [(n,)], seed) for n in (_SMALL, _LARGE)]
        self._batches = [self._repeated(training) for training in self.trainings]
        self._beside = beside
        self.found: list[InL1] = []

    def batch(self) -> None:
        """About a tenth of a millisecond of the larger one."""
        self._batches[1]()

    def step(self) -> None:
        alone = self._measure()
        with self._beside():
            self.found.append(InL1(alone, self._measure()))

    def _measure(self) -> float:
        seconds: list[list[float]] = [[], []]
        for _ in range(_BATCHES):
            for batch, found in zip(self._batches, seconds, strict=True):
                begin = time.perf_counter()
                batch()
                found.append(time.perf_counter() - begin)
        small, large = map(statistics.median, seconds)
        return (large - small) / (_CALLS * (_LARGE - _SMALL)) * 1e9

    def _repeated(self, training: Training) -> Callable[[], None]:
        training.step()  # makes the state
        (p,) = training.params
        state = training.optimizer.state[p]
        master = state.get("master_param", state.get("master_remainder"))
        pointed = [p, p.grad, state["exp_avg"], state["exp_avg_sq"], master, state.get("scales"), state["step"]]
        # Checksums beside remainders are part of the loop; samples beside fp32 masters are looked at apart from it.
        witness = state["witness"] if "master_remainder" in state else None
        hyper = _groups.hyper(training.optimizer.param_groups, torch.device("cpu"))
        arguments = AdamWArguments(
            ctypes.sizeof(AdamWArguments),
            1,
            *(ctypes.pointer(_argument(t)) for t in pointed),
            1,
            ctypes.pointer(GroupArgument(*hyper.groups[0].tolist())),
            **dict(zip(("seed", "moment_rounding", "weight_rounding"), hyper.shared, strict=True)),
            witnesses=ctypes.pointer(_argument(witness)),
            on_external_write=_header.EXTERNAL_IGNORE if witness is None else _header.EXTERNAL_RESYNC,
        )
        error = _library.Error()
        self._owned += [arguments, error]
        adamw, where, message = self._adamw, ctypes.byref(arguments), ctypes.byref(error)

        def steps() -> None:
            status = 0
            for _ in range(_CALLS):
                status |= adamw(where, None, message)
            _library.check(status, error)

        return steps


def _argument(t: Tensor | None) -> TensorArgument:
    if t is None:
        return TensorArgument(None, 0, 0, 0)
    dtype = _dtypes.code_of(t.dtype)
    assert dtype is not None and t.is_contiguous() and t.device == torch.device("cpu")
    return TensorArgument(t.data_ptr(), t.numel(), dtype, 0)
