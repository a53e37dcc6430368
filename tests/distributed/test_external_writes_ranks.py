"""Writes to weights under every strategy (semantics.md, D3, D7): our own writes and FSDP2's must not count as external,
an external write that leaves no trace must take effect, and opened masters must reach every rank."""

from typing import Any

import pytest
import strategies
import torch
from torch import nn

import torch_ext

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
MASTERS: dict[str, dict[str, Any]] = {"fp32": {}, "remainders": {"store_param_remainders": True}}


def _build(strategy: str, masters: str, **ddp: Any) -> tuple[Any, Any]:
    """Returns a parallel model and its optimizer. masters: a key of MASTERS; ddp: overrides of the policy."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40)).to(torch.bfloat16)
    policy = torch_ext.load_policy(
        model,
        override_optimizer_config=MASTERS[masters],
        override_ddp_config={"bucket_size": 4000, **ddp},
    )
    model = torch_ext.parallelize(model, policy, strategy=strategy)
    return model, torch_ext.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.0, policy=policy)


def _train(model: Any, optimizer: Any, step: int, rank: int, factor: float = 1.0) -> None:
    """Takes one step with the loss multiplied by `factor`."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(torch.bfloat16)
    (model(x).float().pow(2).mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def _weights(model: Any) -> list[torch.Tensor]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in whole]


def _write(model: Any, value: float) -> None:
    """Writes to all elements of every parameter, in a way that no version counter sees."""
    for p in model.parameters():
        (p.to_local() if hasattr(p, "to_local") else p).data.fill_(value)


def _quiet(optimizer: Any) -> None:
    """Zeroes exp_avg, so that a step with a gradient of 0 changes no weight."""
    for state in optimizer.state.values():
        if "exp_avg" in state:
            state["exp_avg"].zero_()


def _own_writes(rank: int, world: int, strategy: str, masters: str, ddp: dict[str, Any]) -> None:
    """Trains, clips, saves and syncs: none of that may be counted as an external write."""
    model, optimizer = _build(strategy, masters, **ddp)
    for step in range(5):
        _train(model, optimizer, step, rank)
        if step == 2:
            torch_ext.clip_grad_norm_(optimizer, 1.0)
            optimizer.state_dict()
            torch_ext.sync_parameters([model])
    assert optimizer.external_writes() == 0


@pytest.mark.parametrize("masters", MASTERS)
def test_D7_our_own_writes_and_FSDP2s_are_no_writes_of_others(masters: str) -> None:
    strategies.run(2, _own_writes, masters, {}, chosen=STRATEGIES)


def test_D7_steps_in_backward_are_no_writes_of_others() -> None:
    strategies.run(2, _own_writes, "fp32", {"step_in_backward": True}, chosen=["optim", "optim_grads"])


def _silent(rank: int, world: int, strategy: str, masters: str) -> None:
    """Writes 0.25 to every weight; a step that adds nothing must keep it."""
    model, optimizer = _build(strategy, masters)
    for step in range(3):
        _train(model, optimizer, step, rank)
    _quiet(optimizer)
    _write(model, 0.25)
    _train(model, optimizer, 3, rank, factor=0.0)
    for weight in _weights(model):
        assert torch.equal(weight, torch.full_like(weight, 0.25))
    assert optimizer.external_writes() > 0


@pytest.mark.parametrize("masters", MASTERS)
def test_D3_D7_a_write_without_a_trace_takes_effect_on_every_rank(masters: str) -> None:
    strategies.run(2, _silent, masters, chosen=STRATEGIES)


def _refused(rank: int, world: int, strategy: str, masters: str) -> None:
    """With on_external_write="error" the step must raise before it has written anything."""
    model, optimizer = _build(strategy, masters)
    optimizer.on_external_write = "error"
    for step in range(3):
        _train(model, optimizer, step, rank)
    _write(model, 0.25)
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with pytest.raises(RuntimeError, match=r"'0.weight' \(\d+ elements\).*no longer what the master rounds to"):
        _train(model, optimizer, 3, rank)
    assert all(map(torch.equal, before, (state["exp_avg"] for state in optimizer.state.values())))
    assert all(torch.equal(w, torch.full_like(w, 0.25)) for w in _weights(model))


@pytest.mark.parametrize("masters", MASTERS)
def test_D7_error_stops_every_chunk_before_the_first(masters: str) -> None:
    strategies.run(2, _refused, masters, chosen=STRATEGIES)


def _opened(rank: int, world: int, strategy: str, masters: str) -> None:
    """Clamps opened masters: the whole weights must be their rounded values on every rank."""
    model, optimizer = _build(strategy, masters)
    for step in range(3):
        _train(model, optimizer, step, rank)
    before = _weights(model)
    with optimizer.master_weights() as opened:
        for value in opened.values():
            assert value.dtype == torch.float32
            value.clamp_(-0.01, 0.01)
    after = _weights(model)
    assert all(
        torch.equal(b.float().clamp(-0.01, 0.01).to(torch.bfloat16), a) for b, a in zip(before, after, strict=True)
    )
    _train(model, optimizer, 3, rank)
    assert optimizer.external_writes() == 0


@pytest.mark.parametrize("masters", MASTERS)
def test_opened_masters_reach_every_rank(masters: str) -> None:
    strategies.run(2, _opened, masters, chosen=STRATEGIES)


def _seeded(rank: int, world: int, strategy: str, masters: str) -> list[Any]:
    """Resyncs masters of shards from whole fp32 values: they must have the values' bits; remainders may be one off."""
    model, optimizer = _build(strategy, masters)
    _train(model, optimizer, 0, rank)
    shapes = {"0.weight": (96, 64), "0.bias": (96,), "2.weight": (40, 96), "2.bias": (40,)}
    generator = torch.Generator().manual_seed(4)
    wide = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    with torch.no_grad():
        for key, p in model.named_parameters():
            if hasattr(p, "to_local"):
                from torch.distributed.tensor import distribute_tensor

                p.copy_(distribute_tensor(wide[key].to(p.dtype), p.device_mesh, p.placements))
            else:
                p.copy_(wide[key])
    assert optimizer.resync_masters(state_dict=wide) > 0
    found = optimizer.consolidate_state_dict(to=None)
    for (_, state), value in zip(found["state"].items(), wide.values(), strict=True):
        distance = (state["master_param"].view(torch.int32) - value.view(torch.int32)).abs().max()
        assert int(distance) <= (masters == "remainders")
    _train(model, optimizer, 1, rank)
    assert optimizer.external_writes() == 0
    return [weight.tolist() for weight in _weights(model)]


@pytest.mark.parametrize("masters", MASTERS)
def test_D5_masters_of_parts_from_a_state_of_higher_precision(masters: str) -> None:
    for one, two in strategies.run(2, _seeded, masters, chosen=STRATEGIES).values():
        assert one == two
