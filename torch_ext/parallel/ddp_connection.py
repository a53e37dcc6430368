"""What the ranks agreed on for one DistributedDataParallel, and how its buckets are reduced."""

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
from torch_ext.native import ops
from torch_ext.parallel.bucket_mean import BucketMean
from torch_ext.parallel.bucket_plan import BucketPlan, plan_buckets, trainable
from torch_ext.params import param_groups
from torch_ext.policy.policy import Policy


class Connection:
    """Everything is kept by parameter: DDP renumbers its buckets after the first backward."""

    def __init__(
        self, ddp: DistributedDataParallel, policy: Policy, given_factor: float | None, transport: str, cycle: int
    ) -> None:
        """Collective. Raises TypeError, ValueError or RuntimeError, on every rank, for what is not legal or not equal
        on all ranks. cycle: the number of gradient cycles before this one, for a copied hook."""
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
        self.communicator.compresses = self.communicator.can_compress and compression.decided(policy, policy.link_gbps)
        self._ids = param_groups.ids_of(self.names)
        self._gather_dtype = policy.grad_gather_dtype
        self._wire_dtypes = [p.grad_comm_dtype for p in plan.parameters]
        self._bytes_before = self.communicator.bytes_sent

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent since `begin`."""
        return self.communicator.bytes_sent - self._bytes_before

    def begin(self) -> None:
        """A backward begins."""
        self._bytes_before = self.communicator.bytes_sent

    def positions(self, bucket: dist.GradBucket) -> list[int]:
        """Of a bucket's parameters."""
        return [self.position[p] for p in bucket.parameters()]

    def reduce(self, bucket: dist.GradBucket, cycle: int) -> Work:
        """Starts to make DDP's bucket the mean of all ranks'."""
        members = self.positions(bucket)
        # DDP's bucket has one dtype, so its parameters have one on the wire. Each begins a block of its own there, so
        # that nothing depends on which of them DDP put together.
        numels = [p.numel() for p in bucket.parameters()]
        values = bucket.buffer().split(numels)
        slices, numel = _aligned(members, numels, BLOCK * self.communicator.world_size)
        wire = WireBuffer.empty(numel, self._wire_dtypes[members[0]], values[0].device)
        pack(values, slices, self._ids, wire, RoundingSeeds.of_parts(self.communicator.rank, cycle))
        mean = _DDPBucketMean(slices, self._ids, self._divide_factor, cycle)
        mean.values = values
        dtype = gather_dtype(self._gather_dtype, wire.data.dtype)
        mean.gathered = wire if dtype == wire.data.dtype else WireBuffer.empty(numel, dtype, values[0].device)
        first, last = self.names[members[0]], self.names[members[-1]]
        return self.communicator.reduce_scatter(
            wire,
            mean.reduce,
            result=mean.gathered,
            tag=tag(self._number, cycle, bucket.index()),
            label=f"gradients of cycle {cycle}, DDP bucket {bucket.index()} ({first!r} ... {last!r})",
            on_complete=mean.unpack,
        )

    def exchange(self, report: torch.Tensor, cycle: int) -> Callable[[], list[torch.Tensor]]:
        """Starts to gather each rank's report; what waits for it."""
        end = tag(self._number, cycle, MAX_BUCKETS)
        return self.communicator.all_gather_bytes(report, tag=end, label=f"end of gradient cycle {cycle}")


class _DDPBucketMean(BucketMean):
    values: Sequence[torch.Tensor]
    """The bucket's gradients, in DDP's memory."""

    def unpack(self) -> None:
        """All parts are gathered. Any thread."""
        begins = torch.tensor([p.at for p in self.slices], dtype=torch.int64)
        ops.call("bucket_unpack_", self.gathered.data, self.gathered.scales, begins, list(self.values))


def _aligned(params: Sequence[int], numels: Sequence[int], multiple: int) -> tuple[list[ParamSlice], int]:
    """The parameters one behind the other, each from a multiple of 128 on, and how many elements that takes."""
    slices, end = [], 0
    for param, numel in zip(params, numels, strict=True):
        slices.append(ParamSlice(param, 0, numel, end))
        end += -(-numel // BLOCK) * BLOCK
    return slices, -(-max(end, 1) // multiple) * multiple


def _refuse_sparse(module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """ValueError where DDP expects a sparse gradient: it looks at the same layers, once, when it is made."""
    names: dict[torch.Tensor, str] = {p: name for name, p in named}
    for layer in module.modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse and layer.weight in names:
            raise ValueError(
                f"parameter {names[layer.weight]!r} has a sparse gradient; buckets are dense: build the layer with "
                "sparse=False"
            )
