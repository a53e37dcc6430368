"""The exchange of one parallelized model's buckets: runs the actions of its gradient cycle (Note [the cycle] in
csrc/torch_ext_cycle.h). A strategy stores the gradients, a communicator sends them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, TypeAlias

import torch

from torch_ext.comm.communicator import IN_FLIGHT, MAX_BUCKETS, Work, tag
from torch_ext.comm.init_sync import agree
from torch_ext.comm.wire import WireBuffer
from torch_ext.grads.stats import ALL_FINITE, Watch, first_nonfinite
from torch_ext.parallel.bucket_plan import BucketPlan
from torch_ext.parallel.cycle import (
    GRAD_IN_PLACE,
    GRAD_NONE,
    GRAD_OTHER,
    IF_SENT,
    REDUCING,
    STEP_WHEN_REDUCED,
    Action,
    Cycle,
    Exchange,
    Options,
)
from torch_ext.parallel.param_buffers import ParamBuffers
from torch_ext.parallel.sent_bytes import SentBytes
from torch_ext.parallel.strategies.strategy import ShardingStrategy

Replan: TypeAlias = Callable[[Sequence[int]], BucketPlan]
"""Makes the plan for a permutation of the parameters, given in order of placement."""


class Settings(NamedTuple):
    """The settings from `parallelize`, equal on every rank except for the result of `may_replan`."""

    check_for_nan: bool
    find_unused_parameters: bool
    step_in_backward: bool
    replan: Replan
    """Makes the plan for another order of the parameters."""
    may_replan: Callable[[], bool]
    """Whether this rank allows another layout: it has nothing, such as optimizer state, that is sharded by this one."""


class BucketExchange(Exchange):
    """Runs the gradient exchange for one reducer's parameters. `i` is a parameter's position in the plan, `b` a
    bucket's."""

    def __init__(
        self, strategy: ShardingStrategy, number: int, settings: Settings, on_layout_change: Callable[[], None]
    ) -> None:
        """number: from `agree`. on_layout_change: called after the parameters got another layout."""
        self.strategy, self.communicator, self.params = strategy, strategy.communicator, strategy.params
        self.weights = ParamBuffers(strategy.params, strategy.plan) if strategy.sharded else None
        self._settings, self._on_layout_change = settings, on_layout_change
        self.sent = SentBytes([self.communicator])
        self._number, self._gathers = number, 0
        self._weight_gathers: list[Work] = []  # by message; emptied once all were waited for
        self.communicator.compresses = self.communicator.can_compress and strategy.plan.messages.compressed
        self.reorders = strategy.can_rebuild and self.communicator.world_size > 1 and len(strategy.plan.buckets) > 1
        """Whether the next cycle that reduces sends nothing before its end: it records the order in which gradients are
        ready, rebuilds the buckets in this order, and then sends them."""
        self.versions: list[int] = []
        """Version counters of the gradients at the end of the last cycle."""
        self._labels: dict[range, str] = {}
        self.cycle = self._cycle_of_plan()
        self._reset([])

    def _reset(self, bucket_steps: list[Callable[[int], None]]) -> None:
        """Clears what belongs to one backward. bucket_steps: functions that each step one reduced bucket."""
        self._bucket_steps = bucket_steps
        self._handles: list[Work] = []  # by message
        self._read_reports: Callable[[], list[torch.Tensor]] | None = None  # waits for the ranks' reports
        self._watch = Watch()

    def _cycle_of_plan(self, replaces: Cycle | None = None) -> Cycle:
        planned, buckets = self.strategy.plan.parameters, self.strategy.plan.buckets
        world_size = self.communicator.world_size
        options = Options(
            self.strategy.kind,
            self.communicator.rank,
            world_size,
            IN_FLIGHT,
            check_for_nan=self._settings.check_for_nan,
            find_unused=self._settings.find_unused_parameters,
            scales_sums=self.strategy.divide_factor != world_size,
        )
        made = Cycle(
            options,
            [p.name for p in planned],
            bucket_of=[p.bucket for p in planned],
            buffer_of=[b.buffer for b in buckets],
            reorder=self.reorders,
            replaces=replaces,
        )
        made.set_messages(self.strategy.plan.messages.ends)
        return made

    def begin(self, sync: bool, bucket_steps: list[Callable[[int], None]]) -> None:
        """Starts a backward. sync: False under no_sync(). bucket_steps: functions that each step one reduced bucket."""
        self.cycle.begin(sync=sync, steps=bool(bucket_steps))
        reduces = self.cycle.phase == REDUCING
        self.strategy.begin_backward(reduces)
        if reduces:
            self.sent.begin_backward()
        self._reset(bucket_steps)

    def kind_of_grad(self, i: int) -> int:
        """Returns what `.grad` of parameter i is: GRAD_NONE, GRAD_IN_PLACE or GRAD_OTHER."""
        if self.params[i].grad is None:
            return GRAD_NONE
        return GRAD_IN_PLACE if self.strategy.in_place(i) else GRAD_OTHER

    def recheck_nonfinite(self) -> None:
        """Clears the nonfinite mark of gradients that were dropped, or that are finite now. Every rank comes to the
        same result: only a mean that all ranks have is read again, a sharded gradient keeps its mark."""
        for i in self.cycle.nonfinite():
            grad = self.strategy.grad(i)
            if grad is None or (not self.strategy.sharded and first_nonfinite([grad]) == ALL_FINITE):
                self.cycle.is_finite(i)

    def gather(self, bucket: int) -> Work:
        assert self.weights is not None
        self._gathers += 1
        start = partial(
            self.communicator.all_gather_into_buffer,
            WireBuffer.of(self.weights.buckets[bucket]),
            tag=tag(self._number, self._gathers, bucket),
            label=f"weights of {self._label(range(bucket, bucket + 1))}",
        )
        handle = self.guarded(start)
        del self._weight_gathers[self.cycle.gathering() :]
        self._weight_gathers.append(handle)
        return _WeightGather(self)

    def wait_for_weight_gathers(self) -> None:
        """Waits for all-gathers of weights that an interrupted step did not wait for. Does nothing after a failure:
        every step and backward raises it anyway."""
        if self._weight_gathers and self.cycle.failure is None:
            self.run()
            self._weight_gathers.clear()

    def do_weights(self, action: Action) -> None:
        self.guarded(self._weight_gathers[action.message].result)

    # -- the cycle's actions (`CycleDriver.run`) ------------------------------------------------------------------

    def do_check(self, action: Action) -> None:
        grads = self.strategy.grads(action.first)
        self.communicator.ordering.wait_producers()
        self._watch.check([grad for _, grad in grads], [i for i, _ in grads])

    def do_send(self, action: Action) -> None:
        buckets, cycle = range(action.first, action.end), self.cycle.number
        label = f"gradients of cycle {cycle}, {self._label(buckets)}"
        on_reduced = partial(_step_buckets, self._bucket_steps, buckets) if action.flags & STEP_WHEN_REDUCED else None
        number = tag(self._number, cycle, buckets.start)
        send = partial(self.strategy.send, buckets, cycle=cycle, tag=number, label=label, on_reduced=on_reduced)
        self._handles.append(self.guarded(send))

    def do_wait(self, action: Action) -> None:
        if not action.flags & IF_SENT or action.message < len(self._handles):
            self.guarded(self._handles[action.message].result)

    def do_inspect(self, action: Action) -> None:
        i = action.first
        if flags := self.cycle.missing(i, self.kind_of_grad(i), self.params[i].requires_grad):
            self.strategy.prepare(i, flags)

    def do_order(self, _action: Action) -> None:
        self.reorders = False
        self.guarded(self._rebuild_buckets)

    def do_report(self, _action: Action) -> None:
        if self._settings.check_for_nan:
            self.communicator.ordering.wait_producers()
        trainable = [p.requires_grad for p in self.params]
        report = self.cycle.report(self._watch.first(), trainable)
        cycle = self.cycle.number
        number, label = tag(self._number, cycle, MAX_BUCKETS), f"end of gradient cycle {cycle}"
        self._read_reports = self.guarded(lambda: self.communicator.all_gather_bytes(report, tag=number, label=label))

    def do_read(self, _action: Action) -> None:
        assert self._read_reports is not None
        self.cycle.read(self.guarded(self._read_reports))

    def do_install(self, _action: Action) -> None:
        self.communicator.ordering.forget_producers()
        self._handles, self._read_reports = [], None
        self.strategy.end_cycle(self.cycle.anywhere(), self.cycle.left())
        self.versions = self.strategy.versions()

    def do_recovered(self, _action: Action) -> None:
        self._handles, self._read_reports = [], None

    def _label(self, buckets: range) -> str:
        if buckets not in self._labels:
            self._labels[buckets] = self.strategy.plan.label(buckets)
        return self._labels[buckets]

    def _rebuild_buckets(self) -> None:
        """Rebuilds the buckets in the order in which rank 0's gradients were ready, unless that gives the same plan or
        a rank's `may_replan` forbids it."""
        words = torch.tensor([self._settings.may_replan(), *self.cycle.order], dtype=torch.int64, device="cpu")
        cycle = self.cycle.number
        number, label = tag(self._number, cycle, MAX_BUCKETS), f"the order of gradients in cycle {cycle}"
        gathered = self.communicator.all_gather_bytes(words.view(torch.uint8), tag=number, label=label)()
        rows = [row.view(torch.int64).tolist() for row in gathered]
        if not all(may for may, *_ in rows):
            return
        plan = self._settings.replan(rows[0][1:])
        if plan.fingerprint == self.strategy.plan.fingerprint:
            return
        agree(self.communicator, caller="the new plan", fingerprint=plan.fingerprint, lines=plan.lines(), failure=None)
        if self.weights is not None:
            self.weights = ParamBuffers(self.params, plan)
        self.strategy = self.strategy.rebuilt(plan)
        self._on_layout_change()
        self._labels = {}
        self.cycle = self._cycle_of_plan(replaces=self.cycle)


class _WeightGather:
    """Handle of an all-gather of one bucket's weights."""

    def __init__(self, exchange: BucketExchange) -> None:
        self._exchange = exchange

    def result(self) -> None:
        """Waits for all buckets' all-gathers. Raises RuntimeError, at every call, if one failed."""
        self._exchange.wait_for_weight_gathers()
        self._exchange.cycle.refuse_failed()


def _step_buckets(steps: Sequence[Callable[[int], None]], buckets: range) -> None:
    for step, bucket in product(steps, buckets):
        step(bucket)
