"""The back end and the timeout of a process group."""

import torch
import torch.distributed as dist


def backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's back end for the device ("gloo" for "cpu:gloo,cuda:nccl" and a CPU)."""
    by_device = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    return by_device.get(device.type, str(dist.get_backend(group)))


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that the group waits for a rank: what init_process_group or new_group was given, or torch's default."""
    try:
        # Private: torch has no other way to ask.
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a custom back end, or none for the device
        return float(dist.default_pg_timeout.total_seconds())
