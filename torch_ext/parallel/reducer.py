"""The reducer of one parallelized model whose gradients are in buckets (every strategy but FSDP2's). Autograd's hooks
report to it; it turns them into events of the gradient cycle (`parallel/bucket_exchange.py`).

The end of backward waits for the sums, so that all code after `loss.backward()` sees reduced gradients.
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
    """Reduces the gradients of one model's parameters. The strategy (`parallel/strategies/strategy.py`) decides where
    they are stored."""

    def __init__(self, strategy: ShardingStrategy, number: int, settings: Settings) -> None:
        """number: from `agree`."""
        super().__init__(strategy.params, [p.name for p in strategy.plan.parameters])
        self.exchange = BucketExchange(strategy, number, settings, weak_method(self._layout_changed))
        self.require_grad_sync = True
        self._steppers = BucketSteppers(settings.step_in_backward)
        self.steps_in_backward = settings.step_in_backward
        self._dtypes = [p.param_dtype for p in strategy.plan.parameters]
        self._noted = NotedGradients(self.params, weak_method(self.grad_ready), hook(self._grads_ready))
        if strategy.prepares_grads:
            self._hooks += [p.register_hook(self._before_hook(i)) for i, p in enumerate(self.params)]
        self._tasks: dict[int, weakref.ref[BackwardEnd]] = {}  # by graph task: backwards under way, outermost first
        self._current_task = -1  # the graph task in which the last gradient was ready
        # Whether the backward that was entered, but has no gradient ready yet, will reduce; None: no such backward.
        self._expected_sync: bool | None = None

    def _layout_changed(self) -> None:
        reducer_registry.layout_changed(self)

    def close(self) -> None:
        """Restores the parameters to plain ones without gradients, in memory of their own."""
        if self.cycle.partly_stepped:
            warning.warn(
                f"parallelize again after {self.cycle.failure}. Unless a checkpoint was loaded since, rank 0's "
                "partly stepped weights are now copied to every rank"
            )
        self.detach()
        self._noted.remove()
        self.strategy.release()
        if self.exchange.weights is not None:
            self.exchange.weights.release()

    @contextmanager
    def synchronizing(self, enabled: bool) -> Iterator[None]:
        """Backwards inside this context reduce (enabled) or only accumulate; the previous setting is restored."""
        before, self.require_grad_sync = self.require_grad_sync, enabled
        try:
            yield
        finally:
            self.require_grad_sync = before

    def check_process_group(self, doing: str) -> None:
        if self.exchange.weights is None:
            return
        if (failure := self.cycle.failure) is not None:
            raise RuntimeError(f"{doing} after an exchange that failed: {failure}")
        self.exchange.communicator.check_process_group(doing)

    def before_step(self, call: str) -> None:
        """Called before the gradients are stepped, clipped or unscaled. Raises RuntimeError if they must not be: they
        are not reduced yet or not finite, or an exchange or the process group has failed."""
        self.finish_failed_backward()
        self.wait_for_weight_gathers()
        self.exchange.recheck_nonfinite()
        self.check_process_group(call)
        self.cycle.check_step(call, (i for i in range(len(self.params)) if self.strategy.unreduced(i)))

    # -- during backward ------------------------------------------------------------------------------------------

    def grad_ready(self, param: torch.Tensor) -> None:
        """Hook: autograd has accumulated into `.grad` of this parameter."""
        self._begin_backward()
        self._process_ready([*self._noted.take(), param])
        if not self.exchange.communicator.deferring:  # a GPU's hooks must run: each records its gradient's stream
            self._noted.note()

    def _grads_ready(self) -> None:
        """Hook of parameters that complete a bucket: processes all gradients that were noted so far."""
        self._begin_backward()
        self._process_ready(self._noted.take())

    def _process_ready(self, params: list[torch.Tensor]) -> None:
        if params and self._mark_ready(params):
            self.exchange.run()

    def _mark_ready(self, params: list[torch.Tensor]) -> bool:
        """Tells strategy and cycle that these gradients are ready. Returns whether the cycle has an action to run."""
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
            if not noted.started_without_grads:
                before(i)

        return call

    def before_accumulate(self, i: int) -> None:
        """Hook: autograd is about to accumulate into `.grad` of parameter i. It also runs when torch.autograd.grad is
        about to return that gradient."""
        if self.params[i].grad is None and not self.strategy.has_set_aside:
            return
        grad = self.exchange.kind_of_grad(i)
        if grad != GRAD_NONE:
            if not _accumulates(self.params[i]):
                return
            self._begin_backward()
        if flags := self.cycle.accumulate(i, grad):
            self.strategy.prepare(i, flags)

    def register_outputs(self, outputs: Any) -> None:
        """Hooks a forward's outputs. With reentrant checkpoints every parameter's gradient may come from a nested
        backward; these hooks let the reducer know the outer one first."""
        for output in tensors_with_graph(outputs):
            output.register_hook(hook(self._output_reached))

    def _output_reached(self) -> None:
        """Hook: a backward has reached the model's output; no gradient is ready yet."""
        self.enter_graph_task()
        if self.cycle.phase == IDLE and self._expected_sync is None:
            self._expected_sync = self.require_grad_sync if any(map(_accumulates, self.params)) else None

    def _begin_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._current_task:
            return
        self.enter_graph_task()
        self._current_task, self._expected_sync = task, None
        if self.cycle.phase != IDLE:
            return
        self.cycle.refuse_failed()
        # Sharded gradients are reduced under no_sync(), too, but more micro-batches follow: no step in this backward.
        completes = self.require_grad_sync and not self.exchange.reorders
        self.exchange.begin(self.require_grad_sync, self._steppers.begin(self, completes))
        if self.strategy.prepares_grads and not self.strategy.has_set_aside:
            self._noted.started_without_grads = (
                sum(grad is not None for grad in map(_grad_of, self.params)) <= 1
            )  # 1: the gradient that is ready now

    def enter_graph_task(self) -> None:
        """Registers the running graph task, which may produce gradients, and a callback at its end."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        offload_guard.refuse_gradients(self.params, "backward")
        self.wait_for_weight_gathers()
        self.finish_failed_backward()
        self._tasks[task] = queue_backward_end(self.backward_ended, task, on_freed=weak_method(self._backward_failed))

    def finish_failed_backward(self) -> None:
        """Recovers if the last backward raised: waits for the messages that it sent, which the other ranks sent, too,
        and discards them. Does nothing otherwise."""
        ended = not self._tasks and self.cycle.phase == IDLE
        if ended or (self._tasks and all(end() is not None for end in self._tasks.values())):
            return
        self._backward_failed()
        self._tasks.clear()
        expected, self._current_task, self._expected_sync = self._expected_sync, -1, None
        if expected and self.cycle.phase == IDLE and not self.failed:
            # No gradient was ready here, but maybe on other ranks: all ranks must count the same cycles.
            self.exchange.begin(True, [])
        # The backward may have accumulated into a `.grad` without having told the cycle.
        self.cycle.died(self.strategy.modified_since(self.exchange.versions))
        self.exchange.run()  # after an interrupt the next call goes on

    def _backward_failed(self, _end: object = None) -> None:
        """Called when a callback is freed. If its backward raised, marks the noted gradients as ready: on ranks that do
        not note, they are."""
        self._noted.stop_noting()
        if any(end() is not None for end in self._tasks.values()) or not (noted := self._noted.take()):
            return
        try:
            self._mark_ready(noted)
        except Exception:  # perhaps the error that the backward raised; here it would reach no caller
            self.strategy.discard([self._position[id(p)] for p in self._noted.take()])

    # -- at the end of backward -----------------------------------------------------------------------------------

    def backward_ended(self, task: int) -> None:
        """Callback at the end of a graph task. Only the outermost one (reentrant checkpointing nests them) ends the
        cycle's backward."""
        self._process_ready(self._noted.take())
        self._tasks.pop(task, None)
        if not self._tasks:
            self._expected_sync = None
        if self._tasks or self.cycle.phase not in (ACCUMULATING, REDUCING):
            return
        self._noted.stop_noting()
        if self.cycle.end():
            self.exchange.run()
            self._noted.completed(self.cycle.completed_by)


_dtype_of, _grad_of = operator.attrgetter("dtype"), operator.attrgetter("grad")


def _accumulates(param: torch.Tensor) -> bool:
    """Whether the running backward accumulates into `.grad`; torch.autograd.grad's does not."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch raises for a gradient that torch.autograd.grad returns
        return False
