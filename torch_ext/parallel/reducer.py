"""The reducer of one parallelized model with buckets: drives the gradient cycle (Note [the cycle] in
csrc/torch_ext_cycle.h) between autograd, a strategy that holds the gradients, and a communicator that moves them.

The end of backward waits for the sums, so that everything after `loss.backward()` sees them.
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

from torch_ext.comm.communicator import IN_FLIGHT, MAX_BUCKETS, Work, tag
from torch_ext.comm.init_sync import agree
from torch_ext.comm.wire import WireBuffer
from torch_ext.grads.errors import refuse_busy
from torch_ext.grads.stats import ALL_FINITE, Watch, first_nonfinite
from torch_ext.parallel.bucket_joining import BucketJoining
from torch_ext.parallel.bucket_plan import BucketPlan
from torch_ext.parallel.cycle import (
    ACCUMULATING,
    GRAD_IN_PLACE,
    GRAD_NONE,
    GRAD_OTHER,
    IDLE,
    RECOVERING,
    REDUCING,
    STEP_WHEN_REDUCED,
    Action,
    Cycle,
    Options,
)
from torch_ext.parallel.param_buffers import ParamBuffers
from torch_ext.parallel.reducer_base import BackwardEnd, ReducerBase, hook, queue_backward_end, tensors_with_graph
from torch_ext.parallel.strategies.strategy import ShardingStrategy
from torch_ext.params import reducer_registry
from torch_ext.params.local_shard import LocalShard
from torch_ext.tensors import offload_guard

Replan: TypeAlias = Callable[[Sequence[int]], BucketPlan]
"""From a permutation of the parameters, in the order of placement, to a plan."""


_DISORDERED = 1 / 8
"""Compression is given up where it made more of the messages than this no shorter."""


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
        self._number, self._gathers = number, 0
        self._check_for_nan = check_for_nan
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
        # The first cycle that reduces shows the order of gradients: its buckets are sent at its end, laid out anew.
        self._reorders = strategy.can_rebuild and self.communicator.world_size > 1 and len(self.plan.buckets) > 1
        self._follow_plan()
        self._options = Options(
            strategy.kind,
            self.communicator.rank,
            self.communicator.world_size,
            IN_FLIGHT,
            check_for_nan=check_for_nan,
            times=self._coalescing.enabled,
            find_unused=find_unused_parameters,
            scales_sums=strategy.divide_factor != self.communicator.world_size,
        )
        super().__init__(strategy.params, [p.name for p in strategy.plan.parameters], self._cycle_of_plan())
        if strategy.adds_to_sums:
            self._hooks += [p.register_hook(hook(self.before_accumulate, i)) for i, p in enumerate(self.params)]
        self._tasks: dict[int, weakref.ref[BackwardEnd]] = {}  # backwards that have not ended, the outermost first
        self._begun = -1  # the task in which the last gradient was ready
        self._handles: list[Work] = []  # by message, of this backward
        self._read_reports: Callable[[], list[torch.Tensor]] | None = None  # which are under way
        self._sent_at_once = False  # all buckets of this backward were kept until its end
        self._watch = Watch()
        self._versions: list[int] = []  # of the gradients, when the last cycle ended

    @property
    def plan(self) -> BucketPlan:
        return self.strategy.plan

    def _cycle_of_plan(self, replaces: Cycle | None = None) -> Cycle:
        planned, buckets = self.plan.parameters, self.plan.buckets
        return Cycle(
            self._options,
            [p.name for p in planned],
            bucket_of=[p.bucket for p in planned],
            buffer_of=[b.buffer for b in buckets],
            reorder=self._reorders,
            replaces=replaces,
        )

    def _follow_plan(self) -> None:
        compresses = self.communicator.compresses
        below, sharded = self._compress_below, self.strategy.sharded
        self._coalescing = BucketJoining(self.plan, self._may_coalesce, below, compresses, sharded)
        self._labels: dict[range, str] = {}

    def close(self) -> None:
        """Leaves the parameters as they were before, without gradients."""
        if self.cycle.partly_stepped:
            warnings.warn(
                f"torch_ext: parallelize again, after {self.cycle.failure}, unless one was loaded since: rank 0's "
                "weights become those of every rank",
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
        if self.weights is None:
            return
        if (failure := self.cycle.failure) is not None:
            raise RuntimeError(f"{doing} after an exchange that failed: {failure}")
        self.communicator.refuse_gone(doing)

    def before_step(self) -> None:
        """An optimizer is about to read the gradients: RuntimeError where they are still this rank's own."""
        self.finish_failed_backward()
        self._check_again()
        self.refuse_gone("step()")
        self.cycle.check_step(i for i in range(len(self.params)) if self.strategy.unreduced(i))

    def _check_again(self) -> None:
        """Gradients that were not finite. The same on every rank: a mean that all ranks have is read again, a sharded
        one stays suspect."""
        for i in self.cycle.nonfinite():
            grad = self.strategy.grad(i)
            if grad is None or (not self.strategy.sharded and first_nonfinite([grad]) == ALL_FINITE):
                self.cycle.is_finite(i)

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
        refuse_busy(doing, self.forwards_running, bool(self._tasks) or self.cycle.phase != IDLE)
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
        self.cycle.zero(range(len(self.params)))

    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        self.finish_failed_backward()  # or sums under way would be written to what is zero now
        positions = self._positions(params)
        self.strategy.zero(positions)
        self.cycle.zero(positions)

    # -- during backward ------------------------------------------------------------------------------------------

    def grad_ready(self, i: int) -> None:
        self._begin_backward()
        self._check_dtype(i)
        self.strategy.grad_ready(i)
        self.communicator.ordering.record_producer()
        if self.cycle.ready(i):
            self.run()

    def before_accumulate(self, i: int) -> None:
        """Autograd is about to accumulate into `.grad` of parameter i, or (torch.autograd.grad) to return its
        gradient."""
        grad = self._kind_of_grad(i)
        if grad != GRAD_NONE:
            if not _accumulates(self.params[i]):
                return
            self._begin_backward()
        if flags := self.cycle.accumulate(i, grad):
            self.strategy.prepare(i, flags)

    def _kind_of_grad(self, i: int) -> int:
        if self.params[i].grad is None:
            return GRAD_NONE
        return GRAD_IN_PLACE if self.strategy.in_place(i) else GRAD_OTHER

    def register_outputs(self, outputs: Any) -> None:
        """Of a forward: a backward through these tensors begins there, as reentrant checkpoints may hold every
        parameter."""
        for output in tensors_with_graph(outputs):
            output.register_hook(hook(self.enter_graph_task))

    def _begin_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._begun:
            return
        self.enter_graph_task()
        self._begun = task
        if self.cycle.phase != IDLE:
            return
        self.cycle.refuse_failed()
        self._bucket_steps = self._steps_of_this_backward()
        self.cycle.begin(sync=self.require_grad_sync, steps=bool(self._bucket_steps))
        self.strategy.begin_backward(self.cycle.phase == REDUCING)
        self._bytes_before = self.communicator.bytes_sent
        self._watch = Watch()
        self._handles, self._read_reports, self._sent_at_once = [], None, False
        self._coalescing.reset()

    def _steps_of_this_backward(self) -> list[Callable[[int], None]]:
        for stepper in self._steppers:
            stepper.refuse_backward()
        # Under no_sync() shards are reduced, too, but more is to come; a frozen parameter is not to be stepped.
        if not self.require_grad_sync or self._reorders or not all(p.requires_grad for p in self.params):
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
        ended = not self._tasks and self.cycle.phase == IDLE
        if ended or (self._tasks and all(end() is not None for end in self._tasks.values())):
            return
        self._tasks.clear()
        self._begun = -1
        # It may have accumulated into a `.grad` of which `grad_ready` was not told.
        self.cycle.died(self.strategy.modified_since(self._versions))
        self.run()  # an interrupt of it leaves the rest for the next time

    def _check_dtype(self, i: int) -> None:
        dtype, planned = self.params[i].dtype, self.plan.parameters[i].param_dtype
        if dtype != planned:
            raise RuntimeError(
                f"parameter {self.names[i]!r} became {dtype} after parallelize planned its gradients for {planned}: "
                "convert the model first, or call parallelize again"
            )

    # -- what the cycle asks for (`CycleDriver.run`) --------------------------------------------------------------

    def do_check(self, action: Action) -> None:
        self._coalescing.complete()
        if self._check_for_nan:
            grads = self.strategy.grads(action.first)
            self.communicator.ordering.wait_producers()
            self._watch.check([grad for _, grad in grads], [i for i, _ in grads])

    def do_send(self, action: Action) -> None:
        buckets = range(action.first, action.end)
        cycle = self.cycle.number
        label = f"gradients of cycle {cycle}, {self._label(buckets)}"
        on_reduced = partial(_step_buckets, self._bucket_steps, buckets) if action.flags & STEP_WHEN_REDUCED else None
        number = tag(self._number, cycle, buckets.start)
        send = partial(self.strategy.send, buckets, cycle=cycle, tag=number, label=label, on_reduced=on_reduced)
        self._handles.append(self.guarded(send))

    def do_wait(self, action: Action) -> None:
        if action.message < len(self._handles):  # else it was interrupted before it was sent
            self.guarded(self._handles[action.message].result)

    def do_inspect(self, action: Action) -> None:
        i = action.first
        if flags := self.cycle.missing(i, self._kind_of_grad(i), self.params[i].requires_grad):
            self.strategy.prepare(i, flags)

    def do_order(self, _action: Action) -> None:
        self._sent_at_once, self._reorders = True, False
        self.guarded(self._rebuild_buckets)

    def do_report(self, _action: Action) -> None:
        if self._check_for_nan:
            self.communicator.ordering.wait_producers()
        trainable = [p.requires_grad for p in self.params]
        report = self.cycle.report(self._watch.first(), trainable, self._words())
        cycle = self.cycle.number
        number, label = tag(self._number, cycle, MAX_BUCKETS), f"end of gradient cycle {cycle}"
        self._read_reports = self.guarded(lambda: self.communicator.all_gather_bytes(report, tag=number, label=label))

    def do_read(self, _action: Action) -> None:
        if self.cycle.phase != RECOVERING and not self._sent_at_once:
            self._coalescing.ended()
        assert self._read_reports is not None
        words = self.cycle.read(self.guarded(self._read_reports), self._words_sent)
        if self._coalescing.learn(words):
            self.cycle.set_messages(self._coalescing.ends)
            if self._compress_below > 0:
                self.communicator.compresses = self._coalescing.compresses

    def do_install(self, _action: Action) -> None:
        self.communicator.ordering.forget_producers()
        self._handles, self._read_reports = [], None
        self._bytes_of_cycle, self._bytes_of_gathers = self.communicator.bytes_sent - self._bytes_before, 0
        self.strategy.end_cycle(self.cycle.anywhere(), self.cycle.left())
        self._versions = self.strategy.versions()

    def do_recovered(self, _action: Action) -> None:
        self._handles, self._read_reports = [], None

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
        if not self._tasks and self.cycle.phase in (ACCUMULATING, REDUCING) and self.cycle.end():
            self.run()

    def _rebuild_buckets(self) -> None:
        """Lays the buckets out in the order in which rank 0's gradients were ready, if that is not the planned one."""
        words = torch.tensor([self._may_replan(), *self.cycle.order], dtype=torch.int64)
        cycle = self.cycle.number
        number, label = tag(self._number, cycle, MAX_BUCKETS), f"the order of gradients in cycle {cycle}"
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
        self.cycle = self._cycle_of_plan(replaces=self.cycle)

    def _words(self) -> torch.Tensor:
        # Once it is so it stays so: messages are counted only as long as they are compressed.
        disordered = self.communicator.disordered > self.communicator.messages * _DISORDERED
        words = self._coalescing.words(disordered)
        self._words_sent = words.numel()
        return words


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
