"""Helpers of the optimizer's tests: policies by name, parameters of awkward sizes, and gradients that depend on the
step alone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ext

torch.set_num_threads(1)  # at these sizes a second thread only costs time; the C tests vary the number of threads

# name -> (dtype of the parameters, override_optimizer_config)
POLICIES: dict[str, tuple[torch.dtype, dict[str, object]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16_remainder": (torch.bfloat16, {"store_param_remainders": True}),
    "8bit": (torch.bfloat16, {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}),
    "no master": (torch.bfloat16, {"main_params_dtype": None}),
    "fp32 moments": (torch.bfloat16, {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}),
    "fp16": (torch.float16, {}),
    "fp16 moments": (torch.float16, {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"}),
    "mixed moments": (torch.bfloat16, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}),
}
WITH_MASTER = [name for name, (dtype, config) in POLICIES.items() if dtype != torch.float32 and name != "no master"]

SHAPES = [(130, 37), (130,), (3, 5, 7), (1,), (), (0,), (129,), (256,)]


def policy_of(name: str) -> torch_ext.Policy:
    dtype, config = POLICIES[name]
    return torch_ext.load_policy(dtype, override_optimizer_config=config)


def params_of(name: str, shapes: Iterable[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    """Returns new parameters of that policy's dtype; equal seeds give equal values."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(POLICIES[name][0])) for shape in shapes]


def set_grads(params: Iterable[Tensor], step: int, dtype: torch.dtype | None = None) -> None:
    """Sets gradients that are a function of the step and the shapes alone. dtype: theirs, by default each
    parameter's."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator) * 0.1
        p.grad = grad.to(p.dtype if dtype is None else dtype)


def train(optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Takes a step for each number, with the gradients of `set_grads`, and drops the gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        set_grads(params, step)
        optimizer.step()
    for p in params:
        p.grad = None


def bits(t: Tensor) -> bytes:
    return t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def everything(optimizer: torch.optim.Optimizer) -> list[dict[str, bytes]]:
    """Returns the bytes of every parameter and of all of its stored state. Checksums of weights are left out: they
    depend on the memory layout."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            found.append(
                {"param": bits(p)} | {key: bits(value) for key, value in sorted(state.items()) if key != "checksum"}
            )
    return found


class OperatorCalls(TorchDispatchMode):
    """Records calls of torch.ops.torch_ext in this context: `calls` has each operator's name and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "torch_ext":
            self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))
