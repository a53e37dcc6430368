"""Connects the ranks for one DistributedDataParallel: they agree on the settings, then its buckets are reduced."""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_ext.comm import compression
from torch_ext.comm.communicator import MAX_BUCKETS, Work, divide_factor, tag
from torch_ext.comm.factory import make_communicator
from torch_ext.comm.init_sync import agree
from torch_ext.comm.lost_ranks import refuse as refuse_group
from torch_ext.comm.nccl_transport import refuse
from torch_ext.comm.wire import BLOCK, ParamSlice, RoundingSeeds, WireBuffer, gather_dtype, pack
from torch_ext.native import library, ops
from torch_ext.parallel import message_plan
from torch_ext.parallel.bucket_mean import BucketMean
from torch_ext.parallel.bucket_plan import BucketPlan, plan_buckets, trainable
from torch_ext.parallel.bucket_plan import slices as slices_in
from torch_ext.parallel.sent_bytes import SentBytes
from torch_ext.params import param_groups
from torch_ext.policy.policy import Policy


@functools.cache
def _cuts() -> Callable[[int, int, float, bool], int]:
    arguments = (ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_int32)
    return library.function("tx_coalesce_cuts", *arguments, restype=ctypes.c_int64, keep_gil=True)


def _depends_on_link(plan: BucketPlan, policy: Policy) -> bool:
    """Whether there is a link speed at which buckets are compressed, or a DDP bucket is cut into several messages."""
    whole = sum(WireBuffer.size_of(b.numel, b.grad_comm_dtype) for b in plan.buckets)
    slow = 1e-9
    return (
        message_plan.depends_on_link(plan.buckets, plan.world_size, policy)
        or _cuts()(whole, plan.world_size, slow, False) > 1
    )


class Connection:
    """The ranks' agreement for one DistributedDataParallel, and the reduction of its buckets. All data is stored by
    parameter: DDP changes its buckets after the first backward."""

    def __init__(
        self, ddp: DistributedDataParallel, policy: Policy, given_factor: float | None, transport: str, cycle: int
    ) -> None:
        """Collective. Raises TypeError, ValueError or RuntimeError on every rank if an argument is illegal or differs
        between ranks. cycle: how many gradient cycles a copied hook has had before."""
        named = trainable(ddp.module)
        self.names = [name for name, _ in named]
        self.position: dict[torch.Tensor, int] = {p: i for i, (_, p) in enumerate(named)}
        device = named[0][1].device
        refuse_group(ddp.process_group, "register_comm_hook")
        self.communicator = make_communicator(
            ddp.process_group, device, transport if device.type == "cuda" else "torch", policy.create_all_gather_group
        )
        plan: BucketPlan | None = None
        failure: Exception | None = None
        self._divide_factor = 0.0
        try:
            refuse(transport, device)
            compression.refuse(policy, self.communicator.can_compress)
            self._divide_factor = divide_factor(given_factor, self.communicator.world_size)
            _refuse_sparse(ddp.module, named)
            plan = plan_buckets(named, policy, self.communicator.world_size)
        except (ValueError, TypeError, RuntimeError) as error:
            failure = error
        self._number = agree(
            self.communicator,
            caller="register_comm_hook",
            fingerprint=0 if plan is None else plan.fingerprint,
            lines=[
                f"divide by {self._divide_factor}, NaN check {policy.check_for_nan_in_grad}, sums gathered in "
                f"{policy.grad_gather_dtype}, transport {transport}, compression {policy.grad_comm_compression}, "
                f"link of {policy.link_gbps} Gbit/s, a group for all-gathers {policy.create_all_gather_group}, "
                f"gradient cycle {cycle}",
                *([] if plan is None else plan.lines()),
            ],
            failure=failure,
        )
        assert plan is not None
        self.link_gbps = message_plan.link_gbps(
            _depends_on_link(plan, policy), policy, self.communicator, self._number, "register_comm_hook"
        )
        self.communicator.compresses = self.communicator.can_compress and compression.is_on(policy, self.link_gbps)
        self._ids = param_groups.ids_of(self.names)
        self._gather_dtype = policy.grad_gather_dtype
        self._wire_dtypes = [p.grad_comm_dtype for p in plan.parameters]
        self.sent = SentBytes([self.communicator])
        self.messages = 0
        """How many messages were sent in this backward."""

    def begin(self) -> None:
        """Starts a backward."""
        self.sent.begin_backward()
        self.messages = 0

    def positions(self, bucket: dist.GradBucket) -> list[int]:
        """Returns the positions of a bucket's parameters."""
        return [self.position[p] for p in bucket.parameters()]

    def reduce(self, bucket: dist.GradBucket, cycle: int) -> list[Work]:
        """Starts to replace DDP's bucket by the mean over the ranks. Returns the handles of the messages that it is cut
        into, which complete in order. The bucket's memory is read and written until then."""
        members = self.positions(bucket)
        # A DDP bucket has one dtype, so all its parameters have the same wire dtype. In the message each parameter
        # begins a block of its own: the bits depend neither on which parameters DDP put into one bucket nor on where
        # the bucket is cut.
        numels = [p.numel() for p in bucket.parameters()]
        values = dict(zip(members, bucket.buffer().split(numels), strict=True))
        unit, dtype = BLOCK * self.communicator.world_size, self._wire_dtypes[members[0]]
        placed, numel = _aligned(members, numels, unit)
        most = self._max_numel(numel, dtype, unit)
        first, last = self.names[members[0]], self.names[members[-1]]
        label = f"gradients of cycle {cycle}, DDP bucket {bucket.index()} ({first!r} ... {last!r})"
        works = []
        for begin in range(0, numel, most):
            end = min(begin + most, numel)
            slices = slices_in(placed, [(begin, end)]) if most < numel else placed
            mean = _DDPBucketMean(slices, self._ids, self._divide_factor, cycle)
            mean.values = [values[s.param][s.first : s.first + s.numel] for s in slices]
            seeds = RoundingSeeds.of_parts(self.communicator.rank, cycle)
            works.append(
                self.communicator.reduce_scatter(
                    functools.partial(mean.pack, end - begin, dtype, self._gather_dtype, seeds),
                    mean.reduce,
                    tag=tag(self._number, cycle, self.messages % MAX_BUCKETS),
                    label=label,
                    on_complete=mean.unpack,
                )
            )
            self.messages += 1
        return works

    def _max_numel(self, numel: int, dtype: torch.dtype, unit: int) -> int:
        """Returns the most elements that one message of a bucket may have, a multiple of `unit`."""
        communicator = self.communicator
        compressed = communicator.compresses and compression.size(numel, dtype)
        nbytes = compressed or WireBuffer.size_of(numel, dtype)
        n = _cuts()(nbytes, communicator.world_size, self.link_gbps or 0.0, bool(compressed))
        return -(-numel // (n * unit)) * unit

    def exchange(self, report: torch.Tensor, cycle: int) -> Callable[[], list[torch.Tensor]]:
        """Starts to gather the ranks' reports. Returns a function that waits for them and returns them."""
        end = tag(self._number, cycle, MAX_BUCKETS)
        return self.communicator.all_gather_bytes(report, tag=end, label=f"end of gradient cycle {cycle}")


class _DDPBucketMean(BucketMean):
    """The mean of one message: a part of a DDP bucket."""

    values: Sequence[torch.Tensor]
    """The gradients of `slices`, in DDP's memory."""

    def pack(
        self, numel: int, dtype: torch.dtype, gathered: torch.dtype | None, seeds: RoundingSeeds
    ) -> tuple[WireBuffer, WireBuffer]:
        """PackFn of a message of `numel` elements. gathered: the policy's grad_gather_dtype. Called on any thread."""
        device = self.values[0].device
        wire = WireBuffer.empty(numel, dtype, device)
        pack(self.values, self.slices, self._ids, wire, seeds)
        gathered = gather_dtype(gathered, dtype)
        self.gathered = wire if gathered == dtype else WireBuffer.empty(numel, gathered, device)
        return wire, self.gathered

    def unpack(self) -> None:
        """Called on any thread when all parts are gathered: copies them into DDP's bucket."""
        begins = torch.tensor([p.at for p in self.slices], dtype=torch.int64, device="cpu")
        ops.call("bucket_unpack_", self.gathered.data, self.gathered.scales, begins, list(self.values))


def _aligned(params: Sequence[int], numels: Sequence[int], multiple: int) -> tuple[list[ParamSlice], int]:
    """Places the parameters one after another, each at a multiple of 128. Returns the slices, and their total number of
    elements rounded up to `multiple`."""
    slices, end = [], 0
    for param, numel in zip(params, numels, strict=True):
        slices.append(ParamSlice(param, 0, numel, end))
        end += -(-numel // BLOCK) * BLOCK
    return slices, -(-max(end, 1) // multiple) * multiple


def _refuse_sparse(module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises ValueError if a layer has sparse gradients. DDP checks the same layers when it is created."""
    names: dict[torch.Tensor, str] = {p: name for name, p in named}
    for layer in module.modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse and layer.weight in names:
            raise ValueError(
                f"parameter {names[layer.weight]!r} has a sparse gradient; buckets are dense: build the layer with "
                "sparse=False"
            )
