"""docs/recipes/torchtitan.md: its lines, with models built, clipped and saved as torchtitan does it, on FSDP2."""

import importlib
import warnings
from typing import Any

import pytest
import ranks
import recipes
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan_rebuilt
from gradients import bits
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BF16, FP32 = torch.bfloat16, torch.float32
STEPS, HALF, MAX_NORM = 4, 2, 0.05
# The rows of the page's table: training.dtype, by `states`.
ROWS = {"bf16_remainder": BF16, "8bit": BF16, "bf16": FP32}
WAYS = [pytest.param(False, id="rebuilt"), pytest.param(True, id="torchtitan", marks=recipes.needs("torchtitan"))]


def _page(states: str, theirs: bool) -> Any:
    """Runs the page's lines and returns its configuration, with other `states`."""
    if not theirs:
        torchtitan_rebuilt.install()
    names = recipes.run("torchtitan", 1, recipes.run("torchtitan", 0, {}))
    kwargs = names["optimizer"].optimizer_factory_kwargs_by_name["AdamW"]
    assert kwargs == {"states": "bf16_remainder"}
    kwargs["states"] = states
    return names["optimizer"]


def _model(dtype: torch.dtype) -> nn.Module:
    """Returns a sharded model in torchtitan's mixed precision."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 16)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1)).to(dtype)
    mixed = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for block in blocks:
        fully_shard(block, mp_policy=mixed)
    return fully_shard(model, mp_policy=mixed)


def _train(model: nn.Module, optimizers: Any, steps: range) -> list[float]:
    """Trains as torchtitan does: the full tensor of the norm, then one multiplication of all gradients."""
    norms = []
    for step in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = (model(x.to(next(model.parameters()).dtype))[:, 0].float() - x.abs().sum(1)).square().mean()
        loss.backward()
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norms.append(float(norm.full_tensor()))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm.full_tensor())
        optimizers.step()
        optimizers.zero_grad()
    return norms


def _everything(model: nn.Module, optimizers: Any) -> dict[str, Any]:
    """Returns this rank's weights and state, tensors as bits."""
    found = {**model.state_dict(), **optimizers.state_dict()}
    local = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in found.items()}
    return {k: bits([v.clone()]) if isinstance(v, torch.Tensor) else v for k, v in local.items()}


def _resumes(rank: int, world: int, theirs: bool, folder: str) -> None:
    """Trains each row of the table, whole and resumed; both must end with the same bits."""
    for states, dtype in ROWS.items():
        config = _page(states, theirs)
        runs = []
        for resumed in (False, True):
            model = _model(dtype)
            optimizers = config.build(model_parts=[model])
            parts = {"model": model, "optimizer": optimizers}
            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*torch_ext.*")
                if resumed:
                    dcp.load(parts, checkpoint_id=f"{folder}/{states}")
                else:
                    _train(model, optimizers, range(HALF))
                    dcp.save(parts, checkpoint_id=f"{folder}/{states}")
            assert min(_train(model, optimizers, range(HALF, STEPS))) > MAX_NORM, "every step is clipped"
            runs.append(_everything(model, optimizers))
        assert runs[0] == runs[1], states
        _looks_as_the_page_says(model, optimizers, states)


def _looks_as_the_page_says(model: nn.Module, optimizers: Any, states: str) -> None:
    (optimizer,) = optimizers.optimizers
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (8e-4, (0.9, 0.95), 0.1)
    keys = {key.removeprefix("state.1.0.weight.") for key in optimizers.state_dict() if "state.1.0.weight." in key}
    assert keys == {"step", "exp_avg", "exp_avg_sq"} | ({"master_param"} if ROWS[states] == BF16 else set())
    entry = optimizer.state[next(model.parameters())]
    assert entry["exp_avg"].dtype == (torch.uint8 if states == "8bit" else BF16)


@pytest.mark.parametrize("theirs", WAYS)
def test_the_lines_resume_bit_for_bit_under_fsdp2(theirs: bool, tmp_path: Any) -> None:
    ranks.run(2, _resumes, theirs, str(tmp_path))


def _without_our_load(rank: int, world: int) -> None:
    """Shows why the page defines load_state_dict: torchtitan's looks for the keys that an entry has in memory."""
    config = _page("bf16_remainder", False)
    model = _model(BF16)
    optimizers = config.build(model_parts=[model])
    _train(model, optimizers, range(HALF))
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizers.state_dict().items()}
    other = config.build(model_parts=[model])
    with pytest.warns(UserWarning, match="no master_param of .*the weight is its master"):
        torchtitan_rebuilt.OptimizersContainer.load_state_dict(other, saved)
    other.load_state_dict(saved)
    key = "state.1.1.weight.master_param"
    assert torch.equal(other.state_dict()[key].to_local(), saved[key].to_local())


def test_torchtitans_own_loader_has_no_masters_of_remainders() -> None:
    ranks.run(1, _without_our_load)


def test_what_is_one_per_optimizer_is_refused_in_a_group() -> None:
    config = _page("8bit", False)
    group = config.param_groups[0]
    group.optimizer_kwargs["policy"] = importlib.import_module("torch_ext").load_policy(BF16)
    with pytest.raises(ValueError, match="'policy' is one per optimizer, not per group"):
        config.build(model_parts=[nn.Linear(2, 2).bfloat16()])
