"""What optimizers ask about the gradients of a parallelized model (reducer_registry.GradientReducer)."""

import weakref
from collections.abc import Iterable, Sequence

import torch

from torch_ext.comm.communicator import Part, Work
from torch_ext.grads.backward_end import BackwardEnd
from torch_ext.grads.errors import refuse_busy
from torch_ext.parallel.bucket_exchange import BucketExchange
from torch_ext.parallel.bucket_plan import BucketPlan, part_of
from torch_ext.parallel.bucket_steppers import BucketSteppers
from torch_ext.parallel.cycle import IDLE
from torch_ext.parallel.reducer_base import ReducerBase
from torch_ext.parallel.strategies.strategy import ShardingStrategy
from torch_ext.params import reducer_registry
from torch_ext.params.local_shard import LocalShard


class BucketGradients(ReducerBase):
    """The optimizer's side of a reducer with buckets; its subclass `reducer.BucketReducer` has the backward's side."""

    exchange: BucketExchange
    _steppers: BucketSteppers
    _tasks: "dict[int, weakref.ref[BackwardEnd]]"  # by graph task: backwards under way, outermost first

    @property
    def strategy(self) -> ShardingStrategy:
        return self.exchange.strategy

    @property
    def plan(self) -> BucketPlan:
        return self.strategy.plan

    @property
    def sharded(self) -> bool:
        return self.strategy.sharded

    @property
    def ranks(self) -> frozenset[int]:
        return self.exchange.communicator.ranks

    @property
    def replicas(self) -> "torch.distributed.ProcessGroup | None":
        return None if self.sharded else self.exchange.communicator.group

    def local(self, param: torch.Tensor) -> LocalShard:
        i, weights = self._position[id(param)], self.exchange.weights
        if weights is None:
            return LocalShard(param, 0, (), None)
        return weights.local(i, self.strategy.owned.get(i), self.exchange.communicator.group)

    def runs(self, param: torch.Tensor) -> list[tuple[int, int]]:
        i = self._position[id(param)]
        planned, world_size = self.plan.parameters[i], self.exchange.communicator.world_size
        own = range(planned.bucket, planned.bucket + 1)
        ranges = (part_of(self.plan, own, Part(rank, world_size)) for rank in range(world_size))
        clipped = [[min(max(at - planned.start, 0), planned.numel) for at in ends] for ends in ranges]
        return [(begin, end) for begin, end in clipped]

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        i = self._position[id(param)]
        self._check_dtype(i)
        return self.strategy.grad(i)

    def part(self, param: torch.Tensor) -> torch.Tensor:
        return self.strategy.part(self._position[id(param)])

    def register_stepper(self, stepper: reducer_registry.BucketStepper) -> None:
        self._steppers.add(stepper)

    def stats(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        with_grads = sum(self.strategy.grad(i) is not None for i in range(len(self.params)))
        if self.strategy.versions() != self.exchange.versions or len(params) != with_grads:
            return None
        return self.strategy.stats.clone()

    def gather(self, bucket: int) -> Work:
        return self.exchange.gather(bucket)

    def wait_for_weight_gathers(self) -> None:
        self.exchange.wait_for_weight_gathers()

    def refuse_moving(self, doing: str, weights: bool) -> None:
        self.finish_failed_backward()
        self.wait_for_weight_gathers()
        refuse_busy(doing, self.forwards_running, bool(self._tasks) or self.cycle.phase != IDLE)
        self._steppers.refuse_moving(doing)
        if weights and self.exchange.weights is not None:
            self.exchange.weights.refuse_lent(doing)

    def gradient_memory(self) -> Sequence[torch.Tensor]:
        return self.strategy.memory

    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        self.finish_failed_backward()  # or sums under way would overwrite the zeros
        positions = self._positions(params)
        self.strategy.zero(positions)
        self.cycle.zero(positions)

    def _check_dtype(self, i: int) -> None:
        dtype, planned = self.params[i].dtype, self.plan.parameters[i].param_dtype
        if dtype != planned:
            raise RuntimeError(
                f"parameter {self.names[i]!r} became {dtype} after parallelize planned its gradients for {planned}: "
                "convert the model first, or call parallelize again"
            )
