"""The reducer of one parallelized model with buckets: what autograd does to gradients becomes events of the gradient
cycle (`parallel/bucket_exchange.py`), and what optimizers ask is answered.

The end of backward waits for the sums, so that everything after `loss.backward()` sees them.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from torch_ext.comm.communicator import Work
from torch_ext.grads.errors import refuse_busy
from torch_ext.parallel.bucket_exchange import BucketExchange, Settings
from torch_ext.parallel.bucket_plan import BucketPlan
from torch_ext.parallel.bucket_steppers import BucketSteppers
from torch_ext.parallel.cycle import ACCUMULATING, GRAD_NONE, IDLE, REDUCING
from torch_ext.parallel.reducer_base import (
    BackwardEnd,
    ReducerBase,
    hook,
    queue_backward_end,
    tensors_with_graph,
    weak_method,
)
from torch_ext.parallel.strategies.strategy import ShardingStrategy
from torch_ext.params import reducer_registry
from torch_ext.params.local_shard import LocalShard
from torch_ext.tensors import offload_guard


class BucketReducer(ReducerBase):
    """Of one model's parameters, whose gradients lie where its strategy says (`parallel/strategies/strategy.py`)."""

    exchange: BucketExchange

    def __init__(self, strategy: ShardingStrategy, number: int, settings: Settings) -> None:
        """number: of `agree`."""
        super().__init__(strategy.params, [p.name for p in strategy.plan.parameters])
        self.exchange = BucketExchange(strategy, number, settings, weak_method(self._laid_out_anew))
        self.require_grad_sync = True
        self._steppers = BucketSteppers(settings.step_in_backward)
        if strategy.adds_to_sums:
            self._hooks += [p.register_hook(hook(self.before_accumulate, i)) for i, p in enumerate(self.params)]
        self._tasks: dict[int, weakref.ref[BackwardEnd]] = {}  # backwards that have not ended, the outermost first
        self._begun = -1  # the task in which the last gradient was ready

    def _laid_out_anew(self) -> None:
        reducer_registry.laid_out_anew(self)

    @property
    def strategy(self) -> ShardingStrategy:
        return self.exchange.strategy

    @property
    def plan(self) -> BucketPlan:
        return self.strategy.plan

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
        if self.exchange.weights is not None:
            self.exchange.weights.release()

    @contextmanager
    def synchronizing(self, enabled: bool) -> Iterator[None]:
        """Backwards inside reduce, or do not; the setting before is restored."""
        before, self.require_grad_sync = self.require_grad_sync, enabled
        try:
            yield
        finally:
            self.require_grad_sync = before

    def refuse_gone(self, doing: str) -> None:
        if self.exchange.weights is None:
            return
        if (failure := self.cycle.failure) is not None:
            raise RuntimeError(f"{doing} after an exchange that failed: {failure}")
        self.exchange.communicator.refuse_gone(doing)

    def before_step(self) -> None:
        """An optimizer is about to read the gradients: RuntimeError where they are still this rank's own."""
        self.finish_failed_backward()
        self.exchange.check_again()
        self.refuse_gone("step()")
        self.cycle.check_step(i for i in range(len(self.params)) if self.strategy.unreduced(i))

    # -- for optimizers: see reducer_registry.GradientReducer ----------------------------------------------------------

    @property
    def sharded(self) -> bool:
        return self.strategy.sharded

    @property
    def ranks(self) -> frozenset[int]:
        return self.exchange.communicator.ranks

    def local(self, param: torch.Tensor) -> LocalShard:
        i, weights = self._position[id(param)], self.exchange.weights
        if weights is None:
            return LocalShard(param, 0, (), None)
        return weights.local(i, self.strategy.owned.get(i), self.exchange.communicator.group)

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        i = self._position[id(param)]
        self._check_dtype(i)
        return self.strategy.grad(i)

    def part(self, param: torch.Tensor) -> torch.Tensor:
        return self.strategy.part(self._position[id(param)])

    def offer(self, stepper: reducer_registry.BucketStepper) -> None:
        self._steppers.add(stepper)

    def stats(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        with_grads = sum(self.strategy.grad(i) is not None for i in range(len(self.params)))
        if self.strategy.versions() != self.exchange.versions or len(params) != with_grads:
            return None
        return self.strategy.stats.clone()

    def gather(self, bucket: int) -> Work:
        return self.exchange.gather(bucket)

    def refuse_moving(self, doing: str, weights: bool) -> None:
        self.finish_failed_backward()
        refuse_busy(doing, self.forwards_running, bool(self._tasks) or self.cycle.phase != IDLE)
        self._steppers.refuse_moving(doing)
        if weights and self.exchange.weights is not None:
            self.exchange.weights.refuse_lent(doing)

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
        self.exchange.communicator.ordering.record_producer()
        if self.cycle.ready(i):
            self.exchange.run()

    def before_accumulate(self, i: int) -> None:
        """Autograd is about to accumulate into `.grad` of parameter i, or (torch.autograd.grad) to return its
        gradient."""
        if self.params[i].grad is None and not self.strategy.sets_aside:
            return  # nothing to be prepared
        grad = self.exchange.kind_of_grad(i)
        if grad != GRAD_NONE:
            if not _accumulates(self.params[i]):
                return
            self._begin_backward()
        if flags := self.cycle.accumulate(i, grad):
            self.strategy.prepare(i, flags)

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
        # Under no_sync() shards are reduced, too, but more is to come.
        completes = self.require_grad_sync and not self.exchange.reorders
        self.exchange.begin(self.require_grad_sync, self._steppers.begin(self, completes))

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
        self.cycle.died(self.strategy.modified_since(self.exchange.versions))
        self.exchange.run()  # an interrupt of it leaves the rest for the next time

    def _check_dtype(self, i: int) -> None:
        dtype, planned = self.params[i].dtype, self.plan.parameters[i].param_dtype
        if dtype != planned:
            raise RuntimeError(
                f"parameter {self.names[i]!r} became {dtype} after parallelize planned its gradients for {planned}: "
                "convert the model first, or call parallelize again"
            )

    # -- at its end -----------------------------------------------------------------------------------------------

    def backward_ended(self, task: int) -> None:
        """Of one graph task; a nested one (reentrant checkpointing) leaves the end to the outermost."""
        self._tasks.pop(task, None)
        if not self._tasks and self.cycle.phase in (ACCUMULATING, REDUCING) and self.cycle.end():
            self.exchange.run()


def _accumulates(param: torch.Tensor) -> bool:
    """Whether the running backward accumulates into `.grad`, as that of torch.autograd.grad does not."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch's answer for a gradient that is returned
        return False
