"""Chooses the communicator of a process group: gloo's point-to-point messages, the group's collectives, or an NCCL
communicator of our own."""

import torch
import torch.distributed as dist

from torch_ext.comm.communicator import Communicator
from torch_ext.comm.gather_group import gather_group_of
from torch_ext.comm.process_group import backend
from torch_ext.comm.streams import streams_of


def make_communicator(
    group: dist.ProcessGroup, device: torch.device, transport: str = "torch", create_all_gather_group: bool = False
) -> Communicator:
    """Returns a communicator of the group for tensors on `device`; point-to-point if the group's back end for it is
    gloo.

    transport: "torch", the group itself; "nccl", an NCCL communicator of our own between the same ranks, created when
    the first bucket is sent. create_all_gather_group: all-gathers between GPUs use an NCCL communicator of their own (a
    field of the policy).
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
