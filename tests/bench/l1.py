"""The time that a kernel needs where memory costs nothing: on a block that stays in the first-level cache."""

import ctypes
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from bench import optimizer_configs
from bench.optimizer_configs import Configuration, Training
from torch_ext.native import adamw_args, constants, library
from torch_ext.native.adamw_args import AdamWArguments
from torch_ext.params import param_groups

# Elements of a call. The widest configuration has 16 bytes an element: 20 KB of 32 or more.
_SMALL, _LARGE = 256, 1280
_CALLS, _BATCHES = 100, 10


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
        self._owned: list[Any] = []  # what the calls point to
        self.trainings = [optimizer_configs.ours(configuration, [(n,)], seed) for n in (_SMALL, _LARGE)]
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
        # Checksums beside remainders are part of the loop; samples beside fp32 masters are looked at apart from it.
        checksum = state["checksum"] if "master_remainder" in state else None
        hyper = param_groups.hyper(training.optimizer.param_groups, torch.device("cpu"))
        states = [state["exp_avg"], state["exp_avg_sq"], master, state.get("scales"), state["step"], checksum]
        arguments, error = AdamWArguments(1), library.Error()
        arguments.point("params", [p])
        arguments.point("grads", [p.grad])
        arguments.point_states([states])
        arguments.n_groups, arguments.groups = 1, hyper.groups.data_ptr()
        arguments.seed, arguments.moment_rounding, arguments.weight_rounding = hyper.shared
        arguments.on_external_write = constants.EXTERNAL_IGNORE if checksum is None else constants.EXTERNAL_RESYNC
        self._owned += [hyper, arguments, error]
        adamw, where, message = adamw_args.adamw(), ctypes.addressof(arguments), ctypes.addressof(error)

        def steps() -> None:
            status = 0
            for _ in range(_CALLS):
                status |= adamw(where, None, message)
            library.check(status, error)

        return steps
