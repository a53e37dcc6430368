"""Creates a separate process group for all-gathers (`create_all_gather_group` of the policy).

NCCL runs the collectives of one group one after the other, so an all-gather of weights would wait for reductions. Note
[gathers of their own] in csrc/nccl/nccl_comm.h says what keeps two groups from waiting for each other. Here torch
creates the NCCL communicator, with the bound on the blocks of its kernels; a first collective makes it do so at once.
"""

import datetime
import weakref
from typing import Any

import torch
import torch.distributed as dist

from torch_ext.comm import group_calls
from torch_ext.comm.process_group import backend, timeout_of
from torch_ext.comm.streams import streams_of

_LABEL = "a process group for all-gathers"

# Process group -> its group for all-gathers, shared by all of its communicators.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


def gather_group_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Returns a second process group of the same ranks, with the group's back end and timeout. The first call for a
    group is collective, and no operation may be running. The new group exists until torch.distributed destroys it."""
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
    """Returns NCCL options that limit its kernels to a quarter of the device's multiprocessors, as in
    `tx_nccl_comm_args`."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max(1, streams_of(device).multiprocessors() // 4)
    return options
