"""Which communicator a process group gets: gloo's point-to-point messages, collectives, or our own over NCCL."""

import torch
import torch.distributed as dist

from torch_ext.comm.communicator import Communicator
from torch_ext.comm.gather_group import gather_group_of
from torch_ext.comm.process_group import backend
from torch_ext.comm.streams import streams_of


def make_communicator(
    group: dist.ProcessGroup, device: torch.device, transport: str = "torch", create_all_gather_group: bool = False
) -> Communicator:
    """The communicator for tensors on `device` over the group: point to point where its back end there is gloo.

    transport: "torch", the group itself; "nccl", an NCCL communicator of our own between the same ranks, made when the
    first bucket is sent. create_all_gather_group: all-gathers between GPUs have an NCCL communicator of their own; the
    policy's.
    """
    from torch_ext.comm.collectives import CollectiveCommunicator
    from torch_ext.comm.gloo import GlooCommunicator
    from torch_ext.comm.transport import TorchTransport

    if transport == "nccl":
        from torch_ext.comm.nccl_transport import transport_of

        over = transport_of(group, device, streams_of(device), create_all_gather_group)
        made = CollectiveCommunicator(group, device, over)
        made.transport_name = transport
    else:
        name = backend(group, device)
        if name == "gloo":
            return GlooCommunicator(group, device)
        in_place = name == "nccl"
        gathers = gather_group_of if create_all_gather_group and in_place else None
        made = CollectiveCommunicator(group, device, TorchTransport(group, device, in_place, gathers))
    made.create_all_gather_group = create_all_gather_group
    return made
