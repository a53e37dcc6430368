"""Which communicator a process group gets: gloo's point-to-point messages, collectives, or our own over NCCL."""

import torch
import torch.distributed as dist

from torch_ext.comm.communicator import Communicator
from torch_ext.comm.process_group import backend
from torch_ext.comm.streams import streams_of


def make_communicator(group: dist.ProcessGroup, device: torch.device, transport: str = "torch") -> Communicator:
    """The communicator for tensors on `device` over the group: point to point where its back end there is gloo.

    transport: "torch", the group itself; "nccl", an NCCL communicator of our own between the same ranks, made when the
    first bucket is sent.
    """
    from torch_ext.comm.collectives import CollectiveCommunicator
    from torch_ext.comm.gloo import GlooCommunicator

    if transport == "nccl":
        from torch_ext.comm.nccl_transport import transport_of

        made = CollectiveCommunicator(group, device, transport_of(group, device, streams_of(device)))
        made.transport_name = transport
        return made
    name = backend(group, device)
    return (
        GlooCommunicator(group, device)
        if name == "gloo"
        else CollectiveCommunicator(group, device, in_place=name == "nccl")
    )
