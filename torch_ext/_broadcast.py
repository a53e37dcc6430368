"""Rank 0's weights and buffers for every rank, as DistributedDataParallel does at its start."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from torch_ext import _group_calls

_MESSAGE_BYTES = 32 * 2**20


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, what: str) -> None:
    """Makes every rank's tensors those of the group's first rank, bit for bit; shapes and dtypes are agreed on before.

    Travels as bytes, some 32 MiB in a message. Nothing happens in a group of one. what: the call, for messages.
    """
    if dist.get_world_size(group) == 1:
        return
    message: list[torch.Tensor] = []
    for tensor in tensors:
        message.append(tensor)
        if sum(t.nbytes for t in message) >= _MESSAGE_BYTES:
            _send(message, group, what)
            message = []
    if message:
        _send(message, group, what)


@torch.no_grad()
def _send(tensors: list[torch.Tensor], group: dist.ProcessGroup, what: str) -> None:
    flat = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])
    _group_calls.broadcast(flat, group, what)
    if dist.get_rank(group) == 0:
        return
    at = 0
    for tensor in tensors:
        # Slices of a message may be unaligned for their dtype, which a view would refuse.
        own = flat[at : at + tensor.nbytes].clone().view(tensor.dtype)
        tensor.copy_(own.view(tensor.shape))
        at += tensor.nbytes
