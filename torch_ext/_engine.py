"""When a model's gradients are reduced: the state of one parallelized model between and during backwards.

A cycle is what ends in one reduction: any number of backwards under no_sync, then one that reduces. In that one, each
bucket leaves as soon as the tracker says that its last gradient came, while backward goes on; the end of backward
waits, so that everything that runs after `loss.backward()` sees the sum. Ranks close a cycle by telling each other
which gradients came and whether one was not finite: an error is one on every rank, with the same words.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from torch_ext import _ops, _registry
from torch_ext._buffers import GradientBuffers
from torch_ext._exchange import MAX_BUCKETS, Exchange, Handle, tag
from torch_ext._layout import BucketPlan
from torch_ext._nonfinite import ALL_FINITE, first_nonfinite
from torch_ext._temporary import TemporaryBuckets
from torch_ext._tracker import Tracker

# What a rank says of a parameter at the end of a cycle.
_ABSENT, _CAME, _FROZEN = range(3)


class _BackwardEnd:
    """Called at the end of a backward. It dies with its graph task, so a dead one is a backward that raised."""

    def __init__(self, engine: "Engine", task: int) -> None:
        self._engine, self._task = weakref.ref(engine), task

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.backward_ended(self._task)


class Engine:
    """Keeps gradients in flat buffers and reduces them (strategy no_shard)."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        exchange: Exchange,
        number: int,
        *,
        divide_factor: float,
        check_for_nan: bool,
        find_unused_parameters: bool,
    ) -> None:
        """params: those of the plan, in its order. number: of `agree`. divide_factor: sums are divided by it."""
        self.params, self.plan, self.exchange = list(params), plan, exchange
        self.names = [p.name for p in plan.parameters]
        self.buffers = GradientBuffers(self.params, plan)
        self.temporary = TemporaryBuckets(exchange.device)
        self.sync = True
        self.wire_bytes = 0
        self._number, self._cycle = number, 0
        self._divide_factor, self._check_for_nan, self._find_unused = (
            divide_factor,
            check_for_nan,
            find_unused_parameters,
        )
        self._tracker = Tracker(self.names, [p.bucket for p in plan.parameters], len(plan.buckets))
        self._tasks: dict[int, weakref.ref[_BackwardEnd]] = {}  # backwards that have not ended, the outermost first
        self._reducing = False
        self._handles: list[Handle] = []
        self._came = bytearray(len(params))  # in this cycle
        self._nonfinite = ALL_FINITE
        self._bytes_before = 0
        self._failure: str | None = None
        # What the last cycle left in the buffers is the same on all ranks already. Where sums are not divided by the
        # number of ranks it must not be added up again: see _carry.
        self._global = bytearray(len(params))
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_on_grad, weakref.ref(self), i)) for i, p in self._each()
        ]
        if divide_factor != exchange.world_size:
            self._hooks += [p.register_hook(partial(_before_grad, weakref.ref(self), i)) for i, p in self._each()]
        _registry.register(self, self.params)

    def _each(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        return enumerate(self.params)

    def close(self) -> None:
        """Leaves the parameters as they were before, without gradients."""
        for hook in self._hooks:
            hook.remove()
        _registry.unregister(self)
        self.buffers.release()

    @contextmanager
    def synchronizing(self, enabled: bool) -> Iterator[None]:
        """Backwards inside reduce, or do not; the setting before is restored."""
        before, self.sync = self.sync, enabled
        try:
            yield
        finally:
            self.sync = before

    def before_step(self) -> None:
        """An optimizer is about to read the gradients: RuntimeError where they are still this rank's own."""
        for i, param in self._each():
            if self._came[i] and param.grad is not None:
                raise RuntimeError(
                    f"step() with gradients that no rank has reduced (parameter {self.names[i]!r} and perhaps others): "
                    "the last backward ran under no_sync(). Leave no_sync() for the last micro-batch, or call "
                    "zero_grad() to drop them."
                )

    # -- during backward ------------------------------------------------------------------------------------------

    def gradient_came(self, i: int) -> None:
        """Autograd has accumulated into `.grad` of parameter i."""
        self._enter_backward()
        self._check_parameter(i)
        self.buffers.take(i)
        self._came[i] = _CAME
        if self._reducing and self._tracker.mark(i):
            self._send_complete()

    def gradient_comes(self, i: int) -> None:
        """Autograd is about to accumulate into `.grad` of parameter i."""
        self._carry(i)

    def _enter_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        if any(end() is None for end in self._tasks.values()):
            self._abandon_backward()
        if not self._tasks:
            if self._failure is not None:
                raise RuntimeError(f"gradients cannot be reduced any more: {self._failure}")
            self._reducing = self.sync
            self._bytes_before = self.exchange.bytes_sent
            self._nonfinite = ALL_FINITE
            self._tracker.reset()
        end = _BackwardEnd(self, task)
        Variable._execution_engine.queue_callback(end)
        self._tasks[task] = weakref.ref(end)

    def _abandon_backward(self) -> None:
        """The last backward raised. What it sent is waited for, as the other ranks sent it too, and worth nothing."""
        self._tasks.clear()
        handles, self._handles = self._handles, []
        if self._reducing:
            self._reducing = False
            self._cycle += 1
            self._wait(handles)

    def _check_parameter(self, i: int) -> None:
        dtype, planned = self.params[i].dtype, self.plan.parameters[i].param_dtype
        if dtype != planned:
            raise RuntimeError(
                f"parameter {self.names[i]!r} became {dtype} after parallelize planned its gradients for {planned}: "
                "convert the model first, or call parallelize again"
            )

    def _carry(self, i: int) -> None:
        """Counts what an earlier reduction left in `.grad` once in the next sum: rank 0 alone brings it."""
        if not self._global[i]:
            return
        self._global[i] = False
        if self.buffers.holds(i):
            with torch.no_grad():
                self.buffers.view(i).mul_(self._divide_factor if self.exchange.rank == 0 else 0.0)

    def _send_complete(self) -> None:
        while (bucket := self._tracker.next()) is not None:
            self._send(bucket)

    def _send(self, b: int) -> None:
        planned, main = self.plan.buckets[b], self.buffers.buckets[b]
        if self._check_for_nan:
            self._look_for_nan(b)
        wire: torch.Tensor = main
        install: Callable[[], None] | None = None
        if planned.grad_comm_dtype != planned.main_grads_dtype:
            wire = self.temporary.take(b, main.numel(), planned.grad_comm_dtype)
            none, begin = main.new_empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
            _ops.call("bucket_pack_", [main], begin, wire, none)

            def install() -> None:
                _ops.call("bucket_unpack_", wire, none, begin, [main])
                self.temporary.give_back(b)

        handle = self.exchange.all_reduce(
            wire,
            tag=tag(self._number, self._cycle, b),
            scale=1.0 / self._divide_factor,
            what=self._bucket_name(b),
            then=install,
        )
        self._handles.append(handle)

    def _bucket_name(self, b: int) -> str:
        members = self.buffers.members[b]
        first, last = self.names[members[0]], self.names[members[-1]]
        names = repr(first) if first == last else f"{first!r} ... {last!r}"
        return f"gradients of cycle {self._cycle}, bucket {b} of {len(self.plan.buckets)} ({names})"

    def _look_for_nan(self, b: int) -> None:
        if self._nonfinite == ALL_FINITE:
            members = self.buffers.members[b]
            bad = first_nonfinite([self.buffers.view(i) for i in members])
            self._nonfinite = ALL_FINITE if bad == ALL_FINITE else members[bad]

    # -- at its end -----------------------------------------------------------------------------------------------

    def backward_ended(self, task: int) -> None:
        """Of one graph task; a nested one (reentrant checkpointing) leaves the end to the outermost."""
        self._tasks.pop(task, None)
        if self._tasks or not self._reducing:
            return
        # First the parameters that did not come, since their buckets are about to leave.
        for i in self._tracker.finish():
            self._settle(i)
        self._send_complete()
        reports = self._close_cycle()
        self._check_reports(reports)

    def _settle(self, i: int) -> None:
        """Parameter i did not come in this backward: its range of the bucket becomes what its `.grad` says."""
        if not self._came[i] and not self.params[i].requires_grad:
            self._came[i] = _FROZEN
        if self.params[i].grad is None:
            self.buffers.drop(i)
            return
        if self._divide_factor != self.exchange.world_size:
            self._carry(i)
        self.buffers.take(i)

    def _close_cycle(self) -> list[torch.Tensor]:
        """Exchanges this rank's report, waits for the buckets, installs the sums; every rank's report."""
        header = torch.tensor([self._cycle, self._nonfinite], dtype=torch.int64).view(torch.uint8)
        report = torch.cat([header, torch.frombuffer(self._came, dtype=torch.uint8)]).to(self.exchange.device)
        handles, self._handles = self._handles, []
        try:
            what = f"end of gradient cycle {self._cycle}"
            gather = self.exchange.all_gather(report, tag=tag(self._number, self._cycle, MAX_BUCKETS), what=what)
        except RuntimeError as error:
            self._failure = str(error)
            raise
        self._wait(handles)
        reports = [r.cpu() for r in self._guarded(gather)]
        self._reducing = False
        self._cycle += 1
        self._came = bytearray(len(self.params))
        self._global = bytearray(b"\1" * len(self.params))
        self.wire_bytes = self.exchange.bytes_sent - self._bytes_before
        # The exchange writes behind autograd's back.
        torch.autograd.graph.increment_version(self.buffers.flats)
        anywhere = torch.stack(reports)[:, header.numel() :].eq(_CAME).any(dim=0).tolist()
        for i, came in enumerate(anywhere):
            if came:  # a parameter that came nowhere keeps its `.grad`, None included
                self.buffers.install(i)
        return reports

    def _wait(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            self._guarded(handle.result)

    def _guarded(self, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except RuntimeError as error:
            # The ranks are not at the same place any more, and no later message could tell.
            self._failure = str(error)
            raise

    def _check_reports(self, reports: Sequence[torch.Tensor]) -> None:
        header = 2 * 8
        found: list[str] = []
        for rank, report in enumerate(reports):
            cycle, nonfinite = report[:header].view(torch.int64).tolist()
            if cycle != self._cycle - 1:
                self._failure = (
                    f"rank {rank} is in gradient cycle {cycle} and rank {self.exchange.rank} in {self._cycle - 1}"
                )
                raise RuntimeError(self._failure)
            if nonfinite != ALL_FINITE:
                found.append(f"{self.names[nonfinite]!r} on rank {rank}")
        if found:
            raise RuntimeError(
                f"gradients with NaN or Inf before communication (check_for_nan_in_grad): {', '.join(found)}. "
                "Nothing was stepped; call zero_grad() before going on."
            )
        if not self._find_unused:
            self._check_all_came([report[header:] for report in reports])

    def _check_all_came(self, came: Sequence[torch.Tensor]) -> None:
        absent = {rank: states.eq(_ABSENT).nonzero().flatten().tolist() for rank, states in enumerate(came)}
        absent = {rank: params for rank, params in absent.items() if params}
        if not absent:
            return
        shown = 8
        parts = []
        for rank, params in absent.items():
            names = ", ".join(repr(self.names[i]) for i in params[:shown])
            more = f" and {len(params) - shown} more" if len(params) > shown else ""
            parts.append(f"{names}{more} on rank {rank}")
        raise RuntimeError(
            f"no gradient came for {'; '.join(parts)}. The loss does not depend on the parameter, or it was replaced "
            "after parallelize, or checkpointing runs with use_reentrant=True. If parameters may be unused, call "
            "parallelize(..., find_unused_parameters=True): they then count as zero. Call zero_grad() before going on."
        )


# Hooks hold the engine weakly: the parameters must not keep it alive.


def _on_grad(engine: "weakref.ref[Engine]", i: int, _param: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.gradient_came(i)


def _before_grad(engine: "weakref.ref[Engine]", i: int, _grad: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.gradient_comes(i)
