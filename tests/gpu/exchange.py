"""Trainings of one rank with an exchange in which gradients come late and streams sleep, so that a missing wait shows.

Everything also runs on a CPU over gloo, where nothing is late: the expected bits come from that, and these functions
can be checked on a machine without a GPU. $TORCH_EXT_GPU_TESTS_DEVICE names the device.
"""

import contextlib
import datetime
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients import BF16, FP32, Given, bits, noise, policy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_ext
from torch_ext.comm import nccl_transport
from torch_ext.comm.streams import CudaStreams, streams_of
from torch_ext.native import nccl

DEVICE = torch.device(os.environ.get("TORCH_EXT_GPU_TESTS_DEVICE", "cuda:0"))
CPU = torch.device("cpu")
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params", "ddp hook"]
TRANSPORTS = ["torch", "nccl"]
DTYPES = {
    # Dtypes of parameters, main gradients and wire.
    "fp32": (FP32, FP32, FP32),
    "wire-bf16": (FP32, FP32, BF16),
    "bf16-main-fp32": (BF16, FP32, BF16),
    "wire-8-bit": (BF16, FP32, torch.uint8),
}
SHAPES: list[Any] = [(300,), (1,), (129, 3), (5, 5, 5), (20_000,), (2,), (700,), (640,), (650,)]
LATE = 4_000_000  # cycles, about 2 ms: time enough for an exchange that does not wait to read the old values


def join(folder: pathlib.Path, timeout: float = 60.0) -> None:
    """Initializes a world of one rank, with a back end for each device.

    Both use the loopback interface. Otherwise gloo asks for the address of the machine's name, which takes long for
    every group where there is no name server, and NCCL needs another interface."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    backends = "cpu:gloo" if DEVICE.type == "cpu" else f"cpu:gloo,{DEVICE.type}:nccl"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        backends,
        init_method=f"file://{folder}/world",
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=timeout),
    )


def sleep(device: torch.device, cycles: int = LATE) -> None:
    """Delays what is queued afterwards on the current stream."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def late(given: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns `given` on the device, in memory that holds 77 until the current stream has slept and copied it."""
    there = [g.to(device) for g in given]
    read = [torch.full_like(g, 77.0) for g in there]
    sleep(device)
    for into, g in zip(read, there, strict=True):
        into.copy_(g)
    return read


@contextlib.contextmanager
def sleeping_streams() -> Iterator[None]:
    """Within the context, work on streams of the exchange is delayed. Without a wait, old values are read."""
    on, issue = CudaStreams.on, nccl_transport.NcclTransport._issue

    @contextlib.contextmanager
    def asleep(self: CudaStreams, stream: Any) -> Iterator[None]:
        with on(self, stream):
            sleep(DEVICE)
            yield

    def late_issue(self: Any, *arguments: Any) -> Any:
        with on(self._streams, arguments[-1]):
            sleep(DEVICE, 4 * LATE)  # longer than what uses its result, which sleeps, too
        return issue(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cuda":
            patch.setattr(CudaStreams, "on", asleep)
            patch.setattr(nccl_transport.NcclTransport, "_issue", late_issue)
        yield


def made(strategy: str, dtypes: Any, device: torch.device, transport: str, **options: Any) -> tuple[Any, Any]:
    """Returns a parallel model whose gradients are given by the test, and its optimizer. options: of the policy."""
    chosen = policy(*dtypes, **{"bucket_size": 4000, "overlap_grad_reduce": True, **options})
    model: Any = Given(SHAPES, dtypes[0])
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.fill_(0.5 + i)
    model.to(device)
    if strategy == "ddp hook":
        model = DistributedDataParallel(model, bucket_cap_mb=0.02)
        torch_ext.register_comm_hook(model, chosen, transport=transport)
    else:
        torch_ext.parallelize(model, chosen, strategy=strategy, transport=transport)
    return model, torch_ext.AdamW(model.parameters(), lr=0.01, policy=chosen)


def step(model: Any, optimizer: torch.optim.Optimizer, i: int, dtypes: Any, device: torch.device) -> None:
    """Trains one step: two micro-batches, a clip, the optimizer's step. i: the seed of its gradients."""
    for microbatch in range(2):
        with model.no_sync() if microbatch == 0 else contextlib.nullcontext():
            model(late(noise(10 * i + microbatch, 0, SHAPES, dtypes[0]), device)).backward()
    torch_ext.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def weights(model: Any) -> list[bytes]:
    """Returns the bytes of the whole weights."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return bits([p.detach().cpu() for p in whole])


def trained(
    strategy: str, dtypes: Any, device: torch.device, transport: str = "torch", steps: int = 3, **options: Any
) -> list[bytes]:
    """Returns the weights after some steps. options: of the policy."""
    model, optimizer = made(strategy, dtypes, device, transport, **options)
    for i in range(steps):
        step(model, optimizer, i, dtypes, device)
    return weights(model)


def plainly(dtypes: Any, device: torch.device, steps: int = 3) -> list[bytes]:
    """Returns the weights of the same training without any exchange: only the optimizer."""
    chosen = policy(*dtypes)
    model: Any = Given(SHAPES, dtypes[0])
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.fill_(0.5 + i)
    model.to(device)
    model.no_sync = contextlib.nullcontext
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.01, policy=chosen)
    for i in range(steps):
        step(model, optimizer, i, dtypes, device)
    return weights(model)


def why_no_nccl() -> str:
    """Returns why transport="nccl" is rejected here; "" if it is not."""
    try:
        nccl_transport.refuse("nccl", DEVICE)
    except (ValueError, RuntimeError) as refusal:
        return str(refusal)
    return ""


@contextlib.contextmanager
def without_waits_for_nccl() -> Iterator[None]:
    """Within the context, nothing waits for NCCL: a bug that a test must notice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_transport._Issued, "wait", lambda self: None)
        yield


def pretend_nccl() -> None:
    """Makes transport="nccl" accept host memory for the rest of the process; $TORCH_EXT_NCCL names a library that
    pretends to be NCCL."""
    refuse = nccl_transport.refuse

    def refuse_others(name: str, device: torch.device) -> None:
        if name != "nccl":
            refuse(name, device)

    for module in [module for name, module in sys.modules.items() if name.startswith("torch_ext.")]:
        if getattr(module, "refuse", None) is refuse:
            setattr(module, "refuse", refuse_others)  # noqa: B010 - modules are typed without it


if DEVICE.type == "cpu" and "TORCH_EXT_NCCL" in os.environ:
    pretend_nccl()


def transport_of_world() -> nccl_transport.NcclTransport:
    """Returns a communicator of our own between all ranks.

    Skips the test where there is no GPU but torch has loaded a real NCCL: that one would be used."""
    if DEVICE.type == "cpu" and (found := nccl.find().path) != os.environ.get("TORCH_EXT_NCCL"):
        pytest.skip(f"torch has loaded {found}, which would be used without a GPU; a torch for CPUs is needed")
    assert dist.group.WORLD is not None
    return nccl_transport.transport_of(dist.group.WORLD, DEVICE, streams_of(DEVICE), False)
