"""`register_comm_hook`: the exchange inside stock DistributedDataParallel."""

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from torch_ext.comm import compression
from torch_ext.comm.communicator import MAX_BUCKETS, Part, Work, divide_factor, tag
from torch_ext.comm.factory import make_communicator
from torch_ext.comm.init_sync import agree
from torch_ext.comm.lost_ranks import announce_error, withdraw_error
from torch_ext.comm.lost_ranks import refuse as refuse_group
from torch_ext.comm.nccl_transport import refuse
from torch_ext.comm.wire import BLOCK, ParamSlice, RoundingSeeds, WireBuffer, pack, reduce_chunks
from torch_ext.grads.errors import names_of
from torch_ext.grads.stats import ALL_FINITE, Watch
from torch_ext.native import ops
from torch_ext.parallel.bucket_plan import plan_buckets
from torch_ext.parallel.hook_steps import Guard
from torch_ext.parallel.in_use import instances
from torch_ext.params import param_groups
from torch_ext.policy.policy import Policy


class CommHook:
    """One registered hook. Its state is kept by parameter: DDP renumbers its buckets after the first backward.

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
        self._exchange: Any = None  # an Exchange, once the ranks are connected
        self._names: list[str] = []
        self._position: dict[torch.Tensor, int] = {}
        self._watch = Watch()
        self._bytes_before = 0
        self._pending: list[tuple[Work, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._error: Exception | None = None  # which the end of this backward raises
        self._poisoned: list[str] = []  # which are not finite on some rank
        self._guard = Guard()

    def _connect(self, ddp: DistributedDataParallel) -> None:
        """Every rank, before its first bucket."""
        policy, given_factor, transport = self._policy, self._factor, self._transport
        named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._position = {p: i for i, (_, p) in enumerate(named)}
        self._guard.watch([p for _, p in named])
        device = named[0][1].device
        refuse_group(ddp.process_group, "register_comm_hook")
        exchange = make_communicator(ddp.process_group, device, transport if device.type == "cuda" else "torch")
        world_size = exchange.world_size
        plan, failure = None, None
        self._divide_factor = 0.0
        try:
            refuse(transport, device)
            compression.refuse(policy, exchange.can_compress)
            self._divide_factor = divide_factor(given_factor, world_size)
            _refuse_sparse(ddp.module, named)
            plan = plan_buckets(named, policy, world_size)
        except (ValueError, TypeError, RuntimeError) as error:
            failure = error
        self._number = agree(
            exchange,
            caller="register_comm_hook",
            fingerprint=0 if plan is None else plan.fingerprint,
            lines=[
                f"divide by {self._divide_factor}, NaN check {policy.check_for_nan_in_grad}, sums gathered in "
                f"{policy.grad_gather_dtype}, transport {transport}, "
                f"compressed below {policy.compress_below_gbps} Gbit/s, gradient cycle {self._cycle}",
                *([] if plan is None else plan.lines()),
            ],
            failure=failure,
        )
        assert plan is not None
        exchange.compresses = compression.is_certain(policy)
        self._check_for_nan: bool = policy.check_for_nan_in_grad
        self._ids = param_groups.ids_of(self._names)
        self._gather_dtype: torch.dtype | None = policy.grad_gather_dtype
        self._wire = [p.grad_comm_dtype for p in plan.parameters]
        self._exchange, self._bytes_before = exchange, exchange.bytes_sent

    def wire_bytes(self) -> int:
        """Bytes that this rank sent in the last backward that reduced."""
        return 0 if self._exchange is None else self._exchange.bytes_sent - self._bytes_before

    def frozen(self) -> list[str]:
        """Parameters whose gradients are expected and will not come."""
        return [name for name, p in zip(self._names, self._position, strict=True) if not p.requires_grad]

    def reduce(self, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """The hook: DDP's bucket becomes the sum over ranks divided by the factor, rounded once to the dtype of
        gathered sums.

        It does not raise, after which DDP would take this reduction for unfinished for ever. What goes wrong is raised
        when DDP has ended its part of the backward, so that the next one finds everything in order.
        """
        grads = bucket.buffer()
        handle: Work | None = None
        try:
            if self._exchange is None:
                self._connect(_ddp_of(self))
            if bucket.index() == 0:
                self._begin()
            handle = self._send(bucket, grads)
        except Exception as error:
            self._fail(error)
        future = self._future(handle, grads)
        if bucket.is_last():
            self._end()
        return future

    def _begin(self) -> None:
        self._bytes_before, self._watch, self._error = self._exchange.bytes_sent, Watch(), None
        self._poisoned = []
        self._guard.begin()
        abandoned, self._pending = self._pending, []  # of a backward that raised; the other ranks sent it too
        for handle, _, _ in abandoned:
            self._wait(handle)

    def _send(self, bucket: dist.GradBucket, grads: torch.Tensor) -> Work | None:
        """Starts the bucket's exchange; None: it stays as it is, since the end of this backward raises."""
        if self._guard.failure is not None:
            raise RuntimeError(f"gradients cannot be reduced any more: {self._guard.failure}")
        members = [self._position[p] for p in bucket.parameters()]
        if self._check_for_nan and (found := self._look_for_nan(bucket, members)) is not None:
            self._error = found
            return None
        # DDP's bucket has one dtype, so its parameters have one on the wire. Each begins a block of its own there, so
        # that nothing depends on which of them DDP put together.
        numels = [p.numel() for p in bucket.parameters()]
        values = grads.split(numels)
        placed, numel = _placed(members, numels, BLOCK * self._exchange.world_size)
        cycle, scale = self._cycle, 1.0 / self._divide_factor
        wire = WireBuffer.empty(numel, self._wire[members[0]], grads.device)
        pack(values, placed, self._ids, wire, RoundingSeeds.of_parts(self._exchange.rank, cycle))
        dtype = self._gather_dtype or (torch.bfloat16 if wire.coded else wire.data.dtype)
        gathered = wire if dtype == wire.data.dtype else WireBuffer.empty(numel, dtype, grads.device)

        def install(chunks: Sequence[WireBuffer], part: Part) -> None:
            own = gathered.part(*part)
            if not gathered.coded:
                reduce_chunks(chunks, own.data, scale)
                return
            total = torch.empty(own.data.numel(), dtype=torch.float32, device=grads.device)
            reduce_chunks(chunks, total, scale)
            mine = _within(placed, part.number * total.numel(), total.numel())
            pack([total[p.at : p.at + p.numel] for p in mine], mine, self._ids, own, RoundingSeeds.of_sums(cycle))

        def finish() -> None:
            begins = torch.tensor([p.at for p in placed], dtype=torch.int64)
            ops.call("bucket_unpack_", gathered.data, gathered.scales, begins, list(values))

        first, last = self._names[members[0]], self._names[members[-1]]
        return self._exchange.reduce_scatter(
            wire,
            install,
            result=gathered,
            tag=tag(self._number, cycle, bucket.index()),
            label=f"gradients of cycle {cycle}, DDP bucket {bucket.index()} ({first!r} ... {last!r})",
            on_complete=finish,
        )

    def _future(self, handle: Work | None, grads: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        device = grads.device
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if device.type == "cpu" else [device]
        )
        if handle is None:
            future.set_result(grads)
            return future
        self._pending.append((handle, grads, future))
        if isinstance(handle, concurrent.futures.Future):
            handle.add_done_callback(lambda done: self._settle(done, grads, future))
        return future

    def _settle(self, handle: Work, grads: torch.Tensor, future: "torch.futures.Future[torch.Tensor]") -> None:
        """The future never fails: DDP would take the stored exception for a tensor, and say so. Any thread."""
        self._wait(handle)
        future.set_result(grads)  # on a device: when the current stream, which waits for it, has come there

    def _end(self) -> None:
        """Results are asked for when the last bucket has left: until then backward goes on."""
        self._cycle += 1
        pending, self._pending = self._pending, []
        for handle, grads, future in pending:
            if not isinstance(handle, concurrent.futures.Future):
                self._settle(handle, grads, future)
        if torch._C._current_graph_task_id() == -1:  # join() sends in place of a backward
            self._raise()
        else:  # DDP queues its end next, so what that one queues comes after it
            Variable._execution_engine.queue_callback(lambda: Variable._execution_engine.queue_callback(self._raise))

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is None:
            return
        if self._guard.failure is None:
            self._guard.poisoned(self._poisoned)
        raise error

    def _wait(self, handle: Work) -> None:
        try:
            handle.result()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The ranks are not at the same place any more, and no later message could tell."""
        self._error = self._error or error
        self._guard.failed(str(error))

    def _look_for_nan(self, bucket: dist.GradBucket, members: list[int]) -> RuntimeError | None:
        """With the last bucket: what every rank is told if some rank found anything."""
        self._watch.look(bucket.gradients(), members)
        if not bucket.is_last():
            return None
        self._exchange.ordering.wait_producers()  # with the streams that earlier buckets were looked at on
        report = torch.tensor([self._watch.first()]).view(torch.uint8)
        end = tag(self._number, self._cycle, MAX_BUCKETS)
        reports = self._exchange.all_gather_bytes(report, tag=end, label=f"end of gradient cycle {self._cycle}")()
        bad_by_rank = {rank: int(r.view(torch.int64)) for rank, r in enumerate(reports)}
        found = [f"{self._names[i]!r} on rank {rank}" for rank, i in bad_by_rank.items() if i != ALL_FINITE]
        if not found:
            return None
        self._poisoned = sorted({self._names[i] for i in bad_by_rank.values() if i != ALL_FINITE})
        return RuntimeError(
            f"gradients with NaN or Inf before communication (check_for_nan_in_grad): {', '.join(found)}"
        )


def _placed(params: Sequence[int], numels: Sequence[int], multiple: int) -> tuple[list[ParamSlice], int]:
    """The parameters one behind the other, each from a multiple of 128 on, and how many elements that takes."""
    placed, end = [], 0
    for param, numel in zip(params, numels, strict=True):
        placed.append(ParamSlice(param, 0, numel, end))
        end += -(-numel // BLOCK) * BLOCK
    return placed, -(-max(end, 1) // multiple) * multiple


def _within(placed: Sequence[ParamSlice], begin: int, numel: int) -> list[ParamSlice]:
    """What of them lies in a part of the bucket."""
    found = []
    for p in placed:
        first, end = max(p.at, begin), min(p.at + p.numel, begin + numel)
        if first < end:
            found.append(ParamSlice(p.param, first - p.at, end - first, first - begin))
    return found


def _refuse_sparse(module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """ValueError where DDP expects a sparse gradient: it looks at the same layers, once, when it is made."""
    names: dict[torch.Tensor, str] = {p: name for name, p in named}
    for layer in module.modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse and layer.weight in names:
            raise ValueError(
                f"parameter {names[layer.weight]!r} has a sparse gradient; buckets are dense: build the layer with "
                "sparse=False"
            )


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
    """Keeps stock DistributedDataParallel with our exchange in it; every rank calls it, before the first backward.

    Each of DDP's buckets is packed in the policy's grad_comm_dtype, exchanged, summed in fp32 in rank order, divided by
    gradient_divide_factor (None: the number of ranks) and rounded once to the dtype in which sums are gathered
    (grad_gather_dtype; the wire's, and bf16 beside an 8-bit wire): the bits of `parallelize` with no_shard, whatever
    DDP's buckets are.
    Accumulation stays DDP's, in the parameters' dtype: main_grads_dtype plays no part. compress_below_gbps: inf alone
    compresses; the wire is not measured. transport: as in `parallelize`.

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
