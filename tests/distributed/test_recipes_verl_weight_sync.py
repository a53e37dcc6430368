"""docs/recipes/verl_weight_sync.md: its entries, gathered and loaded as verl does, give the rollout the weights."""

from typing import Any

import ranks
import recipes
import torch
import torch.distributed as dist
import weight_formats_rebuilt as theirs
from gradients import BF16, Given, noise

import torch_ext

SHAPES: list[Any] = [(3, 5), (700,), (16, 130)]


class VerlsEngine:
    """verl's engine, as far as the checkpoint engine uses it."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        self.module, self.optimizer = module, optimizer

    def get_per_tensor_param_delta_shard(self, **_: Any) -> Any:
        raise NotImplementedError  # verl's own implementation, which needs snapshots


def _gathered(entries: Any) -> dict[str, tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """Returns by parameter the changes of all ranks, as rank 0 puts them together; all ranks yield the same entries."""
    found: dict[str, Any] = {}
    for slots, dtype, counts, indices, values, group in entries:
        assert getattr(torch, dtype) == values.dtype and counts.tolist() == [indices.numel()] == [values.numel()]
        pieces: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(pieces, (slots, indices, values), group=group)
        assert all(piece[0] == slots for piece in pieces)
        ((name, shape),) = slots
        found[name] = (shape, torch.cat([p[1] for p in pieces]), torch.cat([p[2] for p in pieces]))
    return found


def _synced(rank: int, world: int) -> list[bool]:
    """Trains three steps and syncs after each; returns whether the rollout's weights are the model's."""
    recipe = recipes.run("verl_weight_sync", 0, {})
    torch.manual_seed(3)
    model: Any = Given(SHAPES, BF16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    rollout = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = torch_ext.load_policy(BF16)
    torch_ext.parallelize(model, policy, strategy="optim_grads_params")
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-4, policy=policy)
    engine = type("Engine", (recipe["WithoutSnapshots"], VerlsEngine), {})(model, optimizer)
    engine.prime_delta_snapshots()
    equal = []
    for step in range(3):
        model(noise(step, rank, SHAPES, BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        entries, config = engine.get_per_tensor_param_delta_shard()
        assert config is None
        for name, (shape, indices, values) in _gathered(entries).items():
            assert indices.unique().numel() == indices.numel()
            theirs.load_masked(rollout, name, shape, indices, values)
        equal += [torch.equal(rollout[name], p.full_tensor()) for name, p in model.named_parameters()]
    return equal


def test_what_changed_reaches_the_rollout() -> None:
    for equal in ranks.run(2, _synced):
        assert len(equal) == 3 * len(SHAPES) and all(equal)
