"""Measures the bandwidth of a rank's network link, once, when ranks compare their plans (C's tx_link_gbps)."""

import contextlib
import ctypes
import os
import time

import torch

from torch_ext.comm.communicator import MAX_BUCKETS, Communicator, tag
from torch_ext.comm.wire import WireBuffer
from torch_ext.native import constants, library

_CYCLE = 15  # cycle number in the tags; the first real cycles have others


def measure(communicator: Communicator, number: int, caller: str) -> float | None:
    """Returns the Gbit/s that a rank sends to all other ranks together, and receives; None if it cannot be determined.
    Collective: every rank calls it while no operation is running, and gets the same result. number: from `agree`.

    Takes a quarter of a second at 1 Gbit/s: each rank sends about 24 MiB. It needs 8 MiB of memory at most, or 64 KiB
    times the number of ranks if that is more. Raises RuntimeError that names lost ranks.
    """
    world_size = communicator.world_size
    part = library.function("tx_link_part_bytes", ctypes.c_int64, restype=ctypes.c_int64, keep_gil=True)(world_size)
    buffer = WireBuffer.of(torch.zeros(part * world_size, dtype=torch.uint8, device=communicator.device))
    label, took, waited = f"{caller}: measuring the link", [], []
    for i in range(constants.LINK_ROUNDS):
        before, begin = _waits_for_processors(), time.monotonic_ns()
        communicator.all_gather_into_buffer(buffer, tag=tag(number, _CYCLE, i), label=label).result()
        took.append(time.monotonic_ns() - begin)
        waited.append(sum(now - before.get(thread, now) for thread, now in _waits_for_processors().items()))
    told = torch.tensor(took + waited, device="cpu").view(torch.uint8)
    rows = communicator.all_gather_bytes(told, tag=tag(number, _CYCLE, MAX_BUCKETS), label=label)()
    all_took, all_waited = torch.cat(rows).view(torch.int64).view(world_size, 2, -1).transpose(0, 1).contiguous()
    arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    gbps = library.function("tx_link_gbps", *arguments, restype=ctypes.c_double, keep_gil=True)
    return gbps(all_took.data_ptr(), all_waited.data_ptr(), world_size) or None


def _waits_for_processors() -> dict[str, int]:
    """Returns, per thread of this process, the nanoseconds in which it was ready but had no processor. Empty if the
    kernel does not say (not Linux)."""
    waits = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                waits[thread] = int(file.read().split()[1])
    return waits
