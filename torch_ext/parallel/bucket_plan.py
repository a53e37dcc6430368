"""The bucket plan: which buffer, bucket and range each gradient has. C computes it (tx_layout_plan); this file converts
torch's tensors and dtypes for it."""

import ctypes
import functools
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from torch_ext.comm.communicator import Part
from torch_ext.comm.wire import ParamSlice
from torch_ext.native import constants, library, structs
from torch_ext.native import dtypes as native_dtypes
from torch_ext.parallel import message_plan
from torch_ext.parallel.message_plan import Messages, PlannedBucket
from torch_ext.policy.policy import Policy


@structs.mirror("tx_layout_param")
class _Param(library.Struct):
    """A parameter as the planner reads it."""


@structs.mirror("tx_layout_args")
class LayoutArgs(library.Struct):
    """The planner's arguments: parameters, number of ranks, cap on a bucket's size."""


@structs.mirror("tx_layout_place")
class Place(library.Struct):
    """A parameter's place: its buffer, bucket and start."""


@structs.mirror("tx_layout_bucket")
class Bucket(library.Struct):
    """A bucket: a range of a buffer."""


@structs.mirror("tx_layout_summary")
class _Summary(library.Struct):
    """The number of buckets and of buffers, and the layout's fingerprint."""


@dataclass(frozen=True)
class PlannedParameter:
    """Where a parameter's gradient is: elements [start, start + numel) of buffer `buffer`, in bucket `bucket`."""

    name: str
    shape: tuple[int, ...]
    numel: int
    param_dtype: torch.dtype
    main_grads_dtype: torch.dtype
    grad_comm_dtype: torch.dtype
    buffer: int
    bucket: int
    start: int


@dataclass(frozen=True)
class BucketPlan:
    """The layout that `plan_buckets` returns: parameters in registration order, buckets in the order of filling."""

    parameters: tuple[PlannedParameter, ...]
    buckets: tuple[PlannedBucket, ...]
    world_size: int
    fingerprint: int
    messages: Messages = Messages()
    """Which buckets form one message, whether messages are compressed, and the link's speed that decided both."""

    def over_link(self, policy: Policy, link_gbps: float | None, strategy: str) -> "BucketPlan":
        """Returns this plan with the messages for a link of `link_gbps` Gbit/s per rank (None: not known)."""
        return replace(self, messages=message_plan.decide(self.buckets, self.world_size, policy, link_gbps, strategy))

    @property
    def buffers(self) -> tuple[tuple[PlannedBucket, ...], ...]:
        """The buckets of each flat buffer, which they cover without gaps."""
        n = 1 + max((bucket.buffer for bucket in self.buckets), default=-1)
        return tuple(tuple(b for b in self.buckets if b.buffer == i) for i in range(n))

    def label(self, buckets: range) -> str:
        """Returns a text that names these buckets in error messages."""
        members = [i for b in buckets for i in self.in_bucket(b)]
        first, last = self.parameters[members[0]].name, self.parameters[members[-1]].name
        which = f"bucket {buckets[0]}" if len(buckets) == 1 else f"buckets {buckets[0]} to {buckets[-1]}"
        names = repr(first) if first == last else f"{first!r} ... {last!r}"
        return f"{which} of {len(self.buckets)} ({names})"

    def in_bucket(self, bucket: int) -> list[int]:
        """Returns the positions of a bucket's parameters, sorted by their start."""
        members = [i for i, p in enumerate(self.parameters) if p.bucket == bucket]
        return sorted(members, key=lambda i: self.parameters[i].start)

    def __str__(self) -> str:
        return "\n".join([f"layout {self.fingerprint:016x}", *self.lines()])

    def lines(self) -> list[str]:
        """Returns the layout as text, one line each, without its fingerprint."""
        lines = [f"{len(self.buckets)} bucket{'s' * (len(self.buckets) != 1)} over {self.world_size} ranks"]
        for i, b in enumerate(self.buckets):
            padding = b.numel - b.used
            lines.append(
                f"bucket {i}: buffer {b.buffer} [{b.start}, {b.start + b.numel}) {_short(b.main_grads_dtype)}, "
                f"{_short(b.grad_comm_dtype)} on the wire, {padding} padding"
            )
            for j in self.in_bucket(i):
                p = self.parameters[j]
                lines.append(f"  [{p.start}, {p.start + p.numel}) {p.name} {list(p.shape)} {_short(p.param_dtype)}")
        return lines + self.messages.lines()


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the parameters that require a gradient, with their names, as `plan_buckets` takes them."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def plan_buckets(
    params_or_numels: Iterable[Any] | Mapping[str, Any],
    policy: Policy,
    world_size: int,
    *,
    order: Sequence[int] | None = None,
) -> BucketPlan:
    """Returns the layout that `parallelize` uses. Pure arithmetic: no process group is needed, nothing is allocated.

    params_or_numels: in registration order, tensors, (name, tensor) pairs such as `model.named_parameters()`, or
        element counts (of the policy's param_dtype); or a mapping of names to either. A tensor given twice is placed
        once.
    policy: from `load_policy`. Its dtypes, bucket_size (elements), overlap_grad_reduce and
        pad_buckets_for_high_nccl_busbw decide the layout. If bucket_size is None, the cap follows the buffer's bytes
        on the wire and the number of ranks (tx_layout_args). Without overlap each buffer is one bucket. link_gbps,
        data_parallel_sharding_strategy and grad_comm_compression decide `messages`: which buckets are sent together
        over gloo, and whether compressed. Without link_gbps each bucket is a message here; `parallelize` then measures
        the link's speed.
    world_size: the number of ranks that share the buckets.
    order: a permutation of the positions, the order of placement; None: reverse registration order.

    Parameters with equal dtypes and device share a flat buffer. Starts are aligned to 128 elements, bucket ends to 128
    times the number of ranks. Raises ValueError or TypeError for illegal arguments.
    """
    made = CLayout(params_or_numels, policy, world_size, order)
    return plan_of(made, world_size).over_link(policy, policy.link_gbps, policy.data_parallel_sharding_strategy)


def plan_of(made: "CLayout", world_size: int) -> BucketPlan:
    """Converts a C layout into a plan. The link's speed is not known yet, so `messages` is empty."""
    parameters = tuple(
        PlannedParameter(name, tuple(t.shape), t.numel(), *dtypes, place.buffer, place.bucket, place.start)
        for (name, t), dtypes, place in zip(made.named, made.dtypes, made.places, strict=False)
    )
    of_bucket = {p.bucket: p for p in parameters}
    return BucketPlan(
        parameters,
        tuple(
            PlannedBucket(
                b.buffer, b.offset, b.size, b.used, of_bucket[i].main_grads_dtype, of_bucket[i].grad_comm_dtype
            )
            for i, b in enumerate(made.buckets[: made.n_buckets])
        ),
        world_size,
        made.fingerprint,
    )


class CLayout:
    """The arguments and results of tx_layout_plan, in C's form: other C functions take them as they are.

    Each array has at least one entry. Arguments and errors are those of `plan_buckets`.
    """

    def __init__(
        self, params_or_numels: Any, policy: Policy, world_size: int, order: Sequence[int] | None = None
    ) -> None:
        self.named = named = list(_named(params_or_numels, policy.param_dtype))
        self.dtypes = dtypes = [_dtypes_of(policy, name, tensor) for name, tensor in named]
        if order is not None and len(order) != len(named):
            raise ValueError(
                f"order has {len(order)} entries for {len(named)} parameters; a permutation of them is legal"
            )
        self.args = LayoutArgs(
            size=ctypes.sizeof(LayoutArgs),
            n=len(named),
            params=_c_params(named, dtypes),
            order=None if order is None else (ctypes.c_int64 * max(1, len(order)))(*order),
            cap=constants.NO_INT if policy.bucket_size is None else policy.bucket_size,
            world=world_size,
            overlap=int(policy.overlap_grad_reduce),
            high_bandwidth=int(policy.pad_buckets_for_high_nccl_busbw),
        )
        self.places = (Place * max(1, len(named)))()
        self.buckets = (Bucket * max(1, len(named)))()
        summary = _Summary()
        plan = library.function(
            "tx_layout_plan",
            ctypes.POINTER(LayoutArgs),
            ctypes.POINTER(Place),
            ctypes.POINTER(Bucket),
            ctypes.c_int64,
            ctypes.POINTER(_Summary),
        )
        plan(ctypes.byref(self.args), self.places, self.buckets, len(self.buckets), ctypes.byref(summary))
        self.n_buckets: int = summary.n_buckets
        self.fingerprint: int = summary.fingerprint


def _c_params(named: Sequence[tuple[str, torch.Tensor]], dtypes: Sequence[tuple[torch.dtype, ...]]) -> Any:
    c_params = (_Param * max(1, len(named)))()
    first: dict[int, int] = {}
    devices: dict[torch.device, int] = {}
    for i, (name, tensor) in enumerate(named):
        shape = (ctypes.c_int64 * max(1, tensor.dim()))(*tensor.shape)
        c_params[i] = _Param(
            name=native_dtypes.c_text(name),
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
            ndim=tensor.dim(),
            numel=tensor.numel(),
            tied=-1 if first.setdefault(id(tensor), i) == i else first[id(tensor)],
            key=0,
            device=devices.setdefault(tensor.device, len(devices)),
            **{field: native_dtypes.code_of(dtype) for field, dtype in zip(_DTYPE_FIELDS, dtypes[i], strict=True)},
        )
    return c_params


_DTYPE_FIELDS = ("param_dtype", "grad_dtype", "wire_dtype")


def _named(given: Any, dtype: torch.dtype) -> Iterable[tuple[str, torch.Tensor]]:
    items = given.items() if isinstance(given, Mapping) else given
    for i, item in enumerate(items):
        name, value = item if isinstance(item, tuple) else (str(i), item)
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 0:
                raise ValueError(f"parameter {name!r}: {value} elements; a count is >= 0")
            value = torch.empty(value, dtype=dtype, device="meta")
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"parameter {name!r}: {type(value).__name__}; a tensor or a number of elements is expected")
        yield name, value


def _dtypes_of(policy: Policy, name: str, tensor: torch.Tensor) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns three dtypes: the parameter's, its gradient's in the buffer, its gradient's on the wire (uint8: 8-bit
    blocks). The policy rejects illegal combinations."""
    try:
        row = policy.row(tensor.dtype)
    except ValueError as error:
        raise TypeError(f"parameter {name!r}: {error}") from None
    main = row.main_grads_dtype or tensor.dtype
    return tensor.dtype, main, row.grad_comm_dtype or main


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _slices() -> Callable[..., None]:
    int64, pointer = ctypes.c_int64, ctypes.c_void_p
    return library.function("tx_layout_slices", pointer, int64, pointer, int64, pointer, int64, pointer, keep_gil=True)


def slices(placed: Sequence[ParamSlice], ranges: Sequence[tuple[int, int]]) -> list[ParamSlice]:
    """Returns the parts of placed slices that are in the ranges [begin, end), empty parts left out. In the result each
    range follows the one before it without a gap (tx_layout_slices)."""
    room = len(placed) + len(ranges)
    c_placed, c_ranges = (array("q", chain.from_iterable(rows)) for rows in (placed, ranges))
    found, n = (ctypes.c_int64 * (4 * room))(), ctypes.c_int64()
    _slices()(
        c_placed.buffer_info()[0], len(placed), c_ranges.buffer_info()[0], len(ranges), found, room, ctypes.byref(n)
    )
    return list(map(ParamSlice._make, struct.iter_unpack("4q", memoryview(found).cast("B")[: 32 * n.value])))


def pieces(plan: BucketPlan, buckets: range, *ranges: tuple[int, int]) -> list[ParamSlice]:
    """Returns the slices of the buckets' parameters that are in the ranges [begin, end) of their buffer, in the order
    of their places."""
    members = (i for bucket in buckets for i in plan.in_bucket(bucket))
    return slices([ParamSlice(i, 0, plan.parameters[i].numel, plan.parameters[i].start) for i in members], ranges)


def part_of(plan: BucketPlan, buckets: range, part: Part) -> tuple[int, int]:
    """Returns the range [begin, end) of the buffer that one of the equal parts of these neighbouring buckets covers
    (tx_layout_shard)."""
    start = plan.buckets[buckets[0]].start
    numel = sum(plan.buckets[b].numel for b in buckets) // part.of
    return start + numel * part.number, start + numel * (part.number + 1)


def by_rank(plan: BucketPlan, buckets: range, world_size: int) -> list[ParamSlice]:
    """Returns the slices of a message of neighbouring buckets, in rank order: each rank's parts of all these buckets
    are contiguous in the message. A parameter has one slice for each part that it overlaps."""
    ranks = range(world_size)
    return pieces(
        plan, buckets, *(part_of(plan, range(b, b + 1), Part(rank, world_size)) for rank in ranks for b in buckets)
    )
