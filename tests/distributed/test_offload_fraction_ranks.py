"""`offload_fraction` under every strategy: weights written behind its back (D1 to D3), bits, checkpoints."""

import itertools
from typing import Any

import host_parts
import pytest
import ranks
import torch
from gradients import BF16, FP32, bits, noise
from torch.distributed.tensor import DTensor
from units import Block

import torch_ext

NONE, FULLY = "no wrapper", "optim_grads_params"
STRATEGIES = [NONE, "no_shard", "optim", "optim_grads", FULLY]
FRACTIONS = [0.0, 0.5, 1.0]
# Parameters of several batches, rows that no number of ranks divides, fewer rows than ranks; some are fp32.
BLOCKS: list[tuple[torch.dtype, list[Any]]] = [
    (BF16, [(5, 3), (210, 97), (1,)]),
    (FP32, [(4, 4), (131, 70)]),
    (BF16, [(2,), (9, 2), (130,)]),
]
SHAPES = [shape for _, shapes in BLOCKS for shape in shapes]


class Mixed(torch.nn.Module):
    """A model of bf16 and fp32 blocks; `model(grads).backward()` sets the gradients to `grads`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(shapes, dtype) for dtype, shapes in BLOCKS)
        generator = torch.Generator().manual_seed(11)
        for p in self.parameters():
            torch.nn.init.normal_(p, generator=generator)

    def forward(self, grads: list[torch.Tensor | None]) -> torch.Tensor:
        x, at = torch.zeros((), requires_grad=True), 0
        for block, (_, shapes) in zip(self.blocks, BLOCKS, strict=True):
            x = block(x, grads[at : at + len(shapes)])
            at += len(shapes)
        return x


def _policy(overlap: bool, remainders: bool) -> torch_ext.Policy:
    return torch_ext.load_policy(
        BF16,
        override_optimizer_config={"store_param_remainders": remainders},
        override_ddp_config={"overlap_grad_reduce": overlap, "bucket_size": 9000},
    )


def _make(strategy: str, overlap: bool, remainders: bool, fraction: float, **options: Any) -> Any:
    """Returns a model and its optimizer. fraction: offload_fraction; options: of AdamW."""
    policy, model = _policy(overlap, remainders), Mixed()
    if strategy != NONE:
        torch_ext.parallelize(model, policy, strategy=strategy, find_unused_parameters=True)
    options = {"lr": 1e-2} | options
    return model, torch_ext.AdamW(model.parameters(), policy=policy, offload_fraction=fraction, **options)


def _grads(step: int, rank: int) -> list[Any]:
    """Returns a rank's gradients; in each step another parameter has none."""
    grads: list[Any] = [g.to(dtype) for g, dtype in zip(noise(step, rank, SHAPES), _dtypes(), strict=True)]
    grads[step % len(grads)] = None
    return grads


def _dtypes() -> list[torch.dtype]:
    return [dtype for dtype, shapes in BLOCKS for _ in shapes]


def _train(model: Any, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        model(_grads(step, rank)).backward()
        torch_ext.clip_grad_norm_(optimizer, 20.0)
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the whole weights, on every rank."""
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def _on_host(optimizer: Any) -> list[int]:
    """Returns the positions of the parameters whose state is on the host."""
    return [i for i, p in enumerate(optimizer._states.all_params()) if p in optimizer._states.host._states]


def _loaded(rank: int, world: int, strategy: str) -> None:
    """Writes constants to all weights; steps with zero gradients must leave them."""
    for overlap, remainders, fraction, steps in itertools.product((True, False), (False, True), FRACTIONS, (0, 3)):
        with host_parts.copying("late" if overlap else "prompt"):
            model, optimizer = _make(strategy, overlap, remainders, fraction, betas=(0.0, 0.999), weight_decay=0.0)
            _train(model, optimizer, range(steps), rank if strategy != NONE else 0)
            for i, p in enumerate(model.parameters()):
                data = p.data.to_local() if isinstance(p, DTensor) else p.data
                data.fill_(0.37 + i)  # no version counter sees this
            for _ in range(2):  # also in a second step, when a master that was not resynced would come back
                model(
                    [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(SHAPES, _dtypes(), strict=True)]
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
                for i, weight in enumerate(_whole(model)):
                    case = (strategy, overlap, remainders, fraction, steps, i)
                    assert bits([weight]) == bits([torch.full_like(weight, 0.37 + i)]), case
            assert bool(_on_host(optimizer)) == (fraction > 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_D1_D2_D3_constant_weights_loaded_are_what_is_stepped_from(strategy: str) -> None:
    """Steps have zero gradients and no weight decay, so a failure means that a step started from an old master."""
    ranks.run(2, _loaded, strategy, limit=120.0)


def _trained(rank: int, world: int, strategy: str, remainders: bool) -> None:
    """Trains with each fraction: weights and states must have the same bits, and a half must be on the host at 0.5."""
    found, shares = [], []
    for fraction in FRACTIONS:
        with host_parts.copying("late"):
            model, optimizer = _make(strategy, True, remainders, fraction)
            _train(model, optimizer, range(6), rank)
            state = optimizer.consolidate_state_dict(to=None)["state"]
            logical = [{key: bits([torch.as_tensor(state[i][key])]) for key in state[i]} for i in sorted(state)]
            found.append((bits(_whole(model)), logical))
            at_rest = optimizer._states.host._states.values()
            shares.append(sum(t.nbytes for s in at_rest for key, t in s.items() if key not in ("step", "checksum")))
            if strategy in ("no_shard", "optim_grads_params"):
                chosen = [None] * world
                torch.distributed.all_gather_object(chosen, _on_host(optimizer))
                assert chosen[0] == chosen[1] or strategy == FULLY
    assert found[1] == found[0] and found[2] == found[0]
    assert shares[0] == 0 and 0.3 * shares[2] < shares[1] < 0.7 * shares[2]


@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_training_has_the_same_bits_for_every_fraction(strategy: str, remainders: bool) -> None:
    ranks.run(2, _trained, strategy, remainders, limit=120.0)


def _moved(rank: int, world: int) -> None:
    """Moves a checkpoint from 0.5 on the host under one strategy to all, or half, under another."""
    for first, second, fraction in (
        ("optim", "no_shard", 1.0),
        ("no_shard", "optim_grads", 0.5),
        (FULLY, "optim", 1.0),
    ):
        model, optimizer = _make(first, True, False, 0.5)
        _train(model, optimizer, range(3), rank)
        saved, weights = optimizer.consolidate_state_dict(to=None), _whole(model)
        resumed, other = _make(second, True, False, fraction)
        _train(resumed, other, range(30, 31), rank)
        other.load_state_dict(saved)
        with torch.no_grad():
            for p, weight in zip(resumed.parameters(), weights, strict=True):
                p.copy_(weight)
        again = other.consolidate_state_dict(to=None)
        for i, entry in saved["state"].items():
            for key, value in entry.items():
                assert bits([torch.as_tensor(value)]) == bits([torch.as_tensor(again["state"][i][key])]), (
                    first,
                    i,
                    key,
                )
        _train(resumed, other, range(3, 5), rank)


def test_D4_checkpoints_move_between_fractions_and_strategies() -> None:
    ranks.run(2, _moved, limit=120.0)


def _early(rank: int, world: int, strategy: str) -> None:
    """With step_in_backward, buckets that have a part on the host are left to step()."""
    found = []
    for in_backward, fraction in ((False, 0.0), (True, 0.0), (True, 0.3), (True, 1.0)):
        policy = torch_ext.load_policy(BF16, override_ddp_config={"bucket_size": 9000, "step_in_backward": in_backward})
        model = torch_ext.parallelize(Mixed(), policy, strategy=strategy)
        optimizer = torch_ext.AdamW(model.parameters(), lr=1e-2, policy=policy, offload_fraction=fraction)
        for step in range(5):
            grads = [g.to(dtype) for g, dtype in zip(noise(step, rank, SHAPES), _dtypes(), strict=True)]
            model(grads).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(bits(_whole(model)))
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_steps_in_backward_leave_the_host_part_to_step(strategy: str) -> None:
    ranks.run(2, _early, strategy, limit=120.0)
