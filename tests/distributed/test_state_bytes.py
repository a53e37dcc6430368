"""`state_bytes()` of the optimizers: the bytes of optimizer state that one rank holds, by kind."""

from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, noise, policy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import torch_ext

SHAPES: list[Any] = [(256, 512), (64, 300), (1000,), (7,)]
NUMEL = sum(torch.Size(shape if isinstance(shape, tuple) else (shape,)).numel() for shape in SHAPES)
WORLD = 2
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]

# Bytes per element, by kind, of a bf16 model.
STATES: dict[str, dict[str, float]] = {
    "fp32": {"exp_avg": 4, "exp_avg_sq": 4, "master_param": 4},
    "bf16": {"exp_avg": 2, "exp_avg_sq": 2, "master_param": 4},
    "bf16_remainder": {"exp_avg": 2, "exp_avg_sq": 2, "master_remainder": 2},
    "8bit": {"exp_avg": 1, "exp_avg_sq": 1, "master_remainder": 2},
}
BY_BLOCKS = {"scales", "checksum"}  # of each rank's part: parts end within blocks


def _optimizer(kind: str, model: torch.nn.Module, **options: Any) -> Any:
    if kind == "AdamW":
        return torch_ext.AdamW(model.named_parameters(), **options)
    return torch_ext.Muon(model.named_parameters(), **options)


def _held(optimizer: Any) -> dict[str, int]:
    """Returns the bytes of this rank's tensors in optimizer.state, by key."""
    found: dict[str, int] = {}
    for state in optimizer.state.values():
        for key, t in state.items():
            local = t.to_local() if isinstance(t, DTensor) else t
            found[key] = found.get(key, 0) + local.numel() * local.element_size()
    return found


def _measured(rank: int, world: int, strategy: str, kind: str) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Returns, by `states=`, what state_bytes says after a step, and what the tensors take."""
    found = {}
    for states in STATES:
        chosen = policy(BF16, bucket_size=50_000)
        model: Any = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy)
        optimizer = _optimizer(kind, model, policy=chosen, states=states, ema_decay=0.9)
        assert optimizer.state_bytes().keys() <= {"step"}, "nothing is created by asking"
        model(noise(1, rank, SHAPES, BF16)).backward()
        optimizer.step()
        counted = optimizer.state_bytes()
        found[states] = counted, _held(optimizer)
        optimizer.zero_grad()
        torch_ext.offload(model, optimizer)
        assert any(t.numel() and not t.untyped_storage().nbytes() for t in _tensors(optimizer)), "memory has moved"
        assert optimizer.state_bytes() == counted, "offload moves tensors, and they are counted as before"
        torch_ext.onload(model, optimizer)
        optimizer.state[model.p0]["mine"] = model.p0.detach().clone()  # other code may keep DTensors there
        assert optimizer.state_bytes()["mine"] == _held(optimizer)["mine"]
    return found


def _tensors(optimizer: Any) -> list[torch.Tensor]:
    leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
    return [t.to_local() if isinstance(t, DTensor) else t for t in leaves if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_counts_what_it_holds(strategy: str, kind: str) -> None:
    answers = ranks.run(WORLD, _measured, strategy, kind)
    for states, sizes in STATES.items():
        for answer in answers:
            counted, held = answer[states]
            assert counted == held
        whole = WORLD if strategy == "no_shard" else 1  # how many ranks hold everything
        total = {key: sum(answer[states][0].get(key, 0) for answer in answers) for key in answers[0][states][0]}
        matrices = 256 * 512 + 64 * 300 if kind == "Muon" else 0
        elements = {key: NUMEL - matrices if key.startswith("exp_avg") else NUMEL for key in sizes}
        expected = {key: size * elements[key] * whole for key, size in sizes.items()} | {"ema_param": 2 * NUMEL * whole}
        if matrices:
            expected["momentum_buffer"] = sizes["exp_avg"] * matrices * whole
        assert {key: total[key] for key in expected} == expected, states
        assert total.keys() - expected.keys() == {"step", "checksum"} | ({"scales"} if states == "8bit" else set())


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_states_that_are_kept_in_host_memory_count(fraction: float) -> None:
    counted = []
    for offload_fraction in (0.0, fraction):
        model = Given(SHAPES, BF16)
        optimizer = torch_ext.AdamW(model.parameters(), states="8bit", offload_fraction=offload_fraction)
        model(noise(1, 0, SHAPES, BF16)).backward()
        optimizer.step()
        counted.append(optimizer.state_bytes())
        assert sum(_held(optimizer).values()) < sum(counted[-1].values()) or not offload_fraction
    assert counted[0] == counted[1]


def test_only_what_exists_counts() -> None:
    model = Given([(8, 8), (4,)], FP32)
    model.p1.requires_grad_(False)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    assert optimizer.state_bytes() == {"step": 4}
    model.p0.sum().backward()
    optimizer.step()
    assert optimizer.state_bytes() == {"exp_avg": 256, "exp_avg_sq": 256, "step": 4}
    optimizer.state[model.p0]["mine"] = torch.zeros(3)
    optimizer.state[model.p0]["note"] = "no tensor"
    assert optimizer.state_bytes()["mine"] == 12
    optimizer.state.clear()
    assert optimizer.state_bytes() == {}
