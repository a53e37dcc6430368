"""Saving and loading sharded states as whole tensors, between strategies, world sizes and bucket sizes."""

import io
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, noise

import torch_ext

SHAPES: list[Any] = [(3, 5), (700,), (0,), (129,), (16, 130), (1,)]
STATES: dict[str, Any] = {
    "masters": {},
    "remainders": {"store_param_remainders": True, "use_precision_aware_optimizer": True},
    "8-bit moments": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "use_precision_aware_optimizer": True},
}


def _build(strategy: str, states: str, size: int | None) -> tuple[Any, Any]:
    """Returns a model and its optimizer. states: a key of STATES; size: bucket_size."""
    chosen = torch_ext.load_policy(
        BF16,
        override_optimizer_config={"main_grads_dtype": FP32, **STATES[states]},
        override_ddp_config={"grad_comm_dtype": FP32, "bucket_size": size},
    )
    torch.manual_seed(7)
    model: Any = Given(SHAPES, BF16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    torch_ext.parallelize(model, chosen, strategy=strategy)
    return model, torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=chosen)


def _steps(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(noise(step, 0, SHAPES, BF16)).backward()  # the same on every rank, so the mean is the same in any world
        optimizer.step()
        optimizer.zero_grad()


def _saved(rank: int, world: int, strategy: str, states: str, size: int | None) -> bytes | None:
    """Returns the saved file of a training, on the rank that consolidates."""
    model, optimizer = _build(strategy, states, size)
    _steps(model, optimizer, range(2))
    if strategy != "no_shard":
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            torch.save(optimizer.state_dict(), io.BytesIO())
    before = bits(list(model.parameters()))
    everywhere, one = optimizer.consolidate_state_dict(to=None), optimizer.consolidate_state_dict(to=world - 1)
    assert (one is not None) == (rank == world - 1) and everywhere is not None
    assert bits(list(model.parameters())) == before, "E11: saving moves no weight"
    for i, p in enumerate(model.parameters()):
        assert all(everywhere["state"][i][key].shape == p.shape for key in ("exp_avg", "exp_avg_sq", "master_param"))
        assert everywhere["state"][i]["step"] == 2
    if one is None:
        return None
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": one}, file)
    return file.getvalue()


def _resumed(rank: int, world: int, strategy: str, states: str, size: int | None, saved: bytes) -> list[bytes]:
    """Resumes from the file and trains on; returns the bits of weights and states."""
    model, optimizer = _build(strategy, states, size)
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    model.load_state_dict(checkpoint["model"])
    assert bits(_whole(optimizer)) == bits([v for e in checkpoint["optimizer"]["state"].values() for v in e.values()])
    _steps(model, optimizer, range(2, 4))
    return bits([*model.parameters(), *_whole(optimizer)])


def _whole(optimizer: Any) -> list[torch.Tensor]:
    """Returns the consolidated states' tensors."""
    return [v for entry in optimizer.consolidate_state_dict(to=None)["state"].values() for v in entry.values()]


@pytest.mark.parametrize("states", STATES)
def test_g5_a_state_moves_between_strategies_and_worlds(states: str) -> None:
    saved = [
        next(s for s in ranks.run(world, _saved, strategy, states, size) if s is not None)
        for world, strategy, size in ((2, "optim", 1), (3, "optim_grads", 900), (1, "no_shard", None))
    ]
    found = [
        answer
        for checkpoint, (world, strategy, size) in zip(
            [*saved, saved[0]],
            ((3, "optim", None), (2, "no_shard", 1), (2, "optim_grads", 1), (2, "optim", 1)),
            strict=True,
        )
        for answer in ranks.run(world, _resumed, strategy, states, size, checkpoint)
    ]
    assert all(answer == found[0] for answer in found)


def _from_torch(rank: int, world: int) -> list[bytes]:
    """Loads a state of torch.optim.AdamW, and gives it back."""
    plain = Given(SHAPES)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(noise(0, 0, SHAPES)).backward()
    theirs.step()
    model = torch_ext.parallelize(Given(SHAPES), torch_ext.load_policy(FP32), strategy="optim")
    ours = torch_ext.AdamW(model.parameters(), lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    back = torch.optim.AdamW(plain.parameters(), lr=0.1)
    back.load_state_dict(ours.consolidate_state_dict(to=None))
    for p in plain.parameters():
        assert bits(list(theirs.state[p].values())) == bits(list(back.state[p].values()))
    wrong = theirs.state_dict()
    wrong["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(3,\) and the parameter has \(700,\)"):
        ours.load_state_dict(wrong)
    return []


def test_g5_to_and_from_torch() -> None:
    ranks.run(2, _from_torch)


def _fsdp(rank: int, world: int) -> None:
    """States of FSDP2 parameters are DTensors; both they and the consolidated state must load."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).bfloat16()
    chosen = torch_ext.load_policy(model)
    torch_ext.parallelize(model, chosen, strategy="optim_grads_params")
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=chosen)
    for _ in range(2):
        model(torch.ones(2, 5, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert all(type(v).__name__ == "DTensor" for e in saved["state"].values() for k, v in e.items() if k != "step")
    whole = optimizer.consolidate_state_dict(to=None)
    for source in (saved, whole):
        other = torch_ext.AdamW(model.parameters(), lr=0.1, policy=chosen)
        other.load_state_dict(source)
        for p in model.parameters():
            assert bits(list(other.state[p].values())) == bits(list(optimizer.state[p].values()))


def test_states_of_dtensors_are_dtensors() -> None:
    ranks.run(2, _fsdp)
