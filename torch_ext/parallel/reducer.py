"""The reducer of one parallelized model with buckets: what autograd does to gradients becomes events of the gradient
cycle (`parallel/bucket_exchange.py`), and what optimizers ask is answered.

The end of backward waits for the sums, so that everything after `loss.backward()` sees them.
"""

import operator
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from torch_ext.grads.backward_end import BackwardEnd, hook, queue_backward_end, weak_method
from torch_ext.native import warning
from torch_ext.parallel.bucket_exchange import BucketExchange, Settings
from torch_ext.parallel.bucket_gradients import BucketGradients
from torch_ext.parallel.bucket_steppers import BucketSteppers
from torch_ext.parallel.cycle import ACCUMULATING, GRAD_NONE, IDLE, REDUCING
from torch_ext.parallel.noted_gradients import NotedGradients
from torch_ext.parallel.reducer_base import tensors_with_graph
from torch_ext.parallel.strategies.strategy import ShardingStrategy
from torch_ext.params import reducer_registry
from torch_ext.tensors import offload_guard


class BucketReducer(BucketGradients):
    """Of one model's parameters, whose gradients lie where its strategy says (`parallel/strategies/strategy.py`)."""

    def __init__(self, strategy: ShardingStrategy, number: int, settings: Settings) -> None:
        """number: of `agree`."""
        super().__init__(strategy.params, [p.name for p in strategy.plan.parameters])
        self.exchange = BucketExchange(strategy, number, settings, weak_method(self._laid_out_anew))
        self.require_grad_sync = True
        self._steppers = BucketSteppers(settings.step_in_backward)
        self.steps_in_backward = settings.step_in_backward
        self._dtypes = [p.param_dtype for p in strategy.plan.parameters]
        self._noted = NotedGradients(self.params, weak_method(self.grad_ready), hook(self._grads_ready))
        if strategy.adds_to_sums:
            self._hooks += [p.register_hook(self._before_hook(i)) for i, p in enumerate(self.params)]
        self._tasks: dict[int, weakref.ref[BackwardEnd]] = {}  # backwards that have not ended, the outermost first
        self._begun = -1  # the task in which the last gradient was ready
        self._expected: bool | None = None  # of a backward that will bring gradients: whether it reduces them

    def _laid_out_anew(self) -> None:
        reducer_registry.laid_out_anew(self)

    def close(self) -> None:
        """Leaves the parameters as they were before, without gradients."""
        if self.cycle.partly_stepped:
            warning.warn(
                f"parallelize again, after {self.cycle.failure}, unless one was loaded since: rank 0's "
                "weights become those of every rank"
            )
        self.detach()
        self._noted.remove()
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
        self.finish_weights()
        self.exchange.check_again()
        self.refuse_gone("step()")
        self.cycle.check_step(i for i in range(len(self.params)) if self.strategy.unreduced(i))

    # -- during backward ------------------------------------------------------------------------------------------

    def grad_ready(self, param: torch.Tensor) -> None:
        """Autograd has accumulated into its `.grad`."""
        self._begin_backward()
        self._told([*self._noted.take(), param])
        if not self.exchange.communicator.deferring:  # else each gradient's stream is asked for
            self._noted.note()

    def _grads_ready(self) -> None:
        """And into those that are noted."""
        self._begin_backward()
        self._told(self._noted.take())

    def _told(self, params: list[torch.Tensor]) -> None:
        if params and self._are_ready(params):
            self.exchange.run()

    def _are_ready(self, params: list[torch.Tensor]) -> bool:
        """Whether the exchange has something to do then."""
        try:
            positions = array("q", map(self._position.__getitem__, map(id, params)))
            if list(map(_dtype_of, params)) != list(map(self._dtypes.__getitem__, positions)):
                for i in positions:
                    self._check_dtype(i)
            self.strategy.grads_ready(positions)
            self.exchange.communicator.ordering.record_producer()
            return self.cycle.ready_several(positions)
        except BaseException:
            self._noted.put_back(params)
            raise

    def _before_hook(self, i: int) -> Callable[[torch.Tensor], None]:
        before, noted = weak_method(self.before_accumulate), self._noted

        def call(_grad: torch.Tensor) -> None:
            if not noted.bare:
                before(i)

        return call

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
            output.register_hook(hook(self._output_reached))

    def _output_reached(self) -> None:
        """A backward came through the model's output, before its first gradient is ready."""
        self.enter_graph_task()
        if self.cycle.phase == IDLE and self._expected is None:
            self._expected = self.require_grad_sync if any(map(_accumulates, self.params)) else None

    def _begin_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._begun:
            return
        self.enter_graph_task()
        self._begun, self._expected = task, None
        if self.cycle.phase != IDLE:
            return
        self.cycle.refuse_failed()
        # Under no_sync() shards are reduced, too, but more is to come.
        completes = self.require_grad_sync and not self.exchange.reorders
        self.exchange.begin(self.require_grad_sync, self._steppers.begin(self, completes))
        if self.strategy.adds_to_sums and not self.strategy.sets_aside:
            self._noted.bare = (
                sum(grad is not None for grad in map(_grad_of, self.params)) <= 1
            )  # the one that is ready

    def enter_graph_task(self) -> None:
        """In a graph task that may bring gradients: it is known from here on, and so is its end."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        offload_guard.refuse_gradients(self.params, "backward")
        self.finish_weights()
        self.finish_failed_backward()
        self._tasks[task] = queue_backward_end(self.backward_ended, task, gone=weak_method(self._backward_gone))

    def finish_failed_backward(self) -> None:
        """If the last backward raised: waits for what it sent, as the other ranks sent it too, and discards it."""
        ended = not self._tasks and self.cycle.phase == IDLE
        if ended or (self._tasks and all(end() is not None for end in self._tasks.values())):
            return
        self._backward_gone()
        self._tasks.clear()
        expected, self._begun, self._expected = self._expected, -1, None
        if expected and self.cycle.phase == IDLE and not self.failed:
            self.exchange.begin(True, [])  # on other ranks gradients were ready: it counts everywhere
        # It may have accumulated into a `.grad` of which the cycle was not told.
        self.cycle.died(self.strategy.modified_since(self.exchange.versions))
        self.exchange.run()  # an interrupt of it leaves the rest for the next time

    def _backward_gone(self, _end: object = None) -> None:
        """A backward raised. What is noted is ready, as it is on ranks that were told of it at once."""
        self._noted.tell()
        if any(end() is not None for end in self._tasks.values()) or not (noted := self._noted.take()):
            return
        try:
            self._are_ready(noted)
        except Exception:  # perhaps what backward raised; nobody can hear of it here
            self.strategy.discard([self._position[id(p)] for p in self._noted.take()])

    # -- at its end -----------------------------------------------------------------------------------------------

    def backward_ended(self, task: int) -> None:
        """Of one graph task; a nested one (reentrant checkpointing) leaves the end to the outermost."""
        self._told(self._noted.take())
        self._tasks.pop(task, None)
        if not self._tasks:
            self._expected = None
        if self._tasks or self.cycle.phase not in (ACCUMULATING, REDUCING):
            return
        self._noted.tell()
        if self.cycle.end():
            self.exchange.run()
            self._noted.completed(self.cycle.completed_by)


_dtype_of, _grad_of = operator.attrgetter("dtype"), operator.attrgetter("grad")


def _accumulates(param: torch.Tensor) -> bool:
    """Whether the running backward accumulates into `.grad`, as that of torch.autograd.grad does not."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch's answer for a gradient that is returned
        return False
