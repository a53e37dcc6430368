"""Words between hosts beside a group whose back end moves device memory only."""

import datetime
import weakref

import torch
import torch.distributed as dist

from torch_ext import _group_calls
from torch_ext._exchange import Exchange
from torch_ext._lost_ranks import backend, timeout_of
from torch_ext._point_to_point import PointToPoint

# One for each group that is there: gloo has threads for each of its own.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()

_HOST = torch.device("cpu")


def beside(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """A gloo exchange between the group's ranks for host memory; it waits as long as the group does for the device.

    Every rank of the group asks for the first time at the same place. Raises RuntimeError where this torch has no gloo.
    """
    if backend(group, _HOST) == "gloo":
        return PointToPoint(group, _HOST)
    if group not in _groups:
        if not dist.is_gloo_available():
            raise RuntimeError(
                "the process group moves device memory only, and this torch has no gloo for what ranks tell each "
                "other: use a torch that has it"
            )
        ranks = dist.get_process_group_ranks(group)
        timeout = datetime.timedelta(seconds=timeout_of(group, device))
        what = "a gloo group beside the process group"
        _groups[group] = _group_calls.new_group(ranks, timeout, group, what)
    return PointToPoint(_groups[group], _HOST)
