"""The back end and the timeout of a process group."""

import torch
import torch.distributed as dist


def backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of the group's back end for the device ("gloo" for "cpu:gloo,cuda:nccl" and a CPU)."""
    by_device = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    return by_device.get(device.type, str(dist.get_backend(group)))


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns how many seconds the group waits for a rank: as passed to init_process_group or new_group, or torch's
    default."""
    try:
        # A private attribute: torch has no public way to read the timeout.
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a custom back end, or no back end for the device
        return float(dist.default_pg_timeout.total_seconds())
