"""Rejects what a step cannot do while it is captured into a CUDA graph, before anything is written.

A replay repeats the device's work and runs nothing on the host. So numbers that the host read during the capture never
change again, and waiting for the device cannot be captured at all.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse(
    groups: Sequence[dict[str, Any]],
    device: torch.device,
    *,
    on_external_write: str,
    matrices: bool,
    stateless: bool,
    offloaded: bool,
    measures: bool,
    grad_scale: Any,
) -> None:
    """Raises RuntimeError if the step cannot be captured.

    Rejected are values that are meant to change but would stay the same in every replay (an lr that is a number, any
    other hyper-parameter that is a tensor), and everything that waits for the device. matrices: Muon steps some
    parameters. stateless: the optimizer has no state yet. offloaded: some of its state is on the host. measures:
    measure_health() was called for this step."""
    begin = "the step is being captured into a CUDA graph, and "
    if matrices:
        raise RuntimeError(
            f"{begin}the step of Muon's matrices waits for the device: step without the graph, or let AdamW step them"
        )
    if stateless:
        raise RuntimeError(
            f"{begin}there is no state yet, so every replay would create it again: run a step before the capture"
        )
    if offloaded:
        raise RuntimeError(f"{begin}part of it runs on the host; offload_fraction=0 is legal there")
    if measures:
        raise RuntimeError(
            f"{begin}measure_health() measures one step, but every replay would measure again: take the measured "
            "step without the graph"
        )
    if on_external_write == "error":
        raise RuntimeError(
            f"{begin}on_external_write='error' waits for the device; 'resync' and 'ignore' are legal there"
        )
    if grad_scale is not None and not isinstance(grad_scale, Tensor):
        raise RuntimeError(f"{begin}every replay would keep grad_scale = {grad_scale!r}; a tensor on {device} is legal")
    for i, group in enumerate(groups):
        lr = group["lr"]
        if not isinstance(lr, Tensor) or lr.device.type == "cpu":
            value = f"{float(lr):g}" + (", a tensor on the host" if isinstance(lr, Tensor) else ", a number")
            raise RuntimeError(
                f"{begin}every replay would keep what group {i} has as lr: {value}; a tensor on {device}, which is "
                "written in place between replays, is legal"
            )
        betas = {f"betas[{k}]": beta for k, beta in enumerate(group["betas"])}
        for key, value in {**betas, "eps": group["eps"], "weight_decay": group["weight_decay"]}.items():
            if isinstance(value, Tensor):
                raise RuntimeError(
                    f"{begin}every replay would keep what group {i} has as {key}, a tensor on {value.device}; a "
                    "number is legal: it is a constant of the graph"
                )
