"""Measures the time of a kernel's arithmetic without memory traffic: on a block that stays in the first-level cache."""

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

# Elements of a call. The widest configuration has 16 bytes per element: 20 KB, of a cache of 32 KB or more.
_SMALL, _LARGE = 256, 1280
_CALLS, _BATCHES = 100, 10


class InL1(NamedTuple):
    """Time in ns per element, on one thread."""

    alone: float
    together: float  # while background processes run the same kernel


class InCache:
    """Times calls of tx_adamw on one thread, on few and on more elements. The difference of both times is the time of
    the elements, without the cost of a call. Each step() measures once alone and once with a background load, and
    appends the result to `found`.

    A measurement takes the median of several batches, since the scheduler interrupts only few of them.
    """

    def __init__(
        self,
        configuration: Configuration,
        seed: int,
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """beside: returns a context during which background processes run the kernel."""
        self._owned: list[Any] = []  # keeps alive what the calls point to
        self.trainings = [optimizer_configs.ours(configuration, [(n,)], seed) for n in (_SMALL, _LARGE)]
        self._batches = [self._steps_of(training) for training in self.trainings]
        self._beside = beside
        self.found: list[InL1] = []

    def batch(self) -> None:
        """Runs one batch of calls on more elements, about a tenth of a millisecond."""
        self._batches[1]()

    def step(self) -> None:
        alone = self._measure()
        with self._beside():
            self.found.append(InL1(alone, self._measure()))

    def _measure(self) -> float:
        """Returns ns per element."""
        seconds: list[list[float]] = [[], []]
        for _ in range(_BATCHES):
            for batch, found in zip(self._batches, seconds, strict=True):
                begin = time.perf_counter()
                batch()
                found.append(time.perf_counter() - begin)
        small, large = map(statistics.median, seconds)
        return (large - small) / (_CALLS * (_LARGE - _SMALL)) * 1e9

    def _steps_of(self, training: Training) -> Callable[[], None]:
        """Returns a function that steps the training's parameter _CALLS times through the C interface."""
        training.step()  # creates the state
        (p,) = training.params
        state = training.optimizer.state[p]
        master = state.get("master_param", state.get("master_remainder"))
        # With remainders, checksums are computed in the kernel's loop. With fp32 masters, samples of the weights are
        # compared outside it.
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
