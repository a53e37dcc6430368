"""Builds what the checkpoint tests save: a model of awkward sizes under a strategy, and its AdamW."""

from typing import Any

import torch
from gradients import BF16, FP32, Given, bits, noise

import torch_ext

SHAPES: list[Any] = [(3, 5), (700,), (), (0,), (129,), (16, 130)]
EIGHT_BIT = {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}


def made(strategy: str, config: dict[str, Any] | None = None, seed: int = 7) -> tuple[Any, Any]:
    """Returns the model, with weights drawn from `seed`, and its AdamW. config: overrides of the optimizer's policy."""
    chosen = torch_ext.load_policy(
        BF16,
        override_optimizer_config={"main_grads_dtype": FP32, "use_precision_aware_optimizer": True, **(config or {})},
        override_ddp_config={"grad_comm_dtype": FP32, "bucket_size": 900},
    )
    shapes = [s for s in SHAPES if s not in ((), (0,))] if strategy == "optim_grads_params" else SHAPES
    model: Any = Given(shapes, BF16)
    weights = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=weights))
    torch_ext.parallelize(model, chosen, strategy=strategy)
    return model, torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=chosen)


def steps(model: Any, optimizer: Any, which: range) -> None:
    """Takes the training steps whose numbers are in `which`. A step's gradients depend on its number only and are the
    same on every rank."""
    for step in which:
        model(noise(step, 0, [p.shape for p in model.parameters()], BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(optimizer: Any) -> dict[Any, dict[str, bytes]]:
    """Returns the bytes of the consolidated optimizer state, by parameter and key, on every rank. Collective."""
    consolidated = optimizer.consolidate_state_dict(to=None)
    optimizer.state_dict()  # takes the consolidated state, which state_dict() returns once; that is tested elsewhere
    return {
        index: dict(zip(entry, bits([v.clone() for v in entry.values()]), strict=True))
        for index, entry in consolidated["state"].items()
    }
