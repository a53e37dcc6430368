"""Which communicator a process group gets: gloo's point-to-point messages, collectives, or our own over NCCL."""

import torch
import torch.distributed as dist

from torch_ext.comm.communicator import Exchange
from torch_ext.comm.lost_ranks import backend
from torch_ext.comm.streams import streams_of


def exchange_over(group: dist.ProcessGroup, device: torch.device, transport: str = "torch") -> Exchange:
    """The exchange for tensors on `device` over the group: point to point where its back end there is gloo.

    transport: "torch", the group itself; "nccl", a communicator of this library's own between the same ranks, made when
    the first bucket leaves.
    """
    from torch_ext.comm.collectives import Collectives
    from torch_ext.comm.gloo import PointToPoint

    if transport == "nccl":
        from torch_ext.comm.nccl_transport import transport_of

        made = Collectives(group, device, transport_of(group, device, streams_of(device)))
        made.transport_name = transport
        return made
    name = backend(group, device)
    return PointToPoint(group, device) if name == "gloo" else Collectives(group, device, in_place=name == "nccl")
