"""When the gradients of a model sharded by FSDP2 are reduced.

FSDP2 decides what is gathered and reduced, and when; this reducer does it. For each unit, backward calls, in this order
and on one thread: `reduce_scatter`, which only starts, and leaves the output unwritten; `reduced` (the all-reduce
hook); `grad_ready` for each parameter of the unit (the post-accumulate hook), which takes the gradient that FSDP2 made
of that output out of `.grad`. At the end of backward the ranks tell each other what they reduced, then the sums are
waited for and added to the gradient shards.

With a replicated mesh dimension (HSDP), FSDP2 adds up the replicas itself, right after the reduce-scatter: then the
output holds the sum, in fp32, before `reduce_scatter` returns.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_ext.comm.communicator import Communicator, Part, Work
from torch_ext.comm.streams import Stream
from torch_ext.comm.wire import WireBuffer, reduce_chunks
from torch_ext.grads.errors import names_of, refuse_busy
from torch_ext.grads.stats import ALL_FINITE, first_nonfinite
from torch_ext.parallel.cycle import DISCARD, IDLE, UNITS, Action, Cycle, Options
from torch_ext.parallel.fsdp.grad_shards import GradShards
from torch_ext.parallel.fsdp.param_gather import ParamGather
from torch_ext.parallel.fsdp.reduce_scatter import REDUCE, Reduction, UnitCommunicators, UnitPlan, wire_of
from torch_ext.parallel.reducer_base import (
    BackwardEnd,
    ReducerBase,
    hook,
    queue_backward_end,
    tensors_with_graph,
    weak_method,
)
from torch_ext.params import local_shard
from torch_ext.params.local_shard import LocalShard, tensor_of
from torch_ext.tensors import offload_guard

# Units whose gradients are reduced at a time; those of more would pile up where computation is faster than the link. A
# unit is large enough for one to keep the link busy while the next one is passed to it.
UNDER_WAY = 2


class FSDPReducer(ReducerBase):
    """See the module's docstring."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        units: Sequence[UnitPlan],
        unit_of: Sequence[int],
        control: Communicator,
        number: int,
        *,
        divide_factor: float | None,
        check_for_nan: bool,
        find_unused_parameters: bool,
    ) -> None:
        """named: the trainable parameters, sharded; unit_of: the unit that each is in, for dtypes and messages.

        control: between all ranks that hold parts of the model. number: of `agree`. divide_factor: sums are divided by
        it; None: by the number of ranks that a unit is sharded and replicated over.
        """
        options = Options(
            UNITS, control.rank, control.world_size, UNDER_WAY, check_for_nan, find_unused=find_unused_parameters
        )
        names = [n for n, _ in named]
        super().__init__([p for _, p in named], names, Cycle(options, names, units=[str(unit) for unit in units]))
        self.units = list(units)
        self.wire_bytes = 0
        self.communicators = UnitCommunicators(control, number)
        self.shards = GradShards(self.params, self.units, unit_of)
        self.weights: ParamGather | None = None
        self._divide_factor, self._check_for_nan = divide_factor, check_for_nan
        self._find_unused = find_unused_parameters
        self._bytes_before = self.communicators.bytes_sent()
        self._end: weakref.ref[BackwardEnd] | None = None
        self._given: _Given | None = None  # and not sent yet
        self._reductions: list[Reduction] = []  # of this backward
        self._messages: list[Reduction] = []  # of these, what was sent
        self._current: Reduction | None = None
        self._read_reports: Callable[[], list[torch.Tensor]] | None = None  # which are under way

    def attach(self, model: torch.nn.Module, units: Sequence[Sequence[torch.nn.Module]], prefetch: bool) -> ParamGather:
        """units: the modules of each; prefetch: see ParamGather, which is `weights` from here on."""
        guarded = partial(_guarded, weakref.ref(self))
        zeros = self._find_unused and hasattr(units[0][0], "set_reduce_scatter_unused_params")
        self.weights = ParamGather(self.params, units, self.communicators, prefetch, zeros, guarded)
        finish = hook(self.finish_failed_backward)
        self._hooks.append(model.register_forward_pre_hook(finish, prepend=True))
        # Before FSDP2's hooks of the same tensors: what is refused then has changed nothing yet.
        self._hooks.append(model.register_forward_hook(weak_method(self._guard_outputs), prepend=True))
        self._hooks.append(model.register_forward_hook(weak_method(self._register_outputs)))
        return self.weights

    def close(self) -> None:
        """Leaves the parameters as they were before, without gradients; the units' collectives are the caller's."""
        self.detach()
        self.zero_grad(self.params)
        for param in self.params:
            param.grad = None
        if self.weights is not None:
            self.weights.close()

    @contextmanager
    def synchronizing(self, enabled: bool) -> Iterator[None]:
        """No effect: where gradients are sharded, those not reduced could be kept nowhere (E8)."""
        yield

    # -- for optimizers: see reducer_registry.GradientReducer ----------------------------------------------------------

    @property
    def ranks(self) -> frozenset[int]:
        return self.communicators.control.ranks

    @property
    def sharded(self) -> bool:
        """Whether a gradient is anywhere else than in `.grad`."""
        return not all(map(self.shards.visible, range(len(self.params))))

    def before_step(self) -> None:
        if not self.failed:  # else before waiting for what will not complete either
            self.finish_failed_backward()
        for i in self.cycle.nonfinite():
            if self.shards.of(i) is None:
                self.cycle.is_finite(i)
        self.cycle.check_step()
        self.sync_parameters()

    def sync_parameters(self) -> bool:
        if self.weights is not None:
            self.weights.reshard()
        return True

    def local(self, param: torch.Tensor) -> LocalShard:
        return local_shard.of_dtensor(param)

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        return self.shards.of(self._position[id(param)])

    def gather(self, bucket: int) -> Work:
        raise NotImplementedError("FSDP2 gathers weights itself")  # no LocalShard of its has a bucket: nobody asks

    def refuse_moving(self, doing: str, weights: bool) -> None:
        self.finish_failed_backward()
        refuse_busy(doing, self.forwards_running, self._end is not None)

    def gradient_memory(self) -> Sequence[torch.Tensor]:
        return self.shards.memory

    def gradients_released(self) -> None:
        self.cycle.zero(range(len(self.params)))

    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        self.finish_failed_backward()
        positions = self._positions(params)
        for i in positions:
            self.shards.forget(i)
        self.cycle.zero(positions)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _guard_outputs(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        for output in tensors_with_graph(outputs):
            output.register_hook(hook(self._refuse_offloaded))

    def _refuse_offloaded(self) -> None:
        offload_guard.refuse_gradients(self.params, "backward")

    def _register_outputs(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        """A backward through these tensors begins there, as reentrant checkpoints may hold every parameter."""
        if self.weights is not None:
            self.weights.drop_gathered()
        for output in tensors_with_graph(outputs):
            output.register_hook(hook(self.begin_backward))

    # -- during backward ----------------------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        unit: UnitPlan,
        output: torch.Tensor,
        given: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        allocated_on: Iterable[Stream],
    ) -> None:
        """given: [ranks, output's numel], flat: this rank's gradients of the unit, cut into every rank's shards.
        allocated_on: the streams whose memory output and given are."""
        self._refuse(unit, output, op)
        self.begin_backward()
        self._current = None
        self._given = _Given(unit, output, given, group, tuple(allocated_on))
        self.cycle.given(unit.number, given.numel())
        self.run()

    def reduced(self, unit: UnitPlan, output: torch.Tensor) -> None:
        """FSDP2 has reduced a unit, all-reduce included, and makes gradients of the output next."""
        last = self._reductions[-1] if self._reductions else None
        if last is None or last.output is not output:
            # One rank has the whole unit: FSDP2 has no use for a reduce-scatter then.
            self.begin_backward()
            sums = torch.empty(output.numel(), dtype=self.shards.dtype_of_sums(unit), device=output.device)
            reduce_chunks([WireBuffer.of(output)], sums, self._scale(unit, 1))
            last = Reduction(unit, output, sums, None)
            self.cycle.given(unit.number, output.numel(), message=False)
            self._add(last, output, output.view(1, -1))
        self._current = last

    def grad_ready(self, i: int) -> None:
        """FSDP2 made a gradient of a slice of the output, for the parameter's shard."""
        grad: Any = self.params[i].grad
        self.params[i].grad = None
        if self._current is None:
            raise RuntimeError(
                f"a gradient is ready for {self.names[i]!r}, but not through this library: set_all_reduce_hook or "
                "set_custom_reduce_scatter was called on its unit after parallelize"
            )
        self._current.add(i, int(tensor_of(grad).storage_offset()), grad)
        self.shards.belongs(i, self._current.unit)
        used = None if self.weights is None else self.weights.used
        if used is None or used.take(i):
            self.cycle.ready(i)

    def _add(self, reduction: Reduction, given: torch.Tensor, rows: torch.Tensor) -> None:
        if self._check_for_nan and first_nonfinite([given]) != ALL_FINITE:
            reduction.suspect = rows
        self._reductions.append(reduction)

    def _frozen_since(self) -> str:
        """For messages, where ranks may wait for each other because one reduces less."""
        frozen = [name for name, p in zip(self.names, self.params, strict=True) if not p.requires_grad]
        return f", with {names_of(frozen, range(len(frozen)))} frozen since parallelize" if frozen else ""

    def _refuse(self, unit: UnitPlan, output: torch.Tensor, op: dist.ReduceOp) -> None:
        if op != dist.ReduceOp.AVG:
            raise RuntimeError(
                f"{unit}: FSDP2 would scale the sum of its gradients itself, in {output.dtype} "
                "(set_gradient_divide_factor, set_force_sum_reduction_for_comms, or a reduction in float16): give "
                "gradient_divide_factor to parallelize, and MixedPrecisionPolicy(reduce_dtype=torch.float32) to "
                "fully_shard"
            )
        if unit.replicas > 1 and output.dtype != torch.float32:
            raise RuntimeError(
                f"{unit}: FSDP2 would add up the {unit.replicas} replicas in {output.dtype}: give "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32) to fully_shard; the wire between shards is still the "
                "policy's"
            )

    def _scale(self, unit: UnitPlan, shards: int) -> float:
        # FSDP2 takes the mean over the replicas.
        return 1.0 / shards if self._divide_factor is None else unit.replicas / self._divide_factor

    def begin_backward(self) -> None:
        """Called whenever a backward may have begun."""
        self.finish_failed_backward()
        if self._end is not None:
            return
        self.cycle.refuse_failed()
        # After FSDP2's own, which reduces the units whose inputs need no gradient.
        self._end = queue_backward_end(self.backward_ended)
        self.cycle.begin()
        self._reductions, self._messages, self._read_reports = [], [], None
        self._refuse_offloaded()  # which is recovered from like any backward that raised
        if self.weights is not None:
            self.weights.prefetch_in_order()
        self.cycle.zero(self.shards.detach_grads())

    def finish_failed_backward(self) -> None:
        """If the last backward raised: waits for what it sent, as the other ranks sent it too, and discards it; the
        gradient shards are what they were before it."""
        if self._end is not None and self._end() is not None:
            return
        self._end = None
        if self.cycle.phase != IDLE:
            self.cycle.died()
            self.run()

    def backward_ended(self) -> None:
        """Agrees with the other ranks on what was reduced, waits for the sums, adds them to the shards."""
        self._current = None
        self.shards.attach_grads()
        try:
            if self.cycle.end():  # else a backward to inputs only, or without gradient synchronization
                self.run()
        finally:  # an error that is stored would keep it
            self._end = None

    # -- what the cycle asks for (`CycleDriver.run`) --------------------------------------------------------------

    def do_send(self, action: Action) -> bool:
        """Of what was given; whether the sums are there already."""
        assert self._given is not None
        (unit, output, given, group, allocated_on), self._given = self._given, None
        cycle, communicator = self.cycle.number, self.communicators.of(group, REDUCE)
        communicator.ordering.record_producer(*allocated_on)
        rows = given.view(communicator.world_size, -1)
        wire = wire_of(unit, rows, communicator.rank, cycle)
        numel = wire.data.numel() // communicator.world_size
        replicated = unit.replicas > 1
        dtype = output.dtype if replicated else self.shards.dtype_of_sums(unit)
        in_place = dtype == output.dtype and numel == output.numel()
        sums = output if in_place else torch.empty(numel, dtype=dtype, device=output.device)
        send = partial(
            communicator.reduce_scatter,
            wire,
            partial(_add_up, sums, self._scale(unit, communicator.world_size)),
            tag=self.communicators.tag(cycle, REDUCE, unit, given.nbytes),
            label=f"gradients of cycle {cycle}, {unit}{self._frozen_since()}",
        )
        reduction = Reduction(unit, output, output if replicated else sums, send())
        self._messages.append(reduction)
        if replicated:
            reduction.wait(self.guarded)
            if not in_place:
                output.copy_(sums[: output.numel()])
        self._add(reduction, given, rows)
        return replicated

    def do_wait(self, action: Action) -> None:
        if action.message >= len(self._messages):  # it was interrupted before it was sent
            return
        reduction = self._messages[action.message]
        if action.flags & DISCARD:
            reduction.wait(self.guarded)
        elif not reduction.is_added:
            self.shards.add_sums(reduction, self.guarded)

    def do_report(self, _action: Action) -> None:
        nonfinite = next((n for r in self._reductions if (n := r.first_nonfinite()) != ALL_FINITE), ALL_FINITE)
        trainable, no_words = [p.requires_grad for p in self.params], torch.empty(0, dtype=torch.int64)
        report, cycle = self.cycle.report(nonfinite, trainable, no_words), self.cycle.number
        number, label = self.communicators.report_tag(cycle), f"end of gradient cycle {cycle}{self._frozen_since()}"
        control = self.communicators.control
        self._read_reports = self.guarded(lambda: control.all_gather_bytes(report, tag=number, label=label))

    def do_read(self, _action: Action) -> None:
        assert self._read_reports is not None
        # What FSDP2 keeps back (set_requires_all_reduce) is reduced in a later backward.
        self.cycle.read(self.guarded(self._read_reports), held_back=not all(r.slices for r in self._reductions))

    def do_install(self, _action: Action) -> None:
        for reduction in self._reductions:
            if not reduction.is_added:
                self.shards.add_sums(reduction, self.guarded)
        if self._find_unused:
            self.shards.drop_new(i for i, has_one in enumerate(self.cycle.anywhere()) if not has_one)
        self.shards.attach_grads()
        self._reductions, self._messages = [], []
        before, self._bytes_before = self._bytes_before, self.communicators.bytes_sent()
        self.wire_bytes = self._bytes_before - before

    def do_recovered(self, _action: Action) -> None:
        self._given, self._current, self._reductions, self._messages = None, None, [], []
        self.shards.attach_grads()
        self.cycle.broken(self.shards.added)
        if self.weights is not None and not self.weights.recover():
            self.cycle.fail(
                "a backward raised, after which FSDP2 of this torch cannot go on (torch >= 2.13 can): make the model "
                "anew"
            )
            raise RuntimeError(self.cycle.failure)


class _Given(NamedTuple):
    """The arguments of `reduce_scatter`."""

    unit: UnitPlan
    output: torch.Tensor
    gradients: torch.Tensor
    group: dist.ProcessGroup
    allocated_on: tuple[Stream, ...]


def _add_up(sums: torch.Tensor, scale: float, chunks: Sequence[WireBuffer], _part: Part) -> None:
    reduce_chunks(chunks, sums, scale)


def _guarded(reducer: "weakref.ref[FSDPReducer]", wait: Callable[[], Any]) -> Any:
    alive = reducer()
    return wait() if alive is None else alive.guarded(wait)
