"""torch_ext.diagnose of parameters that are sharded over ranks: FSDP2, our strategies, ZeroRedundancyOptimizer."""

from typing import Any

import ranks
import torch
from gradients import BF16, FP32
from torch import nn

import torch_ext

WORLD = 2


def _model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 5)).to(dtype)


NAMES = {f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")}


def _fsdp2(model: Any) -> Any:
    """Applies FSDP2 as frameworks do: forward and backward in bf16, by a mixed-precision policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fully_shard(model[0], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model(torch.randn(4, 16).to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _kinds(report: torch_ext.Report) -> set[str]:
    """Returns the kinds of findings that are more than a note."""
    return {f.kind for f in report.findings if f.severity != "note"}


def _areal_1292(rank: int, world: int) -> Any:
    """A model loaded in the compute dtype, as in AReaL #1292."""
    model = _fsdp2(_model(BF16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = torch_ext.diagnose(model, optimizer)
    _step(model, optimizer)
    return before, torch_ext.diagnose(model, optimizer)


def _accelerate_3979(rank: int, world: int) -> Any:
    """An upcast that assigns to a loop variable only, as in accelerate #3979."""
    model = _fsdp2(_model(BF16))
    for param in model.parameters():
        if param.requires_grad and param.dtype != FP32:
            param = param.to(FP32)  # noqa: PLW2901
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    return torch_ext.diagnose(model, optimizer)


def _automodel_2248(rank: int, world: int) -> Any:
    """bf16 moments, as in Automodel #2248. reduce_dtype, which users change first, is fp32 already."""
    model = _fsdp2(_model(BF16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _step(model, optimizer)
    return torch_ext.diagnose(model, optimizer)


def test_bf16_shards_under_a_mixed_precision_policy() -> None:
    for before, after in ranks.run(WORLD, _areal_1292):
        for report in (before, after):
            assert _kinds(report) == {"upcast_missing", "lost_updates", "stalled_exp_avg_sq"}
            assert set(report.of("upcast_missing")[0].names) == NAMES
            assert report.of("upcast_missing")[0].fix.startswith("model.float()")


def test_an_upcast_of_shards_that_did_not_happen() -> None:
    for report in ranks.run(WORLD, _accelerate_3979):
        assert "upcast_missing" in _kinds(report) and "stalled_exp_avg_sq" not in _kinds(report)
        assert set(report.of("upcast_missing")[0].names) == NAMES


def test_bf16_states_that_reducing_in_fp32_does_not_widen() -> None:
    for report in ranks.run(WORLD, _automodel_2248):
        assert {"upcast_missing", "stalled_exp_avg_sq"} <= _kinds(report)
        assert set(report.of("stalled_exp_avg_sq")[0].names) == NAMES


def _healthy_fsdp2(rank: int, world: int) -> Any:
    """Healthy: fp32 shards are masters. Between forward and backward the module has other, unsharded parameters."""
    model = _fsdp2(_model(FP32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found = [torch_ext.diagnose(model, optimizer)]
    loss = model(torch.randn(4, 16)).float().square().mean()
    found.append(torch_ext.diagnose(model, optimizer))
    loss.backward()
    found.append(torch_ext.diagnose(model, optimizer))
    optimizer.step()
    optimizer.zero_grad()
    return [*found, torch_ext.diagnose(model, optimizer)]


def _ours_fsdp2(rank: int, world: int) -> Any:
    """Healthy: bf16 shards whose masters are in our optimizer. The policy's cast does nothing, and no bits are lost."""
    model = _fsdp2(_model(BF16))
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-5)
    found = [torch_ext.diagnose(model, optimizer)]
    _step(model, optimizer)
    return [*found, torch_ext.diagnose(model, optimizer)]


def _stale_after_sharding(rank: int, world: int) -> Any:
    """An optimizer created before fully_shard, which replaces the parameters, refers to the old ones."""
    model = _model(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    return torch_ext.diagnose(_fsdp2(model), optimizer)


def test_fsdp2() -> None:
    for reports in ranks.run(WORLD, _healthy_fsdp2) + ranks.run(WORLD, _ours_fsdp2):
        assert [str(report) for report in reports if report.findings] == []
    for report in ranks.run(WORLD, _stale_after_sharding):
        assert _kinds(report) == {"stale_references"} and set(report.of("stale_references")[0].names) == NAMES


def _strategies(rank: int, world: int) -> Any:
    """diagnose must find nothing under our strategies, until weights are written behind the optimizer's back."""
    found: list[str] = []
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        for config in ({}, {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}):
            model = _model(BF16)
            policy = torch_ext.load_policy(model, override_optimizer_config=config)
            torch_ext.parallelize(model, policy, strategy=strategy)
            optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-5, policy=policy)
            for when in ("before", "after"):
                report = torch_ext.diagnose(model, optimizer)
                found += [f"{strategy}, {config}, {when}: {report}"] * bool(report.findings)
                _step(model, optimizer)
            if strategy == "optim" and not config:
                for p in model.parameters():
                    p.data.add_(1)
                (stale,) = torch_ext.diagnose(model, optimizer).findings
                found += [str(stale)] * ((stale.kind, stale.severity) != ("stale_masters", "note"))
    return found


def test_our_strategies() -> None:
    assert ranks.run(WORLD, _strategies) == [[], []]


def _zero(rank: int, world: int) -> Any:
    """ZeroRedundancyOptimizer: diagnose must find nothing although some parameters' states are on other ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _model(FP32)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    found = [torch_ext.diagnose(model, optimizer)]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [*found, torch_ext.diagnose(model, optimizer)]


def test_states_that_are_on_other_ranks() -> None:
    for reports in ranks.run(WORLD, _zero):
        assert [str(report) for report in reports if report.findings] == []
