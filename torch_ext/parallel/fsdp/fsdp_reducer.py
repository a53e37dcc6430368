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
from typing import Any

import torch
import torch.distributed as dist

from torch_ext.comm.communicator import Communicator, Work
from torch_ext.comm.streams import Stream
from torch_ext.grads.backward_end import BackwardEnd, hook, queue_backward_end, weak_method
from torch_ext.grads.errors import refuse_busy
from torch_ext.parallel.cycle import IDLE
from torch_ext.parallel.fsdp.param_gather import ParamGather
from torch_ext.parallel.fsdp.reduce_scatter import UnitPlan
from torch_ext.parallel.fsdp.unit_exchange import Given, UnitExchange
from torch_ext.parallel.reducer_base import ReducerBase, tensors_with_graph
from torch_ext.params import local_shard
from torch_ext.params.local_shard import LocalShard, tensor_of
from torch_ext.tensors import offload_guard


class FSDPReducer(ReducerBase):
    """See the module's docstring."""

    exchange: UnitExchange

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
        super().__init__([p for _, p in named], [n for n, _ in named])
        self._hooks += [
            p.register_post_accumulate_grad_hook(hook(self.grad_ready, i)) for i, p in enumerate(self.params)
        ]
        self.units = list(units)
        options = divide_factor, check_for_nan, find_unused_parameters
        self.exchange = UnitExchange(self.params, self.names, self.units, unit_of, control, number, *options)
        self.weights: ParamGather | None = None
        self._find_unused = find_unused_parameters
        self._end: weakref.ref[BackwardEnd] | None = None

    def attach(self, model: torch.nn.Module, units: Sequence[Sequence[torch.nn.Module]], prefetch: bool) -> ParamGather:
        """units: the modules of each; prefetch: see ParamGather, which is `weights` from here on."""
        guarded = partial(_guarded, weakref.ref(self.exchange))
        zeros = self._find_unused and hasattr(units[0][0], "set_reduce_scatter_unused_params")
        self.weights = ParamGather(self.params, units, self.exchange.communicators, prefetch, zeros, guarded)
        self._hooks.append(model.register_forward_pre_hook(hook(self.finish_failed_backward), prepend=True))
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
        return self.exchange.communicators.control.ranks

    @property
    def sharded(self) -> bool:
        """Whether a gradient is anywhere else than in `.grad`."""
        return not all(map(self.exchange.shards.visible, range(len(self.params))))

    def before_step(self) -> None:
        if not self.failed:  # else before waiting for what will not complete either
            self.finish_failed_backward()
        for i in self.cycle.nonfinite():
            if self.exchange.shards.of(i) is None:
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
        return self.exchange.shards.of(self._position[id(param)])

    def gather(self, bucket: int) -> Work:
        raise NotImplementedError("FSDP2 gathers weights itself")  # no LocalShard of its has a bucket: nobody asks

    def refuse_moving(self, doing: str, weights: bool) -> None:
        self.finish_failed_backward()
        refuse_busy(doing, self.forwards_running, self._end is not None)

    def gradient_memory(self) -> Sequence[torch.Tensor]:
        return self.exchange.shards.memory

    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        self.finish_failed_backward()
        positions = self._positions(params)
        for i in positions:
            self.exchange.shards.forget(i)
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
        self.exchange.refuse(unit, output, op)
        self.begin_backward()
        self.exchange.give(Given(unit, output, given, group, tuple(allocated_on)))

    def reduced(self, unit: UnitPlan, output: torch.Tensor) -> None:
        """FSDP2 has reduced a unit, all-reduce included, and makes gradients of the output next."""
        self.begin_backward()
        self.exchange.unit_reduced(unit, output)

    def grad_ready(self, i: int) -> None:
        """FSDP2 made a gradient of a slice of the output, for the parameter's shard."""
        grad: Any = self.params[i].grad
        self.params[i].grad = None
        current = self.exchange.current
        if current is None:
            raise RuntimeError(
                f"a gradient is ready for {self.names[i]!r}, but not through this library: set_all_reduce_hook or "
                "set_custom_reduce_scatter was called on its unit after parallelize"
            )
        current.add(i, int(tensor_of(grad).storage_offset()), grad)
        self.exchange.shards.belongs(i, current.unit)
        used = None if self.weights is None else self.weights.used
        if used is None or used.take(i):
            self.cycle.ready(i)

    def begin_backward(self) -> None:
        """Called whenever a backward may have begun."""
        self.finish_failed_backward()
        if self._end is not None:
            return
        self.cycle.refuse_failed()
        # After FSDP2's own, which reduces the units whose inputs need no gradient.
        self._end = queue_backward_end(self.backward_ended)
        self.exchange.begin()
        self._refuse_offloaded()  # which is recovered from like any backward that raised
        if self.weights is not None:
            self.weights.prefetch_in_order()
        self.cycle.zero(self.exchange.shards.detach_grads())

    def finish_failed_backward(self) -> None:
        """If the last backward raised: waits for what it sent, as the other ranks sent it too, and discards it; the
        gradient shards are what they were before it."""
        if self._end is not None and self._end() is not None:
            return
        self._end = None
        if self.cycle.phase != IDLE:
            self.cycle.died()
            self.exchange.run()
            if self.weights is not None and not self.weights.recover():
                self.cycle.fail(
                    "a backward raised, after which FSDP2 of this torch cannot go on (torch >= 2.13 can): make the "
                    "model anew"
                )
                raise RuntimeError(self.cycle.failure)
            self.exchange.shards.attach_grads()  # torch >= 2.15 dropped them

    def backward_ended(self) -> None:
        """Agrees with the other ranks on what was reduced, waits for the sums, adds them to the shards."""
        self.exchange.current = None
        self.exchange.shards.attach_grads()
        try:
            if self.cycle.end():  # else a backward to inputs only, or without gradient synchronization
                self.exchange.run()
        finally:  # an error that is stored would keep it
            self._end = None


def _guarded(exchange: "weakref.ref[UnitExchange]", wait: Callable[[], Any]) -> Any:
    alive = exchange()
    return wait() if alive is None else alive.guarded(wait)
