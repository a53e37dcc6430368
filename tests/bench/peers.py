"""The peers that the step is compared with: torch's fused AdamW, mixed-precision recipes around it, and DeepSpeed's
CPUAdam if it is installed."""

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bench import workload
from bench.optimizer_configs import Training
from bench.workload import Shapes

LR, BETA1, BETA2, EPS, DECAY = 1e-4, 0.9, 0.999, 1e-8, 1e-2


class Unavailable(Exception):
    """A peer that this machine cannot run; the message says why."""


def torch_fused(shapes: Shapes, dtype: torch.dtype, seed: int, device: str = "cpu") -> Training:
    """Returns torch.optim.AdamW(fused=True) on parameters, gradients and states of one dtype."""
    return Training(
        torch.optim.AdamW(workload.make(shapes, dtype, seed, device), lr=LR, weight_decay=DECAY, fused=True)
    )


def torch_fused_bf16_states(shapes: Shapes, seed: int, device: str) -> Training:
    """Returns torch.optim.AdamW(fused=True) on fp32 parameters and gradients with bf16 states, which some versions of
    torch can step on a GPU."""
    peer = torch_fused(shapes, torch.float32, seed, device)
    for p in peer.params:
        state = peer.optimizer.state[p]
        state["step"] = torch.zeros((), device=p.device)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(p, dtype=torch.bfloat16)
    return peer


class MixedRecipe(Training):
    """A bf16 model with fp32 master weights that torch's fused AdamW steps: gradients are cast up, weights copied
    back."""

    def __init__(self, shapes: Shapes, seed: int, device: str = "cpu") -> None:
        params = workload.make(shapes, torch.bfloat16, seed, device)
        masters = [torch.nn.Parameter(p.detach().float()) for p in params]
        for master in masters:
            master.grad = torch.zeros_like(master)
        self.model, self.model_grads = [p.detach() for p in params], workload.grads(params)
        self.masters, self.grads = [p.detach() for p in masters], workload.grads(masters)
        super().__init__(torch.optim.AdamW(masters, lr=LR, weight_decay=DECAY, fused=True))

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self.grads, self.model_grads)
        self.optimizer.step()
        torch._foreach_copy_(self.model, self.masters)

    def tensors(self) -> Iterator[Tensor]:
        return chain(super().tensors(), self.model, self.model_grads)


def _one_pass(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    step_size: Tensor,
    root: Tensor,
) -> None:
    """Steps all tensors by AdamW's formula. step_size: lr / (1 - beta1^t); root: sqrt(1 - beta2^t)."""
    for p, grad, exp_avg, exp_avg_sq, master in zip(params, grads, exp_avgs, exp_avg_sqs, masters, strict=True):
        g = grad.float()
        m = exp_avg.float().lerp(g, 1 - BETA1)
        v = exp_avg_sq.float() * BETA2 + g * g * (1 - BETA2)
        new = master * (1 - LR * DECAY) - step_size * m / (v.sqrt() / root + EPS)
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        master.copy_(new)
        p.copy_(new)


class Compiled:
    """The mixed recipe in one pass under torch.compile: bf16 p, g, m, v and an fp32 master per tensor, all updated by
    one compiled function. The bias corrections are tensors, so that no later step compiles again."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        params = workload.make(shapes, torch.bfloat16, seed)
        weights = [p.detach() for p in params]
        self.lists = (
            weights,
            workload.grads(params),
            [torch.zeros_like(p) for p in weights],
            [torch.zeros_like(p) for p in weights],
            [p.float() for p in weights],
        )
        self.steps = 0
        self.step_size, self.root = torch.zeros(()), torch.zeros(())
        self.compiled = torch.compile(_one_pass, dynamic=False, fullgraph=True)
        try:
            self.step()
        except Exception as failure:  # most often no C++ compiler, for which torch has many exception classes
            raise Unavailable(f"torch.compile failed: {first_line(failure)}") from None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        self.step_size.fill_(LR / (1 - BETA1**self.steps))
        self.root.fill_((1 - BETA2**self.steps) ** 0.5)
        self.compiled(*self.lists, self.step_size, self.root)

    def tensors(self) -> Iterator[Tensor]:
        return chain.from_iterable(self.lists)


def deepspeed(shapes: Shapes, seed: int) -> Training:
    """Returns DeepSpeed's CPUAdam on bf16 parameters and gradients with fp32 states and no master weights.

    Raises Unavailable if it is not installed or if its operator cannot be built. It compiles the operator at the first
    use, which takes minutes.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise Unavailable("deepspeed is not installed (pip install deepspeed)")
    params = workload.make(shapes, torch.bfloat16, seed)
    try:
        with _quiet():
            adam: Callable[..., Any] = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
            optimizer = adam(params, lr=LR, weight_decay=DECAY, adamw_mode=True, fp32_optimizer_states=True)
    except Exception as failure:
        raise Unavailable(f"deepspeed's CPUAdam cannot be built: {first_line(failure)}") from None
    return Training(optimizer)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses what DeepSpeed prints while it loads and builds. Adds the interpreter's folder to PATH: its build
    calls ninja, which pip installs there."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), path])
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.environ["PATH"] = path


def first_line(failure: Exception) -> str:
    """Returns the failure's type and the first line of its message, shortened."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else 'no message'}"[:200]
