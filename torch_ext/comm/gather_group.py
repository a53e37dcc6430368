"""The process group of all-gathers, where they have one of their own (create_all_gather_group of the policy): NCCL runs
the collectives of one group one after the other, so a gather of weights would wait for reductions. What keeps two
groups from waiting for each other is Note [gathers of their own] in csrc/nccl/nccl_comm.h; here it is torch that makes
the communicator, with the bound on its blocks, and a first collective makes it do so at once."""

import datetime
import weakref
from typing import Any

import torch
import torch.distributed as dist

from torch_ext.comm import group_calls
from torch_ext.comm.process_group import backend, timeout_of
from torch_ext.comm.streams import streams_of

_LABEL = "a process group for all-gathers"

# One for each group that exists, whichever of its communicators asks first.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


def gather_group_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Between the same ranks, with the group's back end and timeout. Every rank of the group asks for the first time at
    the same place, where nothing is under way; it lasts until torch.distributed ends it."""
    if group not in _groups:
        name = backend(group, device)
        made: dist.ProcessGroup = group_calls.new_group(
            dist.get_process_group_ranks(group),
            datetime.timedelta(seconds=timeout_of(group, device)),
            group,
            _LABEL,
            name,
            _options(device) if name == "nccl" else None,
        )
        group_calls.all_reduce(torch.zeros(1, device=device), made, _LABEL)
        _groups[group] = made
    return _groups[group]


def _options(device: torch.device) -> Any:
    """NCCL's kernels have at most a quarter of the device's multiprocessors, as `tx_nccl_comm_args` has it."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max(1, streams_of(device).multiprocessors() // 4)
    return options
