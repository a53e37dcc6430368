"""Checkpoints of tensors that are cut by columns, as tensor parallelism cuts them, must load like whole tensors.

The loading states are cut otherwise or encoded in blocks, so they read pieces of rows."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from gradients import BF16, Given, bits, noise
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ext

SHAPES: list[Any] = [(6, 514), (48, 40), (3, 130)]
STRATEGIES = ["none", "optim", "optim_grads_params"]
STATES = ["fp32", "bf16", "bf16_remainder", "8bit"]


def _saved(columns: bool) -> dict[str, Any]:
    """Returns moments, and masters that round to the weights, by parameter. columns: as DTensors cut by columns."""
    draw = torch.Generator().manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {}
    for i, weight in enumerate(_weights()):
        wide = weight.float()
        near = wide * (1 + torch.rand(wide.shape, generator=draw) / 1024)
        entry = {
            "exp_avg": torch.randn(wide.shape, generator=draw),
            "exp_avg_sq": torch.rand(wide.shape, generator=draw),
            "master_param": torch.where(near.to(BF16) == weight, near, wide),
        }
        if columns:
            entry = {key: distribute_tensor(value, mesh, [Shard(1)]) for key, value in entry.items()}
        state[f"p{i}"] = {"step": torch.tensor(4.0)} | entry
    return state


def _weights() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=draw).to(BF16) for shape in SHAPES]


def _build(strategy: str, states: Any) -> tuple[Any, Any]:
    """Returns a model with `_weights` under the strategy, and its AdamW with these `states`."""
    model: Any = Given(SHAPES, BF16)
    with torch.no_grad():
        for p, weight in zip(model.parameters(), _weights(), strict=True):
            p.copy_(weight)
    policy = torch_ext.load_policy(BF16, override_ddp_config={"bucket_size": 900})
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=policy, states=states, min_8bit_size=0)
    if strategy != "none":
        model = torch_ext.parallelize(model, optimizer.policy, strategy=strategy)
        params = dict(model.named_parameters()).items()
        optimizer = torch_ext.AdamW(params, lr=0.1, policy=optimizer.policy, min_8bit_size=0)
    return model, optimizer


def _load(folder: str, strategy: str, states: str) -> dict[str, list[bytes]]:
    """Loads the folder into an optimizer that has taken a step. Returns the bits of its consolidated state."""
    model, optimizer = _build(strategy, states)
    model(noise(0, 0, SHAPES, BF16)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for p, weight in zip(model.parameters(), _weights(), strict=True):
            p.copy_(distribute_tensor(weight, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else weight)
    given = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(given, storage_reader=torch_ext.CheckpointReader(folder))
    set_optimizer_state_dict(model, optimizer, given["optimizer"])
    found = optimizer.consolidate_state_dict(to=None)["state"]
    optimizer.state_dict()
    return {f"{i} {key}": bits([value.clone()]) for i, entry in found.items() for key, value in entry.items()}


def _save(rank: int, world: int, folder: str) -> None:
    """Saves the same state twice: as whole tensors, and cut by columns."""
    model, optimizer = _build("none", "fp32")
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    for name in ("whole", "columns"):
        state = {"optimizer": {"state": _saved(name == "columns"), "param_groups": groups}}
        dcp.save(state, storage_writer=torch_ext.CheckpointWriter(f"{folder}/{name}"))


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    ranks.run(2, _save, str(folder))
    return folder


def _loads(rank: int, world: int, folder: str, strategy: str, states: str) -> tuple[Any, Any]:
    return _load(f"{folder}/whole", strategy, states), _load(f"{folder}/columns", strategy, states)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_columns_load_as_whole_tensors_do(strategy: str, states: str, saves: Path) -> None:
    world = 1 if strategy == "none" else 2
    for whole, columns in ranks.run(world, _loads, str(saves), strategy, states):
        assert whole == columns and len(whole) > 3 * len(SHAPES)
