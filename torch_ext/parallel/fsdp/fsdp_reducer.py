"""The reducer of a model that is sharded by FSDP2.

FSDP2 decides what is gathered and reduced, and when; this reducer does it. For each unit, backward calls, in this order
and on one thread:

- `reduce_scatter`, which only starts it: the output is not written yet;
- `reduced`, FSDP2's all-reduce hook;
- `grad_ready` for each parameter of the unit, a post-accumulate hook. FSDP2 has set `.grad` from a slice of that
  output; the hook takes it out of `.grad`.

At the end of backward the ranks exchange reports of what they reduced, wait for the sums, and add them to the gradient
shards.

With a replicated mesh dimension (HSDP), FSDP2 itself adds up the replicas right after the reduce-scatter. So the output
holds the sum, in fp32, before `reduce_scatter` returns.
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
    """Reduces the gradients that FSDP2 hands over (see the module's docstring)."""

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
        """named: the trainable, sharded parameters. unit_of: each one's unit, for dtypes and messages. control: a
        communicator of all ranks that have parts of the model. number: from `agree`. divide_factor: sums are divided
        by it; None: by the number of ranks that a unit is sharded and replicated over.
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
        """Hooks the model, creates and returns `weights`. units: each unit's modules; prefetch: see ParamGather."""
        guarded = partial(_guarded, weakref.ref(self.exchange))
        zeros = self._find_unused and hasattr(units[0][0], "set_reduce_scatter_unused_params")
        self.weights = ParamGather(self.params, units, self.exchange.communicators, prefetch, zeros, guarded)
        self._hooks.append(model.register_forward_pre_hook(hook(self.finish_failed_backward), prepend=True))
        # Runs before FSDP2's hooks of the same tensors: an error here leaves FSDP2's state unchanged.
        self._hooks.append(model.register_forward_hook(weak_method(self._guard_outputs), prepend=True))
        self._hooks.append(model.register_forward_hook(weak_method(self._register_outputs)))
        return self.weights

    def close(self) -> None:
        """Removes hooks and gradients. The collectives installed in the units are left to the caller."""
        self.detach()
        self.zero_grad(self.params)
        for param in self.params:
            param.grad = None
        if self.weights is not None:
            self.weights.close()

    @contextmanager
    def synchronizing(self, enabled: bool) -> Iterator[None]:
        """No effect: there is no memory to accumulate unreduced gradients in (E8)."""
        yield

    # -- for optimizers: see reducer_registry.GradientReducer ----------------------------------------------------------

    @property
    def ranks(self) -> frozenset[int]:
        return self.exchange.communicators.control.ranks

    @property
    def sharded(self) -> bool:
        """Whether some gradient is not in `.grad`."""
        return not all(map(self.exchange.shards.visible, range(len(self.params))))

    def before_step(self, call: str) -> None:
        if not self.failed:  # after a failure, what is under way would not complete, either
            self.finish_failed_backward()
        for i in self.cycle.nonfinite():
            if self.exchange.shards.of(i) is None:
                self.cycle.is_finite(i)
        self.cycle.check_step(call)
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
        raise NotImplementedError("FSDP2 gathers weights itself")  # never called: its LocalShards have no bucket

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
        """Hooks the outputs: with reentrant checkpoints, only they see the outer backward before the nested ones."""
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
        """Starts a unit's reduce-scatter. given: this rank's gradients, flat, as [ranks, output's numel]: cut into the
        ranks' shards. allocated_on: the streams on which output and given were allocated."""
        self.exchange.refuse(unit, output, op)
        self.begin_backward()
        self.exchange.give(Given(unit, output, given, group, tuple(allocated_on)))

    def reduced(self, unit: UnitPlan, output: torch.Tensor) -> None:
        """Hook: FSDP2 has reduced a unit, all-reduce included, and sets gradients from the output next."""
        self.begin_backward()
        self.exchange.unit_reduced(unit, output)

    def grad_ready(self, i: int) -> None:
        """Hook: FSDP2 has set `.grad` of the parameter's shard from a slice of the output."""
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
        """Starts a cycle, unless one runs: called at each event that may be the first one of a backward."""
        self.finish_failed_backward()
        if self._end is not None:
            return
        self.cycle.refuse_failed()
        # Queued after FSDP2's own callback, which reduces units whose inputs need no gradient.
        self._end = queue_backward_end(self.backward_ended)
        self.exchange.begin()
        self._refuse_offloaded()  # if it raises, recovery is that of any failed backward
        if self.weights is not None:
            self.weights.prefetch_in_order()
        self.cycle.zero(self.exchange.shards.detach_grads())

    def finish_failed_backward(self) -> None:
        """Recovers if the last backward raised: waits for the messages that it sent, which the other ranks sent, too,
        and discards them. Shards to which sums had been added already must not be stepped before zero_grad."""
        if self._end is not None and self._end() is not None:
            return
        self._end = None
        if self.cycle.phase != IDLE:
            self.cycle.died()
            self.exchange.run()
            if self.weights is not None and not self.weights.recover():
                self.cycle.fail(
                    "a backward raised, and FSDP2 of this torch cannot recover from that (torch >= 2.13 can): "
                    "create the model again"
                )
                raise RuntimeError(self.cycle.failure)
            self.exchange.shards.attach_grads()  # torch >= 2.15 dropped them

    def backward_ended(self) -> None:
        """Callback at the end of backward: exchanges reports, waits for the sums, adds them to the shards."""
        self.exchange.current = None
        self.exchange.shards.attach_grads()
        try:
            if self.cycle.end():  # False: only inputs needed gradients, or no gradient synchronization
                self.exchange.run()
        finally:  # a stored error would keep the BackwardEnd alive
            self._end = None


def _guarded(exchange: "weakref.ref[UnitExchange]", wait: Callable[[], Any]) -> Any:
    alive = exchange()
    return wait() if alive is None else alive.guarded(wait)
