"""When the gradients of a model sharded by FSDP2 are reduced.

FSDP2 decides what is gathered and reduced when; this engine is what it calls to do so. For each unit, backward
calls, in this order and on one thread: `reduce_scatter`, which starts the exchange and comes back at once with an
output that holds nothing yet; `reduced` (the all-reduce hook); `gradient_came` for each parameter in the unit (the
post-accumulate hook), which takes the gradient that FSDP2 made of that output away again. At the end of backward the
ranks tell each other what they reduced, then the sums are waited for and added to the gradient shards.

With a replicated mesh dimension (HSDP), FSDP2 adds up the replicas itself, right after the reduce-scatter: then the
output holds the sum, in fp32, before `reduce_scatter` returns.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from torch_ext.comm.communicator import Communicator, Part, Work
from torch_ext.comm.streams import Stream
from torch_ext.comm.wire import WireBuffer, reduce_chunks
from torch_ext.grads.errors import FROZEN, READY, names_of, refuse_busy, refuse_step
from torch_ext.grads.stats import ALL_FINITE, first_nonfinite
from torch_ext.parallel.fsdp.fsdp_cycle_report import FSDPCycleReport, FSDPCycleReports
from torch_ext.parallel.fsdp.grad_shards import GradShards
from torch_ext.parallel.fsdp.param_gather import ParamGather
from torch_ext.parallel.fsdp.reduce_scatter import REDUCE, Reduction, UnitCommunicators, UnitPlan, wire_of
from torch_ext.params import local_shard, reducer_registry
from torch_ext.params.local_shard import LocalShard, tensor_of
from torch_ext.tensors import offload_guard

# Units whose gradients are on their way at a time; those of more would pile up where computation is faster than the
# link. A unit is large enough for one to keep the link busy while the next one is handed over.
UNDER_WAY = 2


class _BackwardEnd:
    """Called at the end of a backward. It dies with its graph task, so a dead one is a backward that raised."""

    def __init__(self, reducer: "FSDPReducer") -> None:
        self._reducer = weakref.ref(reducer)

    def __call__(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.backward_ended()


class FSDPReducer(reducer_registry.GradientReducer):
    """See the module's first lines."""

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
        self.names, self.params = [n for n, _ in named], [p for _, p in named]
        self.units = list(units)
        self.wire_bytes = 0
        self.communicators = UnitCommunicators(control, number)
        self.shards = GradShards(self.params, self.units, unit_of)
        self.weights: ParamGather | None = None
        self._divide_factor, self._check_for_nan = divide_factor, check_for_nan
        self._find_unused = find_unused_parameters
        self._cycle = 0
        self._bytes_before = self.communicators.bytes_sent()
        self._end: weakref.ref[_BackwardEnd] | None = None
        self._failure: str | None = None
        self._reductions: list[Reduction] = []  # of this backward
        self._current: Reduction | None = None
        self._report = FSDPCycleReport(len(self.params), len(self.units))
        self._broken: set[int] = set()  # a backward raised after some of its sums were added to these one's shards
        self._nonfinite: set[int] = set()  # what the check for NaN named, until zero_grad
        self._position = {id(p): i for i, p in enumerate(self.params)}
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_on_grad, weakref.ref(self), i))
            for i, p in enumerate(self.params)
        ]
        reducer_registry.register(self, self.params)

    def attach(self, model: torch.nn.Module, units: Sequence[Sequence[torch.nn.Module]], prefetch: bool) -> ParamGather:
        """units: the modules of each; prefetch: see ParamGather, which this engine has from here on."""
        guarded = partial(_guarded, weakref.ref(self))
        zeros = self._find_unused and hasattr(units[0][0], "set_reduce_scatter_unused_params")
        self.weights = ParamGather(self.params, units, self.communicators, prefetch, zeros, guarded)
        self._hooks.append(model.register_forward_pre_hook(partial(_before_forward, weakref.ref(self)), prepend=True))
        # Before FSDP2's hooks of the same tensors: nothing has begun yet when it is refused.
        self._hooks.append(model.register_forward_hook(partial(_before_outputs, weakref.ref(self)), prepend=True))
        self._hooks.append(model.register_forward_hook(partial(_after_forward, weakref.ref(self))))
        return self.weights

    def close(self) -> None:
        """Leaves the parameters as they were before, without gradients; the units' collectives are the caller's."""
        for hook in self._hooks:
            hook.remove()
        reducer_registry.unregister(self)
        self.zero_grad(self.params)
        for param in self.params:
            param.grad = None
        if self.weights is not None:
            self.weights.close()

    @contextmanager
    def synchronizing(self, enabled: bool) -> Iterator[None]:
        """Of no effect: where gradients are sharded, there is nowhere to keep those that were not reduced (E8)."""
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
        refuse_step(self._failure, False, ())  # before anything is waited for that does not come either
        self.finish_failed_backward()
        poisoned = [self.names[i] for i in sorted(self._nonfinite) if self.shards.of(i) is not None]
        refuse_step(self._failure, bool(self._broken), poisoned)
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
        self._broken.clear()
        self._nonfinite.clear()

    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        self.finish_failed_backward()
        chosen = [i for p in params if (i := self._position.get(id(p))) is not None]
        for i in chosen:
            self.shards.forget(i)
        self._broken.difference_update(chosen)
        self._nonfinite.difference_update(chosen)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Of the model."""
        self.finish_failed_backward()

    def forward_ended(self, outputs: Any) -> None:
        """A backward that comes through these tensors begins there: reentrant checkpoints may hold every parameter."""
        if self.weights is not None:
            self.weights.drop_gathered()
        for output in _with_graph(outputs):
            output.register_hook(partial(_on_output, weakref.ref(self)))

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
        self._make_room()
        communicator = self.communicators.of(group, REDUCE)
        communicator.ordering.record_producer(*allocated_on)
        rows = given.view(communicator.world_size, -1)
        wire = wire_of(unit, rows, communicator.rank, self._cycle)
        numel = wire.data.numel() // communicator.world_size
        replicated = unit.replicas > 1
        dtype = output.dtype if replicated else self.shards.dtype_of_sums(unit)
        in_place = dtype == output.dtype and numel == output.numel()
        sums = output if in_place else torch.empty(numel, dtype=dtype, device=output.device)
        handle = communicator.reduce_scatter(
            wire,
            partial(_add_up, sums, self._scale(unit, communicator.world_size)),
            tag=self.communicators.tag(self._cycle, REDUCE, unit, given.nbytes),
            label=f"gradients of cycle {self._cycle}, {unit}{self._frozen_since()}",
        )
        reduction = Reduction(unit, output, output if replicated else sums, handle)
        if replicated:
            reduction.wait(self.guarded)
            if not in_place:
                output.copy_(sums[: output.numel()])
        self._add(reduction, given, rows)

    def reduced(self, unit: UnitPlan, output: torch.Tensor) -> None:
        """FSDP2 is done with a unit, all-reduce included, and goes on to make gradients of the output."""
        last = self._reductions[-1] if self._reductions else None
        if last is None or last.output is not output:
            # One rank has the whole unit: FSDP2 has no use for a reduce-scatter then.
            self.begin_backward()
            sums = torch.empty(output.numel(), dtype=self.shards.dtype_of_sums(unit), device=output.device)
            reduce_chunks([WireBuffer.of(output)], sums, self._scale(unit, 1))
            last = Reduction(unit, output, sums, None)
            self._add(last, output, output.view(1, -1))
        self._current = last

    def grad_ready(self, i: int) -> None:
        """FSDP2 made a gradient of a slice of the output, for the parameter's shard."""
        grad: Any = self.params[i].grad
        self.params[i].grad = None
        if self._current is None:
            raise RuntimeError(
                f"a gradient came for {self.names[i]!r}, but not through this library: set_all_reduce_hook or "
                "set_custom_reduce_scatter was called on its unit after parallelize"
            )
        self._current.add(i, int(tensor_of(grad).storage_offset()), grad)
        self.shards.belongs(i, self._current.unit)
        used = None if self.weights is None else self.weights.used
        if used is None or used.take(i):
            self._report.grad_states[i] = READY

    def _add(self, reduction: Reduction, given: torch.Tensor, rows: torch.Tensor) -> None:
        self._report.reduced(reduction.unit, given.numel())
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

    def _make_room(self) -> None:
        under_way = [reduction for reduction in self._reductions if reduction.handle is not None]
        for reduction in under_way[: max(0, len(under_way) - UNDER_WAY + 1)]:
            self.shards.add_sums(reduction, self.guarded)

    def _scale(self, unit: UnitPlan, shards: int) -> float:
        # FSDP2 takes the mean over the replicas.
        return 1.0 / shards if self._divide_factor is None else unit.replicas / self._divide_factor

    def begin_backward(self) -> None:
        """A backward begins, or goes on."""
        self.finish_failed_backward()
        if self._end is not None:
            return
        if self._failure is not None:
            raise RuntimeError(f"gradients cannot be reduced any more: {self._failure}")
        end = _BackwardEnd(self)
        # After FSDP2's own, which reduces the units whose inputs need no gradient.
        Variable._execution_engine.queue_callback(end)
        self._end = weakref.ref(end)
        offload_guard.refuse_gradients(self.params, "backward")  # which is recovered from like any backward that raised
        if self.weights is not None:
            self.weights.prefetch_in_order()
        gone = self.shards.detach_grads()
        self._broken.difference_update(gone)
        self._nonfinite.difference_update(gone)

    def finish_failed_backward(self) -> None:
        """Where the last backward raised: what it sent is waited for, as the other ranks sent it too, and is worth
        nothing; gradient shards are what they were before it."""
        if self._end is None or self._end() is not None:
            return
        reductions, _ = self._close()
        for reduction in reductions:
            reduction.wait(self.guarded)
        self._broken |= self.shards.added
        if self.weights is not None and not self.weights.recover():
            self._failure = (
                "a backward raised, after which FSDP2 of this torch cannot go on (torch >= 2.13 can): make the model "
                "anew"
            )
            raise RuntimeError(self._failure)

    # -- at its end ---------------------------------------------------------------------------------------------------

    def backward_ended(self) -> None:
        """Agrees with the other ranks on what came, waits for the sums, installs them."""
        if not self._reductions:  # a backward to inputs only, or without gradient synchronization
            self._end = None
            self.shards.attach_grads()
            return
        control = self.communicators.control
        cycle, (reductions, report) = self._cycle, self._close()
        report.nonfinite = next((n for r in reductions if (n := r.first_nonfinite()) != ALL_FINITE), ALL_FINITE)
        for i, param in enumerate(self.params):
            if not report.grad_states[i] and not param.requires_grad:
                report.grad_states[i] = FROZEN
        payload = report.encode(cycle)
        number, label = self.communicators.report_tag(cycle), f"end of gradient cycle {cycle}{self._frozen_since()}"
        gather = self.guarded(lambda: control.all_gather_bytes(payload, tag=number, label=label))
        reports = FSDPCycleReports(self.guarded(gather), self.names, self.units)
        self.guarded(reports.check_trained)
        self.guarded(lambda: reports.check_places(control.rank))
        for reduction in reductions:
            if not reduction.is_added:
                self.shards.add_sums(reduction, self.guarded)
        if self._find_unused:
            self.shards.drop_new(reports.missing_everywhere())
        self.shards.attach_grads()
        before, self._bytes_before = self._bytes_before, self.communicators.bytes_sent()
        self.wire_bytes = self._bytes_before - before
        self._nonfinite.update(i for i in reports.nonfinite if i != ALL_FINITE)
        reports.check_finite()
        # What FSDP2 keeps to itself (set_requires_all_reduce) comes in a later backward.
        if not self._find_unused and all(r.slices for r in reductions):
            reports.check_none_missing()

    def _close(self) -> tuple[list[Reduction], FSDPCycleReport]:
        """The cycle is over, well or not."""
        closed = self._reductions, self._report
        self._reductions, self._report = [], FSDPCycleReport(len(self.params), len(self.units))
        self._end, self._current = None, None
        self._cycle += 1
        self.shards.attach_grads()
        return closed

    def guarded(self, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except RuntimeError as error:
            # The ranks are not at the same place any more, and no later message could tell.
            self._failure = self._failure or str(error)
            raise


def _add_up(sums: torch.Tensor, scale: float, chunks: Sequence[WireBuffer], _part: Part) -> None:
    reduce_chunks(chunks, sums, scale)


def _with_graph(outputs: Any) -> Iterator[torch.Tensor]:
    return (t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None)


# Hooks and weights hold the engine weakly: the parameters and modules must not keep it alive.


def _guarded(reducer: "weakref.ref[FSDPReducer]", wait: Callable[[], Any]) -> Any:
    alive = reducer()
    return wait() if alive is None else alive.guarded(wait)


def _on_grad(reducer: "weakref.ref[FSDPReducer]", i: int, _param: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.grad_ready(i)


def _before_outputs(reducer: "weakref.ref[FSDPReducer]", _module: Any, _inputs: Any, outputs: Any) -> None:
    for output in _with_graph(outputs):
        output.register_hook(partial(_refuse_offloaded, reducer))


def _refuse_offloaded(reducer: "weakref.ref[FSDPReducer]", _grad: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        offload_guard.refuse_gradients(alive.params, "backward")


def _on_output(reducer: "weakref.ref[FSDPReducer]", _grad: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.begin_backward()


def _before_forward(reducer: "weakref.ref[FSDPReducer]", _module: Any, _inputs: Any) -> None:
    alive = reducer()
    if alive is not None:
        alive.forward_begins()


def _after_forward(reducer: "weakref.ref[FSDPReducer]", _module: Any, _inputs: Any, outputs: Any) -> None:
    alive = reducer()
    if alive is not None:
        alive.forward_ended(outputs)
