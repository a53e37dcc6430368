"""When a model's gradients are reduced: the state of one parallelized model between and during backwards.

A cycle is what ends in one reduction: any number of backwards under no_sync, then one that reduces. In that one, each
bucket is sent as soon as its last gradient is ready, while backward goes on; the end of backward waits, so that
everything after `loss.backward()` sees the sums. Ranks end a cycle with a report of which gradients were ready and
whether one was not finite: an error on one rank is an error on every rank, with the same words.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge

from torch_ext.comm.communicator import MAX_BUCKETS, Work, tag
from torch_ext.comm.init_sync import agree
from torch_ext.comm.wire import WireBuffer
from torch_ext.grads.errors import (
    FROZEN,
    MISSING,
    READY,
    refuse_busy,
    refuse_frozen,
    refuse_missing,
    refuse_nonfinite,
    refuse_step,
)
from torch_ext.grads.stats import ALL_FINITE, Watch, first_nonfinite
from torch_ext.parallel.bucket_joining import BucketJoining
from torch_ext.parallel.bucket_plan import BucketPlan
from torch_ext.parallel.cycle_report import HELD, REDUCED, CycleReport, agreed
from torch_ext.parallel.param_buffers import ParamBuffers
from torch_ext.parallel.ready_tracker import ReadyTracker
from torch_ext.parallel.reducer_base import BackwardEnd, ReducerBase, hook, queue_backward_end, tensors_with_graph
from torch_ext.parallel.strategies.strategy import ShardingStrategy
from torch_ext.params import reducer_registry
from torch_ext.params.local_shard import LocalShard
from torch_ext.tensors import offload_guard

Replan: TypeAlias = Callable[[Sequence[int]], BucketPlan]
"""From a permutation of the parameters, in the order of placement, to a plan."""


_DISORDERED = 1 / 8
"""Compression is given up where it made more of the messages than this no shorter."""


_PARTLY_STEPPED = (
    "a backward raised when some of its buckets had been stepped already (step_in_backward=True): weights are partly "
    "those of the next step. Load a checkpoint"
)


class BucketReducer(ReducerBase):
    """Runs the cycles of one model's gradients, which lie where its strategy says (see
    `parallel/strategies/strategy.py`)."""

    def __init__(
        self,
        strategy: ShardingStrategy,
        number: int,
        *,
        check_for_nan: bool,
        find_unused_parameters: bool,
        step_in_backward: bool,
        coalesce: bool,
        compress_below: float,
        replan: Replan,
        may_replan: Callable[[], bool],
    ) -> None:
        """number: of `agree`. coalesce: whether neighbouring buckets may be sent as one. compress_below: Gbit/s; where
        the wire is slower, messages are compressed. replan: the plan for another order of the parameters. may_replan:
        whether on this rank nothing depends on which part of a parameter it has.
        """
        self.strategy, self.communicator = strategy, strategy.communicator
        self.weights = ParamBuffers(strategy.params, strategy.plan) if strategy.sharded else None
        self.require_grad_sync = True
        self._bytes_of_cycle, self._bytes_of_gathers, self._bytes_before = 0, 0, 0
        self._number, self._cycle, self._gathers = number, 0, 0
        self._check_for_nan, self._find_unused = check_for_nan, find_unused_parameters
        self._step_in_backward = step_in_backward
        self._steppers: weakref.WeakSet[reducer_registry.BucketStepper] = weakref.WeakSet()
        self._bucket_steps: list[Callable[[int], None]] = []  # of this backward: each steps a bucket that is reduced
        self._replan, self._may_replan = replan, may_replan
        measures = self.communicator.world_size > 1 and not self.communicator.deferring
        self._may_coalesce = coalesce and measures
        self._compress_below = 0.0
        if measures and self.communicator.can_compress:
            # What is sent for each byte of a bucket: parts, and where all ranks get the sum those of it, too.
            sent = (1 - 1 / self.communicator.world_size) * (1 if strategy.sharded else 2)
            self._compress_below = compress_below / sent
        if math.isinf(self._compress_below):
            self.communicator.compresses, self._compress_below = True, 0.0
        super().__init__(strategy.params, [p.name for p in strategy.plan.parameters])
        if strategy.adds_to_sums:
            self._hooks += [p.register_hook(hook(self.before_accumulate, i)) for i, p in enumerate(self.params)]
        self._follow_plan()
        # The first cycle that reduces shows the order of gradients: its buckets are sent at its end, laid out anew.
        self._rebuild_pending = strategy.can_rebuild and self.communicator.world_size > 1 and len(self.plan.buckets) > 1
        self._tasks: dict[int, weakref.ref[BackwardEnd]] = {}  # backwards that have not ended, the outermost first
        self._began = False  # the first gradient of a backward was ready
        self._reducing = False
        self._handles: list[Work] = []
        self._report: Callable[[], list[torch.Tensor]] | None = None  # which is under way at the end of a cycle
        self._watch = Watch()
        self._partly_stepped = False
        self._grad_state = bytearray(len(self.params))  # in this cycle
        # The last cycle left a sum over ranks: it must not be added up again (ShardingStrategy.before_accumulate).
        self._already_reduced = bytearray(len(self.params))
        self._versions: list[int] = []  # of the gradients, when the last cycle ended

    @property
    def plan(self) -> BucketPlan:
        return self.strategy.plan

    def _follow_plan(self) -> None:
        self._tracker = ReadyTracker(self.names, [p.bucket for p in self.plan.parameters], len(self.plan.buckets))
        compresses = self.communicator.compresses
        below, sharded = self._compress_below, self.strategy.sharded
        self._coalescing = BucketJoining(self.plan, self._may_coalesce, below, compresses, sharded)
        self._labels: dict[range, str] = {}

    def close(self) -> None:
        """Leaves the parameters as they were before, without gradients."""
        if self._partly_stepped:
            warnings.warn(
                f"torch_ext: parallelize again, after {_PARTLY_STEPPED}, unless one was loaded since: rank 0's weights "
                "become those of every rank",
                stacklevel=3,
            )
        self.detach()
        self.strategy.release()
        if self.weights is not None:
            self.weights.release()

    @property
    def wire_bytes(self) -> int:
        """Sent in the last cycle that ended, and for the weights gathered since."""
        return self._bytes_of_cycle + self._bytes_of_gathers

    @contextmanager
    def synchronizing(self, enabled: bool) -> Iterator[None]:
        """Backwards inside reduce, or do not; the setting before is restored."""
        before, self.require_grad_sync = self.require_grad_sync, enabled
        try:
            yield
        finally:
            self.require_grad_sync = before

    def refuse_gone(self, doing: str) -> None:
        if self._failure is None and self.weights is not None:
            self.communicator.refuse_gone(doing)
        elif self.weights is not None:
            raise RuntimeError(f"{doing} after an exchange that failed: {self._failure}")

    def before_step(self) -> None:
        """An optimizer is about to read the gradients: RuntimeError where they are still this rank's own."""
        self.finish_failed_backward()
        nonfinite = [self.names[i] for i in sorted(self._nonfinite) if self._is_nonfinite(i)]
        refuse_step(self._failure, bool(self._broken), nonfinite)
        self.refuse_gone("step()")
        for i, name in enumerate(self.names):
            if (self._grad_state[i] or self.strategy.every_backward) and self.strategy.unreduced(i):
                raise RuntimeError(
                    f"step() with gradients that no rank has reduced (parameter {name!r} and perhaps others): "
                    "the last backward ran under no_sync(), or raised, or `.grad` was assigned where gradients are "
                    "sharded. Leave no_sync() for the last micro-batch, or call zero_grad() to drop them."
                )

    def _is_nonfinite(self, i: int) -> bool:
        """Still. The same on every rank: a mean that all ranks have is read again, a sharded one stays suspect."""
        grad = self.strategy.grad(i)
        return grad is not None and (self.strategy.sharded or first_nonfinite([grad]) != ALL_FINITE)

    # -- for optimizers: see reducer_registry.GradientReducer ----------------------------------------------------------

    @property
    def sharded(self) -> bool:
        return self.strategy.sharded

    @property
    def ranks(self) -> frozenset[int]:
        return self.communicator.ranks

    def local(self, param: torch.Tensor) -> LocalShard:
        i = self._position[id(param)]
        if self.weights is None:
            return LocalShard(param, 0, (), None)
        self.weights.check(i)
        planned = self.plan.parameters[i]
        flat = self.weights.flats[planned.buffer]
        if i not in self.strategy.owned:
            return LocalShard(flat[:0], 0, (self.communicator.group,), planned.bucket)
        bucket, piece = self.strategy.owned[i]
        begin = planned.start + piece.first
        return LocalShard(flat[begin : begin + piece.numel], piece.first, (self.communicator.group,), bucket)

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        i = self._position[id(param)]
        self._check_dtype(i)
        return self.strategy.grad(i)

    def part(self, param: torch.Tensor) -> torch.Tensor:
        return self.strategy.part(self._position[id(param)])

    def offer(self, stepper: reducer_registry.BucketStepper) -> None:
        if self._step_in_backward:
            self._steppers.add(stepper)

    def stats(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        with_grads = sum(self.strategy.grad(i) is not None for i in range(len(self.params)))
        if self.strategy.versions() != self._versions or len(params) != with_grads:
            return None
        return self.strategy.stats.clone()

    def gather(self, bucket: int) -> Work:
        assert self.weights is not None
        self._gathers += 1
        before = self.communicator.bytes_sent
        start = partial(
            self.communicator.all_gather_into_buffer,
            WireBuffer.of(self.weights.buckets[bucket]),
            tag=tag(self._number, self._gathers, bucket),
            label=f"weights of {self._label(range(bucket, bucket + 1))}",
        )
        handle = self.guarded(start)
        self._bytes_of_gathers += self.communicator.bytes_sent - before
        return _WeightGather(self, handle)

    def refuse_moving(self, doing: str, weights: bool) -> None:
        self.finish_failed_backward()
        refuse_busy(doing, self.forwards_running, bool(self._tasks) or self._began or bool(self._handles))
        if any(stepper.stepped_in_backward() for stepper in self._steppers):
            raise RuntimeError(
                f"{doing} between a backward that stepped (step_in_backward=True) and step(), which brings the other "
                "ranks' weights: call step() first"
            )
        if weights and self.weights is not None:
            self.weights.refuse_lent(doing)

    def gradient_memory(self) -> Sequence[torch.Tensor]:
        return self.strategy.memory

    def gradients_released(self) -> None:
        self._forget(range(len(self.params)))

    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        self.finish_failed_backward()  # or sums under way would be written to what is zero now
        positions = self._positions(params)
        self.strategy.zero(positions)
        self._forget(positions)

    def _forget(self, positions: Iterable[int]) -> None:
        for i in positions:
            self._grad_state[i] = MISSING
        super()._forget(positions)

    # -- during backward ------------------------------------------------------------------------------------------

    def grad_ready(self, i: int) -> None:
        self._begin_backward()
        self._check_dtype(i)
        self.strategy.grad_ready(i)
        self.communicator.ordering.record_producer()
        self._grad_state[i], self._already_reduced[i] = READY, False
        if self._reducing and self._tracker.mark(i) and not self._rebuild_pending:
            self._send_complete()

    def before_accumulate(self, i: int) -> None:
        """Autograd is about to accumulate into `.grad` of parameter i, or (torch.autograd.grad) to return its
        gradient."""
        if self.params[i].grad is None:
            self.strategy.before_accumulate(i, False)
        elif _accumulates(self.params[i]):
            self._begin_backward()
            self.strategy.before_accumulate(i, self._take_reduced(i))

    def _take_reduced(self, i: int) -> bool:
        """Whether `.grad` of parameter i is what an earlier reduction left; from here on it counts as this rank's."""
        reduced, self._already_reduced[i] = bool(self._already_reduced[i]) and self.strategy.in_place(i), False
        return reduced

    def register_outputs(self, outputs: Any) -> None:
        """Of a forward: a backward through these tensors begins there, as reentrant checkpoints may hold every
        parameter."""
        for output in tensors_with_graph(outputs):
            output.register_hook(hook(self.enter_graph_task))

    def _begin_backward(self) -> None:
        self.enter_graph_task()
        if self._began:
            return
        self._refuse_failed()
        self._began = True
        self._reducing = self.require_grad_sync or self.strategy.every_backward
        self.strategy.begin_backward(self._reducing)
        self._bytes_before = self.communicator.bytes_sent
        self._watch = Watch()
        self._tracker.reset()
        self._coalescing.reset()
        self._bucket_steps = self._steps_of_this_backward()

    def _steps_of_this_backward(self) -> list[Callable[[int], None]]:
        for stepper in self._steppers:
            stepper.refuse_backward()
        # Under no_sync() shards are reduced, too, but more is to come; a frozen parameter is not to be stepped.
        if not self.require_grad_sync or self._rebuild_pending or not all(p.requires_grad for p in self.params):
            return []
        return [step for one in self._steppers if (step := one.begin_stepping(self)) is not None]

    def enter_graph_task(self) -> None:
        """In a graph task that may bring gradients: it is known from here on, and so is its end."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        offload_guard.refuse_gradients(self.params, "backward")
        self.finish_failed_backward()
        self._tasks[task] = queue_backward_end(self.backward_ended, task)

    def finish_failed_backward(self) -> None:
        """If the last backward raised: waits for what it sent, as the other ranks sent it too, and discards it."""
        ended = not self._tasks and not self._began
        if ended or (self._tasks and all(end() is not None for end in self._tasks.values())):
            return
        # It may have accumulated into a `.grad` of which `grad_ready` was not told.
        for i in self.strategy.modified_since(self._versions):
            self._grad_state[i] = READY
        if self._reducing and self._failure is None:  # an interrupt of it leaves everything for the next time
            self._wait(self._handles)
            if self._report is not None:
                self._read(self._report)
        self._tasks.clear()
        self._began = False
        handles, self._handles, self._report = self._handles, [], None
        if self._reducing:
            self._reducing = False
            if self.strategy.every_backward:
                self._grad_state = bytearray(len(self.params))
                self._broken.update(range(len(self.params)) if handles else ())
            self._cycle += 1
            self._notice_partly_stepped(bool(handles))
            for i, p in enumerate(self.plan.parameters):
                self._already_reduced[i] |= p.bucket < self._coalescing.sent  # buckets are sent in ascending order

    def _notice_partly_stepped(self, sent: bool) -> None:
        """A backward that ends in an error cannot be undone where its first buckets were stepped."""
        if sent and self._bucket_steps and self._failure is None:
            self._failure, self._partly_stepped = _PARTLY_STEPPED, True

    def _check_dtype(self, i: int) -> None:
        dtype, planned = self.params[i].dtype, self.plan.parameters[i].param_dtype
        if dtype != planned:
            raise RuntimeError(
                f"parameter {self.names[i]!r} became {dtype} after parallelize planned its gradients for {planned}: "
                "convert the model first, or call parallelize again"
            )

    def _send_complete(self) -> None:
        while (bucket := self._tracker.next()) is not None:
            if self._check_for_nan:
                grads = self.strategy.grads(bucket)
                self.communicator.ordering.wait_producers()
                self._watch.check([grad for _, grad in grads], [i for i, _ in grads])
            if (together := self._coalescing.complete(bucket)) is not None:
                self._send(together)

    def _send(self, buckets: range) -> None:
        label = f"gradients of cycle {self._cycle}, {self._label(buckets)}"
        on_reduced = partial(_step_buckets, self._bucket_steps, buckets) if self._bucket_steps else None
        number = tag(self._number, self._cycle, buckets.start)
        send = partial(self.strategy.send, buckets, cycle=self._cycle, tag=number, label=label, on_reduced=on_reduced)
        self._handles.append(self.guarded(send))

    def _label(self, buckets: range) -> str:
        """Names buckets in messages."""
        label = self._labels.get(buckets)
        if label is None:
            members = [i for b in buckets for i in self.plan.in_bucket(b)]
            first, last = self.names[members[0]], self.names[members[-1]]
            which = f"bucket {buckets[0]}" if len(buckets) == 1 else f"buckets {buckets[0]} to {buckets[-1]}"
            names = repr(first) if first == last else f"{first!r} ... {last!r}"
            label = self._labels[buckets] = f"{which} of {len(self.plan.buckets)} ({names})"
        return label

    # -- at its end -----------------------------------------------------------------------------------------------

    def backward_ended(self, task: int) -> None:
        """Of one graph task; a nested one (reentrant checkpointing) leaves the end to the outermost."""
        self._tasks.pop(task, None)
        if self._tasks or not self._reducing:
            self._began &= bool(self._tasks)
            return
        # First the parameters without a gradient, since their buckets are about to be sent.
        for i in self._tracker.finish():
            self._mark_missing(i)
        at_once, self._rebuild_pending = self._rebuild_pending, False
        if at_once:
            self.guarded(self._rebuild_buckets)
        self._send_complete()
        reports = self._end_cycle(at_once)
        try:
            self._check_reports(reports)
        except RuntimeError:
            self._notice_partly_stepped(sent=True)
            raise

    def _mark_missing(self, i: int) -> None:
        """Parameter i got no gradient in this backward: its range of the bucket becomes what its `.grad` says."""
        held, reduced = self.params[i].grad is not None, self._take_reduced(i)
        if not held and not self.strategy.every_backward:
            self._grad_state[i] = MISSING  # an earlier one of this cycle was dropped
        if not self._grad_state[i] and not self.params[i].requires_grad:
            self._grad_state[i] = FROZEN
        if held:
            self._grad_state[i] |= REDUCED if reduced else HELD
        self.strategy.grad_missing(i, reduced)

    def _rebuild_buckets(self) -> None:
        """Lays the buckets out in the order in which rank 0's gradients were ready, if that is not the planned one."""
        words = torch.tensor([self._may_replan(), *self._tracker.order()], dtype=torch.int64)
        number, label = tag(self._number, self._cycle, MAX_BUCKETS), f"the order of gradients in cycle {self._cycle}"
        gathered = self.communicator.all_gather_bytes(words.view(torch.uint8), tag=number, label=label)()
        rows = [row.view(torch.int64).tolist() for row in gathered]
        if not all(may for may, *_ in rows):
            return
        plan = self._replan(rows[0][1:])
        if plan.fingerprint == self.plan.fingerprint:
            return
        agree(self.communicator, caller="the new plan", fingerprint=plan.fingerprint, lines=plan.lines(), failure=None)
        if self.weights is not None:
            self.weights = ParamBuffers(self.params, plan)
        self.strategy = self.strategy.rebuilt(plan)
        reducer_registry.laid_out_anew(self)
        self._follow_plan()
        self._tracker.finish()

    def _end_cycle(self, at_once: bool) -> list[CycleReport]:
        """Exchanges this rank's report, waits for the buckets, installs the sums; every rank's report. at_once: whether
        all buckets were kept until the end."""
        if self._check_for_nan:
            self.communicator.ordering.wait_producers()
        frozen = (0 if p.requires_grad else FROZEN for p in self.params)
        states = bytearray(state | bit for state, bit in zip(self._grad_state, frozen, strict=True))
        report = CycleReport.of(self._cycle, self._watch.first(), self._words(), states)
        number, label = tag(self._number, self._cycle, MAX_BUCKETS), f"end of gradient cycle {self._cycle}"
        self._report = self.guarded(lambda: self.communicator.all_gather_bytes(report, tag=number, label=label))
        self._wait(self._handles)
        if not at_once:
            self._coalescing.ended()
        reports = self._read(self._report)
        self.communicator.ordering.forget_producers()
        self._handles, self._report = [], None
        self._began = self._reducing = False
        self._cycle += 1
        self._grad_state = bytearray(len(self.params))
        self._already_reduced = bytearray(b"\1" * len(self.params))
        self._bytes_of_cycle, self._bytes_of_gathers = self.communicator.bytes_sent - self._bytes_before, 0
        self.strategy.end_cycle(*agreed([report.grad_states for report in reports]))
        self._versions = self.strategy.versions()
        return reports

    def _read(self, gathered: Callable[[], list[torch.Tensor]] | None) -> list[CycleReport]:
        """Every rank's report, and what there is to learn from them for the next cycle."""
        assert gathered is not None
        reports = [CycleReport.read(row, len(self.params)) for row in self.guarded(gathered)]
        self._report = None  # nothing is learnt from it twice
        if self._coalescing.learn([report.words for report in reports]) and self._compress_below > 0:
            self.communicator.compresses = self._coalescing.compresses
        return reports

    def _words(self) -> torch.Tensor:
        # Once it is so it stays so: messages are counted only as long as they are compressed.
        disordered = self.communicator.disordered > self.communicator.messages * _DISORDERED
        return self._coalescing.words(disordered)

    def _wait(self, handles: Sequence[Work]) -> None:
        for handle in handles:
            self.guarded(handle.result)

    def _check_reports(self, reports: Sequence[CycleReport]) -> None:
        for rank, report in enumerate(reports):
            if report.cycle != self._cycle - 1:
                self._failure = (
                    f"rank {rank} is in gradient cycle {report.cycle} and rank {self.communicator.rank} in "
                    f"{self._cycle - 1}"
                )
                raise RuntimeError(self._failure)
        nonfinite = [report.nonfinite for report in reports]
        self._nonfinite.update(i for i in nonfinite if i != ALL_FINITE)
        refuse_nonfinite(self.names, nonfinite)
        states = [report.grad_states for report in reports]
        refuse_frozen(self.names, states)
        if not self._find_unused:
            refuse_missing(self.names, states)


class _WeightGather:
    """A bucket of weights that is being gathered: a failure of it is the reducer's."""

    def __init__(self, reducer: BucketReducer, handle: Work) -> None:
        self._reducer, self._handle = reducer, handle

    def result(self) -> None:
        self._reducer.guarded(self._handle.result)


def _accumulates(param: torch.Tensor) -> bool:
    """Whether the running backward accumulates into `.grad`, as that of torch.autograd.grad does not."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch's answer for a gradient that is returned
        return False


def _step_buckets(steps: Sequence[Callable[[int], None]], buckets: range) -> None:
    for step, bucket in product(steps, buckets):
        step(bucket)
