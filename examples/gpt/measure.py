"""Measures bytes in memory and bytes sent, for the main job's table."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

# struct tcp_info of linux/tcp.h (Linux 4.19 and later): two uint64 from byte 200 on. tcpi_bytes_sent includes bytes
# that were sent again; tcpi_bytes_retrans counts those alone.
_SENT_AND_AGAIN = struct.Struct("=200xQQ")


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def resident_bytes(optimizer: Optimizer) -> dict[str, int]:
    """Returns the bytes held between steps, by kind: "weights", "gradients" and each kind of optimizer state.

    Counts whole storages, each once, so the padding of a flat buffer counts."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    seen: set[int] = set()
    sizes = {
        "weights": _bytes(params, seen),
        "gradients": _bytes((p.grad for p in params if p.grad is not None), seen),
    }
    kinds: dict[str, list[Tensor]] = {}
    for p in params:
        state: Mapping[str, object] = optimizer.state[p]
        for kind, value in state.items():
            if isinstance(value, Tensor):
                kinds.setdefault(kind, []).append(value)
    for kind, tensors in kinds.items():
        sizes[kind] = _bytes(tensors, seen)
    return sizes


def bytes_sent() -> int | None:
    """Returns the payload bytes that this process's open TCP connections have sent so far, without bytes that were sent
    again; None if the kernel does not say. A training process has no connections but those of the process group."""
    total, known = 0, False
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT_AND_AGAIN.size)
        except OSError:
            continue  # closed meanwhile, or not TCP
        if len(info) == _SENT_AND_AGAIN.size:
            known = True
            sent, again = _SENT_AND_AGAIN.unpack(info)
            total += sent - again
    return total if known else None


def parameter_count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
