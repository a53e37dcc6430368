"""The moving average of master weights, and the health numbers, are those of one rank under every strategy. The average
can be swapped in, saved, and loaded under another strategy."""

import copy
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from gradients import BF16, bits
from torch import nn
from torch.distributed.tensor import DTensor

import torch_ext

WAYS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def _build(way: str | None, ema_dtype: Any) -> tuple[Any, Any]:
    """Returns a model and an optimizer that averages. way: the strategy; None: one process."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 1)).to(BF16)
    chosen = torch_ext.load_policy(BF16, override_ddp_config={"grad_comm_dtype": "fp32", "bucket_size": 1000})
    if way is not None:
        torch_ext.parallelize(model, chosen, strategy=way)
    named = model.named_parameters()
    return model, torch_ext.AdamW(named, lr=1e-2, policy=chosen, ema_decay=0.9, ema_dtype=ema_dtype)


def _train(model: Any, optimizer: Any, which: range) -> None:
    for step in which:  # the same on all ranks, so that one rank alone gets the same gradients
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        (model(x.to(BF16))[:, 0].float() - x.abs().sum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _weights(model: Any) -> list[bytes]:
    return bits([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()])


def _averages(optimizer: Any) -> list[bytes]:
    """Returns the bits of the whole averages, on every rank."""
    whole = optimizer.consolidate_state_dict(to=None)
    return bits([entry["ema_param"].float() for entry in whole["state"].values()])


def _each(rank: int, world: int, folder: str) -> None:
    """Compares every strategy with one process."""
    for ema_dtype in (BF16, "24bit"):
        alone, by_itself = _build(None, ema_dtype)
        _train(alone, by_itself, range(4))
        with by_itself.ema_weights():
            swapped = _weights(alone)
        assert swapped != _weights(alone)
        averages = bits(list(by_itself.ema_state_dict().values()))
        health = _health(*copy.deepcopy((alone, by_itself)))
        for way in WAYS:
            model, optimizer = _build(way, ema_dtype)
            _train(model, optimizer, range(4))
            before = _weights(model)
            assert before == _weights(alone), way
            with optimizer.ema_weights():
                assert _weights(model) == swapped, way
                model(torch.ones(1, 8, dtype=BF16))
            assert _weights(model) == before, way
            assert _averages(optimizer) == averages, way
            assert optimizer.ema_state_dict().keys() == by_itself.ema_state_dict().keys()
            assert _health(model, optimizer) == pytest.approx(health, rel=1e-5), way
        _cross(f"{folder}/{ema_dtype}", ema_dtype)


def _health(model: Any, optimizer: Any) -> dict[str, float]:
    """Returns the health numbers of the next step. They are those of whole parameters, on every rank."""
    optimizer.measure_health()
    _train(model, optimizer, range(4, 5))
    found = optimizer.health()
    assert found.step == 5
    return found.as_dict()


def _cross(folder: str, ema_dtype: Any) -> None:
    """Saves under one strategy and loads under another: the averages must have the same bits."""
    model, optimizer = _build("optim_grads", ema_dtype)
    _train(model, optimizer, range(4))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    other, loaded = _build("optim_grads_params", ema_dtype)
    into = {"optimizer": loaded.state_dict()}
    dcp.load(into, checkpoint_id=folder)
    loaded.load_state_dict(into["optimizer"])
    assert _averages(loaded) == _averages(optimizer)


def test_every_strategy_averages_and_measures_as_one_rank_does(tmp_path: Path) -> None:
    ranks.run(2, _each, str(tmp_path), timeout=120)
