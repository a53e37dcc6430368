"""docs/recipes/verl.md under verl's two ways to shard, FSDP (the default) and FSDP2, with verl's clipping and files."""

import warnings
from typing import Any

import ranks
import recipes
import torch
from gradients import bits
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from verl_rebuilt import build_optimizer, configured

BF16, FP32 = torch.bfloat16, torch.float32
STEPS, HALF, MAX_NORM = 6, 3, 0.05
WAYS = ("fsdp", "fsdp with use_orig_params", "fsdp2")


def _model(way: str) -> Any:
    """Returns the model, sharded by FSDP or FSDP2 as verl does it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 5)).to(BF16)
    if way == "fsdp2":
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    return FullyShardedDataParallel(
        model,
        mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=FP32),
        use_orig_params="use_orig_params" in way,
        device_id=torch.device("cpu"),
    )


def _train(rank: int, model: Any, optimizer: Any, steps: range) -> None:
    """Trains these steps as verl does."""
    for step in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank)).to(BF16)
        (model(x).float() - x.float().sum(1, keepdim=True)).square().mean().backward()
        if isinstance(model, FullyShardedDataParallel):
            norm: Any = model.clip_grad_norm_(MAX_NORM)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
            norm = norm.full_tensor()
        assert float(norm) > MAX_NORM, "every step is clipped"
        optimizer.step()
        optimizer.zero_grad()


def _local(values: Any) -> list[Any]:
    """Returns the bits of this rank's tensors."""
    return bits([v.to_local().clone() if hasattr(v, "to_local") else v.clone() for v in values])


def _state(optimizer: Any) -> list[Any]:
    return _local(value for entry in optimizer.state_dict()["state"].values() for value in entry.values())


def _resumes(rank: int, world: int, folder: str) -> None:
    """Each rank saves its own part of weights and state with torch.save, and resumes from it, bit for bit."""
    for way in WAYS:
        config = configured(recipes.blocks("verl", "text")[0], lr=1e-4)
        model = _model(way)
        optimizer = build_optimizer(model.parameters(), config)
        _train(rank, model, optimizer, range(HALF))
        saved = {"weights": [p.detach().clone() for p in model.parameters()], "optimizer": optimizer.state_dict()}
        torch.save(saved, f"{folder}/{way}-{rank}.pt")
        _train(rank, model, optimizer, range(HALF, STEPS))
        assert optimizer.external_writes() == 0, "gathering and freeing weights is nobody's write"

        other = _model(way)
        resumed = build_optimizer(other.parameters(), config)
        there = torch.load(f"{folder}/{way}-{rank}.pt", weights_only=False)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", ".*torch_ext.*")
            for p, weight in zip(other.parameters(), there["weights"], strict=True):
                p.copy_(weight)
            resumed.load_state_dict(there["optimizer"])
        _train(rank, other, resumed, range(HALF, STEPS))
        assert _local(model.parameters()) == _local(other.parameters()), way
        assert _state(optimizer) == _state(resumed), way


def test_the_lines_train_and_resume_under_fsdp_and_fsdp2(tmp_path: Any) -> None:
    ranks.run(2, _resumes, str(tmp_path))
