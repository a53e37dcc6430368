"""Weights that several ranks publish together: each element is published once, without a message between the ranks."""

import copy
from typing import Any

import pytest
import ranks
import strategies
import torch
from gradients import BF16, Given, noise
from torch import nn

import torch_ext

SHAPES: list[Any] = [(3, 5), (7000,), (129,), (16, 130), (1,), (50, 70)]
FULL = "optim_grads_params"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = Given(SHAPES, BF16)
        self.frozen = nn.Parameter(torch.ones(3000, dtype=BF16), requires_grad=False)

    def forward(self, grads: Any) -> torch.Tensor:
        return self.given(grads)  # type: ignore[no-any-return]


def _build(strategy: str | None, **options: Any) -> tuple[Any, Any]:
    """Returns a model with a frozen parameter under the strategy, and its optimizer."""
    torch.manual_seed(7)
    model: Any = Layers()
    with torch.no_grad():
        for p in model.given.parameters():
            p.copy_(torch.randn(p.shape))
    policy = torch_ext.load_policy(BF16)
    if strategy is not None:
        torch_ext.parallelize(model, policy, strategy=strategy)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return model, torch_ext.AdamW(named, lr=1e-4, policy=policy, **options)


def _steps(rank: int, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(noise(step, rank, SHAPES, BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: Any) -> dict[str, bytes]:
    """Returns the bytes of all weights, by name. Collective under FSDP2."""
    found = {}
    for name, p in model.named_parameters():
        value: Any = p.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def _published(rank: int, world: int, strategy: str, states: str, fraction: float) -> Any:
    """Returns this rank's deltas and the weights for four versions, and its part of the full message."""
    model, optimizer = _build(strategy, states=states, offload_fraction=fraction)
    publisher = torch_ext.WeightPublisher(model, optimizer)
    found = [(publisher.publish(), _whole(model))]
    for version in range(3):
        _steps(rank, model, optimizer, range(version * 2, version * 2 + 1 + version % 2))
        if version == 1:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
        found.append((publisher.publish(), _whole(model)))
    return found, publisher.full()


def _follows(answers: list[Any], start: dict[str, torch.Tensor]) -> None:
    """An engine that applies the ranks' parts in any order, and one that applies them merged, must have all versions'
    bits."""
    tensors, merged = copy.deepcopy(start), copy.deepcopy(start)
    one, other = torch_ext.WeightSubscriber(tensors), torch_ext.WeightSubscriber(merged)
    versions = [rank_versions for rank_versions, _ in answers]
    for version in range(len(versions[0])):
        parts = [rank_versions[version][0] for rank_versions in versions]
        expected = versions[0][version][1]
        one.apply(reversed(parts), "full" if version % 2 else "touched")
        other.apply(torch_ext.merge_deltas(parts))
        for found in (tensors, merged):
            bits = {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in found.items()}
            assert [name for name in bits if bits[name] != expected[name]] == []
        if len(parts) > 1:
            with pytest.raises((ValueError, RuntimeError)):
                one.apply(parts[:1])
    late = {name: torch.zeros_like(t) for name, t in start.items()}
    torch_ext.WeightSubscriber(late).apply([full for _, full in answers], "full")
    assert all(torch.equal(late[name], tensors[name]) for name in late)


def _start() -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in _build(None)[0].named_parameters()}


@pytest.mark.parametrize(("states", "fraction"), [("bf16", 0.0), ("8bit", 0.5)])
def test_parts_of_all_ranks_together_are_the_weights(states: str, fraction: float) -> None:
    found = strategies.run(2, _published, states, fraction, chosen=[*strategies.STRATEGIES, FULL])
    for answers in found.values():
        _follows(answers, _start())
        sizes = [len(full) for _, full in answers]
        assert max(sizes) < 0.7 * sum(sizes)  # the ranks share the work


def test_three_ranks() -> None:
    found = strategies.run(3, _published, "bf16", 0.0, chosen=["no_shard", "optim", FULL])
    for answers in found.values():
        _follows(answers, _start())


def _under_ddp(rank: int, world: int) -> Any:
    """Publishes a DDP model's weights; returns what `_published` returns."""
    model, _ = _build(None)
    ddp = nn.parallel.DistributedDataParallel(model)
    named = [(name, p) for name, p in ddp.named_parameters() if p.requires_grad]
    optimizer = torch_ext.AdamW(named, lr=1e-4)
    publisher = torch_ext.WeightPublisher(ddp, optimizer)
    _steps(rank, ddp, optimizer, range(2))
    return [(publisher.publish(), _whole(model))], publisher.full()


def test_under_ddp() -> None:
    _follows(ranks.run(2, _under_ddp), _start())


def _at_another_step(rank: int, world: int) -> Any:
    """Rank 1 publishes one version less; returns its parts."""
    model, optimizer = _build("no_shard")
    publisher = torch_ext.WeightPublisher(model, optimizer)
    parts = []
    for step in range(2):
        _steps(rank, model, optimizer, range(step, step + 1))
        if not (step == 0 and rank == 1):  # rank 1 does not publish the first version
            parts.append(publisher.publish())
    return parts


def test_ranks_at_different_steps_are_noticed_where_parts_are_applied() -> None:
    first, second = ranks.run(2, _at_another_step)
    tensors = _start()
    subscriber = torch_ext.WeightSubscriber(tensors)
    before = {name: t.clone() for name, t in tensors.items()}
    for parts in ([first[1], second[0]], [first[0]], [first[0], first[0]], [first[0], first[1], second[0]]):
        with pytest.raises((ValueError, RuntimeError)):
            subscriber.apply(parts)
    assert all(torch.equal(before[name], t) for name, t in tensors.items())
    assert subscriber.version == 0


def _relaid(rank: int, world: int) -> str:
    """Parallelizes under another strategy after the publisher was created; returns the error of publish()."""
    model, optimizer = _build("no_shard")
    publisher = torch_ext.WeightPublisher(model, optimizer)
    torch_ext.parallelize(model, torch_ext.load_policy(BF16), strategy="optim")
    with pytest.raises(RuntimeError) as raised:
        publisher.publish()
    return str(raised.value)


def test_a_model_that_is_cut_anew() -> None:
    assert all("is sharded differently than when" in message for message in ranks.run(2, _relaid))


def _by_columns(rank: int, world: int) -> str:
    """Returns the error for a parameter that is sharded by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    with pytest.raises(ValueError) as raised:
        torch_ext.WeightPublisher(model, torch_ext.AdamW(model.named_parameters()))
    return str(raised.value)


def test_parameters_that_are_cut_by_columns() -> None:
    assert all("'weight' is sharded as" in message for message in ranks.run(2, _by_columns))
