"""Ordinary user code, in which mypy and pyright must not report errors (test_typing.py). This file is checked, not
run."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import assert_type

import torch_ext
from torch_ext import AdamW, AdamW8bit, Policy, load_policy


def constructors(model: nn.Module) -> list[torch.optim.Optimizer]:
    policy = load_policy(model)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    return [
        AdamW(model.parameters()),
        AdamW(list(model.parameters()), 3e-4, (0.9, 0.95), 1e-8, 0.1),
        AdamW(model.named_parameters(), lr=torch.tensor(3e-4), fused=True),
        AdamW([{"params": decayed, "lr": 1e-3}, {"params": [], "weight_decay": 0.0}], lr=1e-4, policy=policy),
        AdamW(model.parameters(), states="8bit", min_8bit_size=4096, keep_32bit=[nn.Embedding, "lm_head", model]),
        AdamW(model.parameters(), states=None, keep_32bit=nn.LayerNorm, moment_rounding="stochastic", seed=7),
        AdamW(model.parameters(), policy={"exp_avg_dtype": "fp8", "lr": 1e-3}),
        AdamW(model.parameters(), policy=lambda policy: {"states": "8bit"} if policy.bf16 else None),
        AdamW8bit(model.parameters(), lr=1e-3, keep_32bit="*norm*", offload_fraction=0.5),
        torch_ext.Adam(model.parameters(), weight_decay=0.01, decoupled_weight_decay=True, skip_nonfinite=True),
    ]


def loop(model: nn.Module, batches: list[Tensor]) -> float:
    policy = load_policy(model, override_optimizer_config={"clip_grad": 1.0}, override_ddp_config=hook)
    parallel = torch_ext.parallelize(model, policy, strategy="optim")
    with parallel.no_sync(), parallel.sync():
        assert_type(parallel.wire_bytes(), int)
    optimizer = AdamW(model.named_parameters(), lr=3e-4, policy=policy, states="bf16")
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    total = 0.0
    for batch in batches:
        loss: Tensor = model(batch).sum()
        loss.backward()
        norm = torch_ext.clip_grad_norm_(optimizer, 1.0)
        assert_type(norm, Tensor)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        total += loss.item() + math.sqrt(norm.item())

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(batches[0]).sum()
        loss.backward()
        return float(loss)

    optimizer.step(closure)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * group["lr"]
        total += sum(p.numel() for p in group["params"])
    return total


def hook(policy: Policy) -> Mapping[str, Any] | None:
    return {"grad_comm_dtype": torch.bfloat16} if policy.param_dtype == torch.bfloat16 else None


def checkpoints(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state_dict()
    optimizer.load_state_dict(state)
    whole = optimizer.consolidate_state_dict(to=0)
    assert_type(whole, dict[str, Any] | None)
    torch_ext.save({"model": model.state_dict(), "optimizer": state}, "checkpoint")
    found: dict[str, Any] = torch_ext.load("checkpoint")
    changed: int = optimizer.resync_masters(found["model"], force=False) + optimizer.external_writes()
    assert_type(optimizer.state_bytes(), dict[str, int])
    with optimizer.master_weights() as masters:
        for name, master in masters.items():
            print(name, master.float().mean(), changed, optimizer.skipped_steps())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "keep_32bit": True})
    return {str(key): value for key, value in optimizer.master_state_dict().items()}


def policies(model: nn.Module) -> str:
    policy = load_policy(model, preset="conservative", optimizer_config={"lr": 1e-3})
    assert_type(policy.param_dtype, torch.dtype)
    assert_type(policy.exp_avg_dtype, torch.dtype)
    assert_type(policy.main_params_dtype, torch.dtype | None)
    assert_type(policy.lr, float | None)
    assert_type(policy.weight_decay, float)
    assert_type(policy.bucket_size, int | None)
    assert_type(policy.min_8bit_size, int)
    assert_type(policy.bf16, bool)
    assert_type(policy.optimizer, str)
    assert_type(policy.optimizer_config, dict[str, Any])
    if policy.states == "8bit" and policy.moment_rounding == "dithered":
        return str(policy)
    if policy.data_parallel_sharding_strategy == "optim":
        return policy.row(torch.float32).preset
    dtypes: dict[str, Any] = torch_ext.coerce_dtypes({"exp_avg_dtype": "bf16"})
    return f"{hash(policy)} {dtypes} {torch_ext.library_path()} {torch_ext.get_include()}"


def scaling(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    scaler = load_policy(model).grad_scaler("cpu")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)


def plans(model: nn.Module) -> int:
    plan = torch_ext.plan_buckets(dict(model.named_parameters()), load_policy(model), world_size=8)
    return sum(bucket.numel for bucket in plan.buckets) + plan.fingerprint
