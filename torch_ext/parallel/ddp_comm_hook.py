"""`register_comm_hook`: this library's reduction inside stock DistributedDataParallel."""

import concurrent.futures
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from torch_ext.comm.communicator import Work
from torch_ext.comm.lost_ranks import announce_error, withdraw_error
from torch_ext.grads.errors import names_of
from torch_ext.grads.stats import Watch
from torch_ext.parallel.bucket_plan import trainable
from torch_ext.parallel.cycle import DDP_HOOK, DISCARD, IDLE, IF_SENT, Action, Cycle, CycleDriver, Options
from torch_ext.parallel.ddp_connection import Connection
from torch_ext.parallel.hook_steps import Guard
from torch_ext.parallel.in_use import instances
from torch_ext.policy.policy import Policy

Reduced: TypeAlias = "torch.futures.Future[torch.Tensor]"


class _Pending(NamedTuple):
    """A bucket under way, and what DDP waits for: its buffer, once the mean is in it."""

    works: list[Work]
    """Of its messages, which end in order."""
    buffer: torch.Tensor
    future: Reduced

    def wait(self) -> None:
        for work in self.works:
            work.result()


class CommHook(CycleDriver):
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
        number = self._number if self._connection is None else self.cycle.number
        return {"policy": self._policy, "factor": self._factor, "transport": self._transport, "cycle": number}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._policy, self._factor = state["policy"], state["factor"]
        self._transport, self._number = state["transport"], state["cycle"]
        self._connection: Connection | None = None
        self._guard = Guard()
        self._bucket: dist.GradBucket | None = None  # which DDP hands over
        self._pending: list[_Pending] = []  # of this backward, by message
        self._watch = Watch()
        self._read_reports: Callable[[], list[torch.Tensor]] | None = None  # which are under way
        self._error: Exception | None = None  # which the end of this backward raises
        self._lost = False  # a message failed, on whatever thread

    def _connect(self, ddp: DistributedDataParallel) -> Connection:
        """Every rank, before its first bucket."""
        self._guard.watch([p for _, p in trainable(ddp.module)])
        found = Connection(ddp, self._policy, self._factor, self._transport, self._number)
        rank, world_size = found.communicator.rank, found.communicator.world_size
        options = Options(DDP_HOOK, rank, world_size, 1, check_for_nan=self._policy.check_for_nan_in_grad)
        self.cycle = Cycle(options, found.names, n_buckets=len(found.names), cycle=self._number)
        self._connection, self._guard.cycle = found, self.cycle
        return found

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
        sent = len(self._pending)
        try:
            connection = self._connection or self._connect(_ddp_of(self))
            if bucket.index() == 0:
                sent = 0
                self._begin(connection)
            self._bucket = bucket
            self.cycle.refuse_failed()
            self.cycle.given(bucket.index(), bucket.buffer().numel(), last=bucket.is_last())
            self.run()
        except Exception as error:
            self._error = self._error or error
            # Else the ranks are not at the same place any more, and no later message could tell.
            if self._connection is None:
                self._guard.failure = str(error)
            elif self.cycle.phase != IDLE:  # else it is the verdict
                self.cycle.fail(str(error))
        self._bucket = None
        if len(self._pending) > sent:
            future = self._pending[-1].future
        else:
            future = _future_of(bucket.buffer())
            future.set_result(bucket.buffer())
        if bucket.is_last():
            self._end()
        return future

    def _begin(self, connection: Connection) -> None:
        connection.begin()
        self._error = None
        if self.cycle.phase != IDLE:  # of a backward that raised; the other ranks sent it too
            self.cycle.died()
            self.run()
        self._pending, self._watch = [], Watch()
        self.cycle.begin()
        # DDP reduces what is in `.grad`, once more where it was not zeroed.
        self.cycle.zero(range(self.cycle.n))

    def do_check(self, _action: Action) -> None:
        assert self._connection is not None and self._bucket is not None
        self._watch.check(self._bucket.gradients(), self._connection.positions(self._bucket))

    def do_report(self, _action: Action) -> None:
        assert self._connection is not None
        self._connection.communicator.ordering.wait_producers()  # with the streams of the earlier checks
        report = self.cycle.report(self._watch.first(), [])
        self._read_reports = self._connection.exchange(report, self.cycle.number)

    def do_read(self, _action: Action) -> None:
        assert self._read_reports is not None
        self.cycle.read(self._read_reports())

    def do_send(self, _action: Action) -> None:
        assert self._connection is not None and self._bucket is not None
        works, buffer = self._connection.reduce(self._bucket, self.cycle.number), self._bucket.buffer()
        pending = _Pending(works, buffer, _future_of(buffer))
        self._pending.append(pending)
        if isinstance(works[-1], concurrent.futures.Future):
            works[-1].add_done_callback(lambda _: self._complete(pending))

    def do_wait(self, action: Action) -> None:
        """Results are asked for when the last bucket has left: until then backward goes on."""
        if action.flags & IF_SENT and action.message >= len(self._pending):
            return
        pending = self._pending[action.message]
        if action.flags & DISCARD:
            pending.wait()
        elif not isinstance(pending.works[-1], concurrent.futures.Future):
            self._complete(pending)

    def do_install(self, _action: Action) -> None:
        """DDP does."""

    def do_recovered(self, _action: Action) -> None:
        self._pending = []

    def _complete(self, pending: _Pending) -> None:
        """The future never fails: DDP would take the stored exception for a tensor, and say so. Any thread."""
        try:
            pending.wait()
        except Exception as error:
            self._error = self._error or error
            self._lost = True
        pending.future.set_result(pending.buffer)  # on a device: when the current stream has waited for it

    def _end(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # join() sends in place of a backward
            self._raise()
        else:  # DDP queues its end next, so what that one queues comes after it
            Variable._execution_engine.queue_callback(lambda: Variable._execution_engine.queue_callback(self._raise))

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is None:
            return
        if self._lost and self._connection is not None:
            self.cycle.fail(str(error))
        self._guard.alarm()
        raise error


def _future_of(buffer: torch.Tensor) -> Reduced:
    return torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])


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
    Accumulation stays DDP's, in the parameters' dtype: main_grads_dtype plays no part.
    Each of DDP's buckets travels as several messages where that is quicker, and compressed where the link is slow
    (grad_comm_compression); how fast it is the ranks measure here, as `parallelize` does, or link_gbps says.
    transport: as in `parallelize`.

    A step of this library's optimizers that was interrupted when some parameters were perhaps stepped is an error of
    the next backward or step; those of torch.optim do not say.

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
