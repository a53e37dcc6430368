"""Dense tensors. The operators take tensors as contiguous memory, with elements in memory order."""

import contextlib
import copy
import mmap
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

TRAINED = (torch.float32, torch.bfloat16, torch.float16)

# Stands for "no tensor" in an operator's arguments: for a single argument, or for one element of a list.
EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")


_CACHE_LINE = 64  # bytes
_MAX_POOLED = 1 << 17  # bytes


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Context in which new tensors are normal ones, even if the caller is in inference mode, and autograd records
    nothing."""
    with torch.inference_mode(False), torch.no_grad():  # in this order: the first one turns recording on
        yield


def is_dense(t: Tensor) -> bool:
    """Whether the tensor is non-overlapping and dense: its elements fill one range of memory, in any order of
    dimensions."""
    if t.numel() and t.is_contiguous():  # without elements, strides may be any
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_or_empty(t: Tensor) -> Tensor:
    """Returns t if it is dense, else an uninitialised contiguous tensor of its shape."""
    return t if is_dense(t) else torch.empty_like(t, memory_format=torch.contiguous_format)


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors have the same shape and the same element at every place in memory."""
    if a.shape != b.shape:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    return all(size == 1 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same elements at the same addresses."""
    return a.dtype == b.dtype and a.device == b.device and a.data_ptr() == b.data_ptr() and same_order(a, b)


def flat(t: Tensor) -> Tensor:
    """Returns the memory of a dense tensor as a contiguous tensor: t itself if it is contiguous, else a 1-d view."""
    return t if t.is_contiguous() else t.detach().as_strided((t.numel(),), (1,), t.storage_offset())


def zeros_in_order_of(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns zeros of t's shape, in t's memory order if t is dense."""
    if is_dense(t):
        return torch.zeros_like(t, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    return torch.zeros(t.shape, dtype=dtype, device=t.device)


def unpooled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor. Large CPU tensors are mapped, so that their memory returns to the system as soon
    as they are freed. In malloc's heap, many large tensors that are freed between small ones could leave holes as large
    as all of them together."""
    numel = prod(shape)
    if device.type != "cpu" or numel * dtype.itemsize < _MAX_POOLED:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype).view(shape)


def unpooled_like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised tensor (see `unpooled`) of the shape and memory order of the dense tensor t."""
    return unpooled((t.numel(),), dtype, t.device).as_strided(t.shape, t.stride())


def view_like(t: Tensor, flat: Tensor, start: int) -> Tensor:
    """Returns a view of a flat tensor from `start` on, of t's shape, and of t's memory order if t is dense."""
    if not is_dense(t):
        return flat[start : start + t.numel()].view(t.shape)
    return flat.as_strided(t.shape, t.stride(), flat.storage_offset() + start)


def in_order_of(t: Tensor, values: Tensor) -> Tensor:
    """Returns `values` as contiguous memory in the memory order of the dense tensor t: a view if `values` has that
    order, else a copy."""
    if same_order(t, values):
        return flat(values)
    copy = torch.empty_like(t, dtype=values.dtype, memory_format=torch.preserve_format, requires_grad=False)
    return flat(copy.copy_(values))


def contiguous(values: Tensor) -> Tensor:
    """Returns `values` as contiguous memory: a view in its own memory order if it is dense, else a copy."""
    return flat(values) if is_dense(values) else values.contiguous()


def refuse_param(p: Tensor, name: str) -> None:
    """Raises ValueError or TypeError if torch_ext cannot train p; the message says what to do instead."""
    if torch.nn.parameter.is_lazy(p):
        raise ValueError(
            f"{name} is a parameter of a lazy module, which has no shape yet: call the model with a batch, and make "
            "the optimizer then"
        )
    if hasattr(type(p), "__tensor_flatten__"):
        raise TypeError(
            f"{name} is a {type(p).__name__}, a tensor that wraps others; pass the local tensors that it holds"
        )
    if p.is_complex():
        raise TypeError(f"{name} is complex ({p.dtype}); optimize torch.view_as_real of it, which shares its memory")
    if p.layout is not torch.strided:
        raise TypeError(f"{name} has layout {p.layout}; only dense (strided) parameters are legal: use p.to_dense()")
    if p.dtype not in TRAINED:
        raise TypeError(
            f"{name} is in {p.dtype}; float32, bfloat16 and float16 are legal: convert the model, or leave the "
            f"parameter out"
        )
    if p.is_meta:
        raise ValueError(
            f"{name} is a meta tensor, which holds no data; materialise it first (module.to_empty(device=...))"
        )
    if p.is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode(), so it has no version counter that shows its changes; "
            "make the model outside of that mode"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        raise ValueError(
            f"{name} is an expanded tensor, in which several elements share memory; call .contiguous() on it"
        )


def refuse_overlap(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raises ValueError if two parameters share memory: the shared elements would be updated with both states."""
    ranges = []
    for p, name in zip(params, names, strict=True):
        if p.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            begin = p.data_ptr()
            ranges.append(((str(p.device), begin, begin + extent * p.element_size()), name, is_dense(p)))
    ranges.sort(key=lambda r: r[0])
    for ((device, begin, end), a, a_dense), ((b_device, b_begin, _), b, b_dense) in pairwise(ranges):
        # Two columns of one matrix interleave without sharing an element, so overlapping ranges count only if both
        # parameters are dense.
        if device == b_device and b_begin < end and (begin == b_begin or (a_dense and b_dense)):
            raise ValueError(
                f"{a} and {b} share memory; pass tied weights once, and views of one tensor as that tensor"
            )


# Elements. Larger tensors get memory of their own, which is freed with them. For so many elements the cost of passing a
# tensor to an operator is small compared with the step.
_MAX_SHARING = 1 << 16


as_plain: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Context in which torch asks neither a SharingTensor nor a mode (torch.set_default_device() leaves one on) whether it
overrides a call, which takes longer than to read an attribute."""


def send_by_value(kind: type[Tensor]) -> None:
    """Makes multiprocessing send tensors of exactly this class as bytes. For classes that are pickled as a temporary
    tensor: torch would send a descriptor of the temporary tensor's shared memory, which is closed before a spawned
    process receives it."""
    ForkingPickler.register(kind, lambda t: (pickle.loads, (pickle.dumps(t, pickle.HIGHEST_PROTOCOL),)))


class SharingTensor(Tensor):
    """One of many tensors that share a storage. Pickling it (torch.save, a multiprocessing queue, Ray) writes its own
    elements only, not the whole storage. Tensors that are deep-copied together share a storage again."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor, so that files contain no class of ours."""
        return self.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = copy.deepcopy(self.as_subclass(Tensor), memo).as_subclass(SharingTensor)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))


send_by_value(SharingTensor)


def alias(t: Tensor) -> Tensor:
    """Returns another tensor of t's class on t's memory, with its version counter."""
    return t.detach().as_subclass(type(t))


def zeros_like(wanted: Sequence[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """Returns zeros of each tensor's shape and device, in the given dtype, and in its memory order if it is dense.

    Small tensors of one dtype and device share a storage: they are views one after the other, each in its own cache
    lines.
    """
    found: list[Tensor | None] = [None] * len(wanted)
    together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, (t, dtype) in enumerate(wanted):
        if t.numel() <= _MAX_SHARING:
            together.setdefault((dtype, t.device), []).append(i)
        else:
            found[i] = zeros_in_order_of(t, dtype)
    for (dtype, device), members in together.items():
        offsets, nbytes = aligned_offsets(wanted[i][0].numel() * dtype.itemsize for i in members)
        memory = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        for i, offset in zip(members, offsets, strict=True):
            t = wanted[i][0]
            strides = t.stride() if is_dense(t) else torch.empty(t.shape, device="meta").stride()
            found[i] = memory.as_strided(t.shape, strides, offset // dtype.itemsize).as_subclass(SharingTensor)
    return [t for t in found if t is not None]


def aligned_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Packs blocks of these sizes (bytes), each aligned to a cache line. Returns their offsets and the total size."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end = aligned(end + nbytes)
    return offsets, end


def aligned(nbytes: int) -> int:
    """Rounds up to a multiple of a cache line."""
    return -(-nbytes // _CACHE_LINE) * _CACHE_LINE
