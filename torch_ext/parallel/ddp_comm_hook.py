"""`register_comm_hook`: this library's reduction inside stock DistributedDataParallel."""

import concurrent.futures
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from torch_ext.comm.communicator import Work
from torch_ext.comm.lost_ranks import announce_error, withdraw_error
from torch_ext.grads.errors import names_of
from torch_ext.grads.stats import ALL_FINITE, Watch
from torch_ext.parallel.bucket_plan import trainable
from torch_ext.parallel.ddp_connection import Connection
from torch_ext.parallel.hook_steps import Guard
from torch_ext.parallel.in_use import instances
from torch_ext.policy.policy import Policy

Reduced: TypeAlias = "torch.futures.Future[torch.Tensor]"


class _Pending(NamedTuple):
    """A bucket under way, and what DDP waits for: its buffer, once the mean is in it."""

    work: Work
    buffer: torch.Tensor
    future: Reduced


class _Backward:
    """What one backward has sent and found."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.pending: list[_Pending] = []
        self.error: Exception | None = None  # which its end raises
        self.poisoned: list[str] = []  # parameters whose gradients are not finite on some rank


class CommHook:
    """One registered hook.

    As torch's own states of hooks it is copied and pickled with its model or alone. A copy has what was asked for and
    the number of the cycle; DDP calls the hook of a copy after register_comm_hook only, torch's or ours. With torch's,
    `ddp.register_comm_hook(copy, hook)`, its first backward connects the ranks.
    """

    def __init__(
        self, ddp: DistributedDataParallel, policy: Policy, given_factor: float | None, transport: str
    ) -> None:
        self.__setstate__({"policy": policy, "factor": given_factor, "transport": transport, "cycle": 0})
        self._connect(ddp)

    def __getstate__(self) -> dict[str, Any]:
        return {"policy": self._policy, "factor": self._factor, "transport": self._transport, "cycle": self._cycle}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._policy, self._factor = state["policy"], state["factor"]
        self._transport, self._cycle = state["transport"], state["cycle"]
        self._connection: Connection | None = None
        self._backward = _Backward()
        self._guard = Guard()

    def _connect(self, ddp: DistributedDataParallel) -> Connection:
        """Every rank, before its first bucket."""
        self._guard.watch([p for _, p in trainable(ddp.module)])
        self._connection = Connection(ddp, self._policy, self._factor, self._transport, self._cycle)
        return self._connection

    def wire_bytes(self) -> int:
        """Bytes that this rank sent in the last backward that reduced."""
        return 0 if self._connection is None else self._connection.wire_bytes

    def frozen(self) -> list[str]:
        """Parameters whose gradients DDP waits for, and for which there will be none."""
        if self._connection is None:
            return []
        return [self._connection.names[i] for p, i in self._connection.position.items() if not p.requires_grad]

    def reduce(self, bucket: dist.GradBucket) -> Reduced:
        """The hook: DDP's bucket becomes the sum over ranks divided by the factor, rounded once to the dtype of
        gathered sums.

        It does not raise, after which DDP would take this reduction for unfinished for ever. What goes wrong is raised
        when DDP has ended its part of the backward, so that the next one finds everything in order.
        """
        work: Work | None = None
        try:
            connection = self._connection or self._connect(_ddp_of(self))
            if bucket.index() == 0:
                self._begin(connection)
            work = self._start(connection, bucket)
        except Exception as error:
            self._fail(error)
        future = self._future(work, bucket.buffer())
        if bucket.is_last():
            self._end()
        return future

    def _begin(self, connection: Connection) -> None:
        connection.begin()
        self._guard.begin()
        abandoned, self._backward = self._backward.pending, _Backward()
        for one in abandoned:  # of a backward that raised; the other ranks sent it too
            self._wait(one.work)

    def _start(self, connection: Connection, bucket: dist.GradBucket) -> Work | None:
        """None: the bucket stays as it is, since the end of this backward raises."""
        if self._guard.failure is not None:
            raise RuntimeError(f"gradients cannot be reduced any more: {self._guard.failure}")
        if self._policy.check_for_nan_in_grad:
            self._backward.watch.check(bucket.gradients(), connection.positions(bucket))
            if bucket.is_last() and self._nonfinite(connection):
                return None
        return connection.reduce(bucket, self._cycle)

    def _nonfinite(self, connection: Connection) -> bool:
        """Whether some rank found a gradient that is not finite, which every rank's backward raises."""
        by_rank = connection.gather_nonfinite(self._backward.watch, self._cycle)
        found = {rank: connection.names[i] for rank, i in enumerate(by_rank) if i != ALL_FINITE}
        if found:
            self._backward.poisoned = sorted(set(found.values()))
            shown = ", ".join(f"{name!r} on rank {rank}" for rank, name in found.items())
            self._backward.error = RuntimeError(
                f"gradients with NaN or Inf before communication (check_for_nan_in_grad): {shown}"
            )
        return bool(found)

    def _future(self, work: Work | None, buffer: torch.Tensor) -> Reduced:
        future: Reduced = torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        if work is None:
            future.set_result(buffer)
            return future
        pending = _Pending(work, buffer, future)
        self._backward.pending.append(pending)
        if isinstance(work, concurrent.futures.Future):
            work.add_done_callback(lambda _: self._complete(pending))
        return future

    def _complete(self, pending: _Pending) -> None:
        """The future never fails: DDP would take the stored exception for a tensor, and say so. Any thread."""
        self._wait(pending.work)
        pending.future.set_result(pending.buffer)  # on a device: when the current stream has waited for it

    def _end(self) -> None:
        """Results are asked for when the last bucket has left: until then backward goes on."""
        self._cycle += 1
        pending, self._backward.pending = self._backward.pending, []
        for one in pending:
            if not isinstance(one.work, concurrent.futures.Future):
                self._complete(one)
        if torch._C._current_graph_task_id() == -1:  # join() sends in place of a backward
            self._raise()
        else:  # DDP queues its end next, so what that one queues comes after it
            Variable._execution_engine.queue_callback(lambda: Variable._execution_engine.queue_callback(self._raise))

    def _raise(self) -> None:
        error, self._backward.error = self._backward.error, None
        if error is None:
            return
        if self._guard.failure is None:
            self._guard.poisoned(self._backward.poisoned)
        raise error

    def _wait(self, work: Work) -> None:
        try:
            work.result()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The ranks are not at the same place any more, and no later message could tell."""
        self._backward.error = self._backward.error or error
        self._guard.failed(str(error))


def _refuse_frozen(ddp: DistributedDataParallel, _inputs: Any) -> None:
    """Before a forward of it. RuntimeError where DDP would wait for the gradient of a frozen parameter for ever, and
    with it the other ranks, which are told."""
    state = next((s for _, s in ddp._comm_hooks if isinstance(s, CommHook)), None)
    if state is None or not torch.is_grad_enabled() or ddp.find_unused_parameters or ddp.static_graph:
        return
    if frozen := state.frozen():
        what = f"forward of a DistributedDataParallel on rank {dist.get_rank()}"
        message = f"{what}: {names_of(frozen, range(len(frozen)))} frozen since it was made"
        announce_error(ddp.process_group, message)
        raise RuntimeError(
            f"{message}: no gradient comes, for which DDP waits. Freeze parameters on every rank before "
            "DistributedDataParallel is made, or make it with find_unused_parameters=True"
        )
    withdraw_error(ddp.process_group)


def _ddp_of(state: CommHook) -> DistributedDataParallel:
    """Whose hook has this state: DDP tells the hook its buckets only."""
    for ddp in instances(DistributedDataParallel):
        if any(known is state for _, known in getattr(ddp, "_comm_hooks", ())):
            return ddp
    raise RuntimeError("this hook's state is registered with no DistributedDataParallel: call its register_comm_hook")


# DDP looks at the parameter's name and at the annotations.
def _hook(state: CommHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


def register_comm_hook(
    ddp: DistributedDataParallel,
    policy: Policy,
    *,
    gradient_divide_factor: float | None = None,
    transport: str = "torch",
) -> CommHook:
    """Puts this library's reduction into stock DistributedDataParallel; every rank calls it, before the first backward.

    Each of DDP's buckets is packed in the policy's grad_comm_dtype, sent, summed in fp32 in rank order, divided by
    gradient_divide_factor (None: the number of ranks) and rounded once to the dtype in which sums are gathered
    (grad_gather_dtype; the wire's, and bf16 beside an 8-bit wire): the bits of `parallelize` with no_shard, whatever
    DDP's buckets are.
    Accumulation stays DDP's, in the parameters' dtype: main_grads_dtype plays no part. grad_comm_compression: "on"
    alone compresses; the wire is not measured. transport: as in `parallelize`.

    A copy of the model (deepcopy, AveragedModel, torch.save) has a copy of the hook's state, but, as with torch's
    hooks, reduces as DDP does without one until a hook is registered on it, too.

    Returns the hook's state, whose wire_bytes() counts what this rank sent. Raises TypeError, ValueError or
    RuntimeError, on every rank, for what is not legal or not equal on all ranks.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp is a {type(ddp).__name__}; a DistributedDataParallel is expected (plain modules: parallelize)"
        )
    state = CommHook(ddp, policy, gradient_divide_factor, transport)
    ddp.register_comm_hook(state, _hook)
    ddp.register_forward_pre_hook(_refuse_frozen)
    return state
