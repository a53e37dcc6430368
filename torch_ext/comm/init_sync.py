"""Compares the ranks' plans before the first exchange, so that a mismatch is an error on every rank, and broadcasts the
initial weights."""

import ctypes
import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from torch_ext.comm import group_calls
from torch_ext.comm.communicator import AGREEMENT_TAG, Communicator
from torch_ext.native import library

# Words of the first message. Its size, and its first words _FORMAT and version, must never change: by them different
# versions of torch_ext recognise each other.
_WORDS = 8
_FORMAT = 1

# The last number that this process gave to a reducer. Ranks take the largest of theirs, so that tags agree.
_last_reducer = 0


def agree(
    communicator: Communicator, *, caller: str, fingerprint: int, lines: Sequence[str], failure: Exception | None
) -> int:
    """Compares what every rank is about to do. Returns a number for this reducer that is the same on all ranks.

    fingerprint and lines: the layout's fingerprint and everything else that must be equal, as text; the text is sent
    only if something differs. failure: an error that occurred on this rank, which stops every rank.

    Raises `failure` itself on its rank. Elsewhere raises RuntimeError that says which rank failed and why, or which
    ranks differ and in which line first.
    """
    global _last_reducer
    version = library.function("tx_version", restype=ctypes.c_uint32)()
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "little", signed=True)
    words = [
        _FORMAT,
        version,
        failure is not None,
        _signed(fingerprint),
        digest,
        _last_reducer,
        communicator.world_size,
        0,
    ]
    rows = [
        row.view(torch.int64).tolist()
        for row in _gather(communicator, torch.tensor(words, device="cpu").view(torch.uint8), caller)
    ]
    _last_reducer = 1 + max(row[5] for row in rows)
    if not any(row[2] for row in rows) and all(row[:5] == rows[0][:5] for row in rows):
        return _last_reducer

    texts = _gather_texts(communicator, str(failure) if failure else "\n".join(_with_version(version, lines)), caller)
    if failure is not None:
        raise failure
    for rank, row in enumerate(rows):
        if row[2]:
            raise RuntimeError(f"{caller}: stopped on all ranks, because on rank {rank}: {texts[rank]}")
    differing = [rank for rank, row in enumerate(rows) if row[:5] != rows[0][:5]]
    ranks = f"rank {differing[0]} differs" if len(differing) == 1 else f"ranks {', '.join(map(str, differing))} differ"
    theirs, first = texts[differing[0]].split("\n"), texts[0].split("\n")
    longest = max(len(theirs), len(first))
    pairs = zip(_padded(theirs, longest), _padded(first, longest), strict=True)
    other, mine = next(((a, b) for a, b in pairs if a != b), ("another plan", "the plan"))
    raise RuntimeError(
        f"{caller}: {ranks} from rank 0, so nothing was exchanged. The first difference: rank {differing[0]} has "
        f"{other!r}, rank 0 has {mine!r}. Every rank must have the same model, policy and version of torch_ext."
    )


def _with_version(version: int, lines: Sequence[str]) -> list[str]:
    return [f"torch_ext {version >> 16}.{version >> 8 & 255}.{version & 255}", *lines]


def _padded(lines: list[str], n: int) -> list[str]:
    return lines + ["nothing more"] * (n - len(lines))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _gather(communicator: Communicator, payload: torch.Tensor, caller: str) -> list[torch.Tensor]:
    return communicator.all_gather_bytes(payload, tag=AGREEMENT_TAG, label=f"{caller}: comparing the ranks' plans")()


def _gather_texts(communicator: Communicator, text: str, caller: str) -> list[str]:
    """Gathers a text from every rank; the texts' lengths are gathered first."""
    data = text.encode("utf-8", "replace")
    sizes = [
        int(row.view(torch.int64))
        for row in _gather(communicator, torch.tensor([len(data)], device="cpu").view(torch.uint8), caller)
    ]
    padded = torch.frombuffer(bytearray(data.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8)
    rows = _gather(communicator, padded, caller)
    return [bytes(row[:size].tolist()).decode("utf-8", "replace") for row, size in zip(rows, sizes, strict=True)]


_MESSAGE_BYTES = 32 * 2**20


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, label: str) -> None:
    """Copies the tensors of the group's first rank to all other ranks, bit for bit. Shapes and dtypes must be equal.

    Sent as bytes, about 32 MiB per message. label: names the call in messages.
    """
    if dist.get_world_size(group) == 1:
        return
    message: list[torch.Tensor] = []
    for tensor in tensors:
        message.append(tensor)
        if sum(t.nbytes for t in message) >= _MESSAGE_BYTES:
            _send(message, group, label)
            message = []
    if message:
        _send(message, group, label)


@torch.no_grad()
def _send(tensors: list[torch.Tensor], group: dist.ProcessGroup, label: str) -> None:
    flat = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])
    group_calls.broadcast(flat, group, label)
    if dist.get_rank(group) == 0:
        return
    at = 0
    for tensor in tensors:
        # A slice of a message may be unaligned for its dtype, which .view(dtype) rejects; hence the clone.
        own = flat[at : at + tensor.nbytes].clone().view(tensor.dtype)
        tensor.copy_(own.view(tensor.shape))
        at += tensor.nbytes
