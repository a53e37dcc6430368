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
    """A DDP bucket under way, and the future that DDP waits for: the buffer, once the mean is in it."""

    works: list[Work]
    """The handles of the bucket's messages, which complete in this order."""
    buffer: torch.Tensor
    future: Reduced

    def wait(self) -> None:
        for work in self.works:
            work.result()


class CommHook(CycleDriver):
    """The state of one registered hook.

    Like the state of torch's own hooks it can be copied and pickled, with its model or alone. A copy keeps the settings
    and the cycle's number. A copy of a DDP calls no hook until register_comm_hook, torch's or ours, was called on it.
    With torch's, `ddp.register_comm_hook(copy, hook)`, the first backward connects the ranks.
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
        self._bucket: dist.GradBucket | None = None  # the one that DDP hands over now
        self._pending: list[_Pending] = []  # of this backward, by message
        self._watch = Watch()
        self._read_reports: Callable[[], list[torch.Tensor]] | None = None  # waits for the ranks' reports
        self._error: Exception | None = None  # raised at the end of this backward
        self._lost = False  # whether a message failed, on any thread

    def _connect(self, ddp: DistributedDataParallel) -> Connection:
        """Connects the ranks; every rank calls it before its first bucket."""
        self._guard.watch([p for _, p in trainable(ddp.module)])
        found = Connection(ddp, self._policy, self._factor, self._transport, self._number)
        rank, world_size = found.communicator.rank, found.communicator.world_size
        options = Options(DDP_HOOK, rank, world_size, 1, check_for_nan=self._policy.check_for_nan_in_grad)
        self.cycle = Cycle(options, found.names, n_buckets=len(found.names), cycle=self._number)
        self._connection, self._guard.cycle, self._guard.sent = found, self.cycle, found.sent
        return found

    def wire_bytes(self) -> int:
        """Returns the bytes that this rank sent for the current optimizer step, in all its backwards: as wire_bytes of
        a model that `parallelize` changed. After step() it is the whole of that step, until the next step's first
        backward that reduces."""
        return 0 if self._connection is None else self._connection.sent.count

    def frozen(self) -> list[str]:
        """Returns the parameters that DDP waits for but that get no gradient: they were frozen."""
        if self._connection is None:
            return []
        return [self._connection.names[i] for p, i in self._connection.position.items() if not p.requires_grad]

    def reduce(self, bucket: dist.GradBucket) -> Reduced:
        """The hook: replaces the content of DDP's bucket by the sum over the ranks, divided by the factor and rounded
        once to the dtype of gathered sums.

        It never raises: after an exception DDP would consider this reduction unfinished for ever. Errors are raised
        when DDP has finished its part of the backward, so that the next backward finds DDP in order.
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
            if self._connection is None:
                self._guard.failure = str(error)
            elif self.cycle.phase != IDLE:  # in IDLE the error is the verdict of the ranks' reports, equal on all
                # The ranks are no longer at the same message, and could not agree on anything by a later one.
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
        if self.cycle.phase != IDLE:  # the last backward raised; the other ranks sent its messages, too
            self.cycle.died()
            self.run()
        self._pending, self._watch = [], Watch()
        self.cycle.begin()
        # DDP reduces whatever is in `.grad`, an earlier result that was not zeroed included.
        self.cycle.zero(range(self.cycle.n))

    def do_check(self, _action: Action) -> None:
        assert self._connection is not None and self._bucket is not None
        self._watch.check(self._bucket.gradients(), self._connection.positions(self._bucket))

    def do_report(self, _action: Action) -> None:
        assert self._connection is not None
        self._connection.communicator.ordering.wait_producers()  # the streams on which earlier buckets were checked
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
        """Waits for a message. The cycle asks for this after the last bucket was sent: until then backward goes on."""
        if action.flags & IF_SENT and action.message >= len(self._pending):
            return
        pending = self._pending[action.message]
        if action.flags & DISCARD:
            pending.wait()
        elif not isinstance(pending.works[-1], concurrent.futures.Future):
            self._complete(pending)

    def do_install(self, _action: Action) -> None:
        """Does nothing: DDP itself puts the means into `.grad`."""

    def do_recovered(self, _action: Action) -> None:
        self._pending = []

    def _complete(self, pending: _Pending) -> None:
        """Completes DDP's future when the messages are done. Called on any thread. The future never gets an exception:
        DDP would take it for a tensor and raise a misleading error."""
        try:
            pending.wait()
        except Exception as error:
            self._error = self._error or error
            self._lost = True
        pending.future.set_result(pending.buffer)  # on a GPU: complete in the current stream's order

    def _end(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # join() calls the hook outside of any backward
            self._raise()
        else:  # DDP queues its own end after this call: a callback that is queued by a callback runs after it
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
    """Forward pre-hook. Raises RuntimeError if a parameter is frozen: DDP would wait for its gradient for ever, and the
    other ranks with it. The error is announced to them."""
    state = next((s for _, s in ddp._comm_hooks if isinstance(s, CommHook)), None)
    if state is None or not torch.is_grad_enabled() or ddp.find_unused_parameters or ddp.static_graph:
        return
    if frozen := state.frozen():
        what = f"forward of a DistributedDataParallel on rank {dist.get_rank()}"
        message = f"{what}: {names_of(frozen, range(len(frozen)))} frozen since it was made"
        announce_error(ddp.process_group, message)
        raise RuntimeError(
            f"{message}: DDP would wait for its gradient forever. Freeze parameters on every rank before "
            "DistributedDataParallel is made, or make it with find_unused_parameters=True"
        )
    withdraw_error(ddp.process_group)


def _ddp_of(state: CommHook) -> DistributedDataParallel:
    """Returns the DDP on which this state is registered: DDP passes only buckets to a hook, so it is searched for."""
    for ddp in instances(DistributedDataParallel):
        if any(known is state for _, known in getattr(ddp, "_comm_hooks", ())):
            return ddp
    raise RuntimeError("this hook's state is registered with no DistributedDataParallel: call its register_comm_hook")


# DDP checks the name `bucket` and both annotations.
def _hook(state: CommHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


def register_comm_hook(
    ddp: DistributedDataParallel,
    policy: Policy,
    *,
    gradient_divide_factor: float | None = None,
    transport: str = "torch",
) -> CommHook:
    """Makes a stock DistributedDataParallel reduce by this library. Every rank calls it before the first backward.

    Each of DDP's buckets is packed in the policy's grad_comm_dtype, sent, summed in fp32 in rank order, divided by
    gradient_divide_factor (None: the number of ranks) and rounded once to the dtype in which sums are gathered
    (grad_gather_dtype; None: the wire's dtype, or bf16 with an 8-bit wire). The result has the bits of `parallelize`
    with no_shard, whatever DDP's buckets are.
    DDP itself accumulates, in the parameters' dtype: main_grads_dtype has no effect.
    Each of DDP's buckets is sent as several messages if that is faster, and compressed if the link is slow
    (grad_comm_compression). The link's speed is link_gbps, or is measured here, as in `parallelize`.
    transport: as in `parallelize`.

    If a step of this library's optimizers was interrupted and may have stepped some parameters, the next backward or
    step raises. Optimizers of torch.optim do not detect this.

    A copy of the model (deepcopy, AveragedModel, torch.save) has a copy of the hook's state. But, as with torch's
    hooks, the copy reduces like DDP without a hook until one is registered on it, too.

    Returns the hook's state, whose wire_bytes() counts what this rank sent for an optimizer step. Raises TypeError,
    ValueError or RuntimeError on every rank if an argument is illegal or differs between ranks.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp is a {type(ddp).__name__}; a DistributedDataParallel is expected (plain modules: parallelize)"
        )
    state = CommHook(ddp, policy, gradient_divide_factor, transport)
    ddp.register_comm_hook(state, _hook)
    ddp.register_forward_pre_hook(_refuse_frozen)
    return state
