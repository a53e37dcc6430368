"""Converts patches to byte differences of whole tensors, the content of the files of slime (SGLang) and SkyRL."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_ext.weight_sync import weight_patch
from torch_ext.weight_sync.weight_patch import WeightPatch

Buffer: TypeAlias = Any  # an object that bytes() accepts (collections.abc.Buffer from Python 3.12 on)
Compress: TypeAlias = Callable[[Buffer], bytes]
Digest: TypeAlias = Callable[[Buffer], str]

_ENCODINGS = ("xor", "overwrite")


class ByteDiff(NamedTuple):
    """The new version of one tensor, as the difference from the previous version."""

    name: str
    payload: Tensor  # the difference, compressed, uint8
    digest: str  # digest of all bytes of the new version
    old: Tensor  # the tensor in `base`, read for its dtype and shape only; it already holds the new version

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return self.old.numel() * self.old.element_size()


def refuse_other(what: str, value: object, legal: Sequence[str]) -> None:
    """Raises ValueError for a value that is not legal. what: the argument's name."""
    if value not in legal:
        raise ValueError(f"{what} is {value!r}; {' and '.join(map(repr, legal))} are legal")


def diffs(
    patches: Iterable[WeightPatch], base: Mapping[str, Tensor], encoding: str, compress: Compress, digest: Digest
) -> list[ByteDiff]:
    """Returns the difference of every tensor in which a bit changed. `base` is updated to the new version, or left
    unchanged if this raises."""
    refuse_other("encoding", encoding, _ENCODINGS)
    patches = list(patches)
    weight_patch.refuse(patches)
    weight_patch.refuse_unlike(patches, base, "base")
    found: list[ByteDiff] = []
    with torch.no_grad(), _undone_if_it_raises() as undo:
        for name, parts in weight_patch.by_name(patches).items():
            flat = base[name].detach().view(-1)
            indices = torch.cat([part.indices.long().cpu() for part in parts])
            if indices.unique().numel() != indices.numel():
                raise ValueError(f"patches have elements of {name} twice; pass the parts of one version, each once")
            old = flat[indices]
            undo.append((flat, indices, old))
            flat[indices] = torch.cat([part.values.cpu() for part in parts])
            diff = _bytes_that_differ(flat, indices, old)
            if not bool(diff.any()):
                continue
            encoded = diff if encoding == "xor" else _overwritten(name, flat, diff)
            payload = torch.frombuffer(bytearray(compress(_buffer(encoded))), dtype=torch.uint8)
            found.append(ByteDiff(name, payload, digest(_buffer(flat.view(torch.uint8))), base[name]))
    return found


@contextmanager
def _undone_if_it_raises() -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Yields a list for (tensor, indices, old values) of each write. If an error is raised inside, undoes the
    writes."""
    undo: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        yield undo
    except BaseException:
        for flat, indices, old in undo:
            flat[indices] = old
        raise


def _bytes_that_differ(flat: Tensor, indices: Tensor, old: Tensor) -> Tensor:
    """Returns old ^ new for each byte of the tensor. Only the patched positions are compared."""
    width = flat.element_size()
    diff = torch.zeros(flat.numel(), width, dtype=torch.uint8, device="cpu")
    diff[indices] = flat[indices].view(torch.uint8).view(-1, width) ^ old.view(torch.uint8).view(-1, width)
    return diff.view(-1)


def _overwritten(name: str, flat: Tensor, diff: Tensor) -> Tensor:
    """Returns the number of changed bytes and their positions (4 bytes each, little-endian), then their new values."""
    if diff.numel() > 1 << 32:
        raise ValueError(f"{name} has {diff.numel()} bytes; 'overwrite' counts them in 32 bits: use 'xor'")
    positions = diff.nonzero().view(-1)
    head = torch.cat([torch.tensor([positions.numel()], device="cpu"), positions]).to(torch.uint32)
    return torch.cat([head.view(torch.uint8), flat.view(torch.uint8)[positions]])


def _buffer(data: Tensor) -> Buffer:
    """Returns a view of the memory of a contiguous uint8 host tensor. It does not keep the tensor alive."""
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")
