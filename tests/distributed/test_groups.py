"""Several models, several process groups, groups side by side, a world of one rank, a restart with another number of
ranks, and groups that are destroyed before the models."""

import itertools
import tempfile
from typing import Any

import pytest
import ranks
import strategies
import torch
import torch.distributed as dist
from gradients import Given, noise, on_all_ranks, policy
from strategies import STRATEGIES

import torch_ext

SHAPES: list[Any] = [(4,), (300,), (0,), (2, 70), (129,)]
STEPS = 3


def _parallel(strategy: str, model: Any = None, **options: Any) -> Any:
    chosen = policy(bucket_size=200, overlap_grad_reduce=True)
    return torch_ext.parallelize(Given(SHAPES) if model is None else model, chosen, strategy=strategy, **options)


class Reference:
    """The same models on one rank, stepped with the mean of the members' gradients by one optimizer."""

    def __init__(self, n_models: int) -> None:
        self.models: list[Any] = [Given(SHAPES) for _ in range(n_models)]
        self.optimizer = torch_ext.AdamW([p for m in self.models for p in m.parameters()], lr=0.1)

    def step(self, step: int, members: list[list[int]], clip: float | None = None) -> float:
        """Takes a step and returns the norm. members: for each model, the ranks whose gradients are averaged."""
        for m, (model, ranks_of) in enumerate(zip(self.models, members, strict=True)):
            each = [noise(step + 100 * m, r, SHAPES) for r in ranks_of]
            for p, grads in zip(model.parameters(), zip(*each, strict=True), strict=True):
                p.grad = torch.stack(grads).sum(0) / len(ranks_of)
        norm = torch_ext.clip_grad_norm_(self.optimizer, clip) if clip is not None else 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def check(self, models: list[Any]) -> None:
        """The weights must be close to the reference's."""
        for theirs, ours in zip(self.models, models, strict=True):
            for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
                assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), name


# -- several models -----------------------------------------------------------------------------------------------


def _several_models(rank: int, world: int) -> None:
    """Two models in one process, under each pair of strategies: on one group or two, with one optimizer or two."""
    other = dist.new_group()
    for (first, second), apart in itertools.product(itertools.product(STRATEGIES, repeat=2), (False, True)):
        models = [_parallel(first), _parallel(second, process_group=other if apart else None)]
        params = [list(model.parameters()) for model in models]
        optimizers = [torch_ext.AdamW(each, lr=0.1) for each in (params if apart else [params[0] + params[1]])]
        reference = Reference(2)
        all_ranks = [list(range(world))] * 2
        for step in range(STEPS):
            losses = [model(noise(step + 100 * m, rank, SHAPES)) for m, model in enumerate(models)]
            if step == 1:  # both in one backward
                (losses[0] + losses[1]).backward()
            else:
                losses[1].backward()
                losses[0].backward()
            norm = reference.step(step, all_ranks, None if apart else 3.0)
            if not apart:
                assert float(torch_ext.clip_grad_norm_(optimizers[0], 3.0)) == pytest.approx(norm, rel=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        reference.check(models)


def test_several_models_in_one_process() -> None:
    ranks.run(2, _several_models)


def _one_after_the_other(rank: int, world: int, strategy: str) -> None:
    """Creates models one after the other, each gone before the next; the last four live at the same time."""
    alive = []
    for i in range(12):
        model = _parallel(strategy)
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
        model(noise(i, rank, SHAPES)).backward()
        optimizer.step()
        expected = Reference(1)
        expected.step(i, [list(range(world))])
        expected.check([model])
        if i >= 8:
            alive.append((model, optimizer))
    for model, optimizer in alive:
        optimizer.zero_grad()
        model(noise(0, rank, SHAPES)).backward()
        optimizer.step()


def test_many_models_one_after_the_other() -> None:
    strategies.run(2, _one_after_the_other)


# -- groups of ranks ----------------------------------------------------------------------------------------------


def _two_by_two(rank: int, world: int, strategy: str) -> list[Any]:
    """One model over all ranks and one over pairs of them, like experts; an optimizer for each, or one for both."""
    pairs = [[0, 2], [1, 3]]
    groups = [dist.new_group(pair) for pair in pairs]
    members = [pairs[rank % 2], list(range(world))]
    with pytest.raises(RuntimeError, match="not a member of the process group"):
        _parallel(strategy, process_group=groups[1 - rank % 2])
    for together in (False, True):
        models = [_parallel(strategy, process_group=groups[rank % 2]), _parallel(strategy)]
        params = [list(model.parameters()) for model in models]
        optimizers = [torch_ext.AdamW(each, lr=0.1) for each in ([params[0] + params[1]] if together else params)]
        references = [Reference(1), Reference(1)]
        for step in range(STEPS):
            (models[0](noise(step, rank, SHAPES)) + models[1](noise(step + 100, rank, SHAPES))).backward()
            for m, reference in enumerate(references):
                norm = reference.step(step + 100 * m, [members[m]], None if together else 5.0)
                if not together:
                    assert float(torch_ext.clip_grad_norm_(optimizers[m], 5.0)) == pytest.approx(norm, rel=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model, reference in zip(models, references, strict=True):
            reference.check([model])
    return [[p.tolist() for p in model.parameters()] for model in models]


def test_pairs_of_ranks_beside_all_of_them() -> None:
    for answers in strategies.run(4, _two_by_two, limit=60.0).values():
        experts = [answer[0] for answer in answers]
        assert experts[0] == experts[2] != experts[1] == experts[3]
        assert all(answer[1] == answers[0][1] for answer in answers)


def _data_parallel_pairs(rank: int, world: int, strategy: str) -> Any:
    """Two pairs of ranks that have nothing in common. One pair raises in a backward; the other must not notice."""
    pairs = [[0, 1], [2, 3]]
    groups = [dist.new_group(pair) for pair in pairs]
    model = _parallel(strategy, process_group=groups[rank // 2])
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    reference = Reference(1)
    for step in range(STEPS):
        if rank < 2 and step == 1:
            handle = model.p3.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(noise(9, rank, SHAPES)).backward()
            handle.remove()
            optimizer.zero_grad()
        model(noise(step, rank, SHAPES)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(step, [pairs[rank // 2]])
    reference.check([model])
    return [p.tolist() for p in model.parameters()]


def test_pairs_of_ranks_that_know_nothing_of_each_other() -> None:
    for answers in strategies.run(4, _data_parallel_pairs, limit=60.0).values():
        assert answers[0] == answers[1] != answers[2] == answers[3]


def _alone(rank: int, world: int, strategy: str) -> None:
    """Trains in a group of one rank, next to others; then in a group of all ranks, with the same module."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    model = _parallel(strategy, process_group=alone)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    reference = Reference(1)
    for step in range(STEPS):
        with model.no_sync():
            model([g * 0 for g in noise(step, rank, SHAPES)]).backward()
        model(noise(step, rank, SHAPES)).backward()
        assert model.wire_bytes() == 0
        optimizer.step()
        optimizer.zero_grad()
        reference.step(step, [[rank]])
    reference.check([model])
    assert world == 1 or len({str(w) for w in on_all_ranks(model.p0.tolist())}) == world
    del optimizer
    _parallel(strategy, model)
    assert len({str(w) for w in on_all_ranks(model.p0.tolist())}) == 1, "rank 0's weights"
    model(noise(7, rank, SHAPES)).backward()
    torch_ext.AdamW(model.parameters(), lr=0.1).step()
    assert len({str(w) for w in on_all_ranks([p.tolist() for p in model.parameters()])}) == 1


@pytest.mark.parametrize("world", [1, 3])
def test_a_group_of_one(world: int) -> None:
    strategies.run(world, _alone)


# -- another world ------------------------------------------------------------------------------------------------


def _trains(rank: int, world: int, strategy: str, weights: Any, first: int) -> list[Any]:
    """Takes two steps from the weights of an earlier run, if given. Returns the weights."""
    model = Given(SHAPES)
    if weights is not None:
        with torch.no_grad():
            for p, values in zip(model.parameters(), weights[strategy], strict=True):
                p.copy_(torch.tensor(values).reshape(p.shape))
    reference = Reference(1)
    reference.models[0].load_state_dict(model.state_dict())
    _parallel(strategy, model)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    for step in range(first, first + 2):
        model(noise(step, rank, SHAPES)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(step, [list(range(world))])
    reference.check([model])
    return [p.tolist() for p in model.state_dict().values()]


def test_a_restart_with_another_number_of_ranks() -> None:
    weights = None
    for i, world in enumerate((2, 3, 1, 2)):
        answers = strategies.run(world, _trains, weights, 10 * i)
        for by_rank in answers.values():
            assert all(answer == by_rank[0] for answer in by_rank)
        weights = {strategy: by_rank[0] for strategy, by_rank in answers.items()}


# -- groups that end ----------------------------------------------------------------------------------------------


def _destroyed(rank: int, world: int, strategy: str) -> None:
    """A parallelized model keeps its group, so training goes on. What needs a new group raises until there is one."""
    folder = on_all_ranks(tempfile.mkdtemp() if rank == 0 else "")[0]
    model = _parallel(strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    reference = Reference(1)
    for step in range(STEPS):
        loss = model(noise(step, rank, SHAPES))
        if step == 1:
            dist.destroy_process_group()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(step, [list(range(world))])
    reference.check([model])
    del optimizer
    with pytest.raises(RuntimeError, match="init_process_group"):
        _parallel(strategy, model)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    _parallel(strategy, model)
    model(noise(0, rank, SHAPES)).backward()
    torch_ext.AdamW(model.parameters(), lr=0.1).step()


def test_a_process_group_that_is_destroyed_early() -> None:
    strategies.run(2, _destroyed)


def _destroyed_in_backward(rank: int, world: int, strategy: str) -> None:
    """Raises in a backward while buckets are being sent. ranks.run checks that the process exits with status 0."""
    model = _parallel(strategy)
    model(noise(0, rank, SHAPES)).backward()
    model.zero_grad()
    model.p1.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(noise(0, rank, SHAPES)).backward()


def _ends_at_once(rank: int, world: int) -> None:
    for strategy in STRATEGIES:
        _destroyed_in_backward(rank, world, strategy)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)


def test_a_process_that_ends_after_an_exception() -> None:
    ranks.run(2, _ends_at_once)


def _mixed_norms(rank: int, world: int, chosen: tuple[str, str]) -> None:
    """One optimizer for parameters of all four ranks and of pairs: a common norm would differ between the pairs."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dense = torch_ext.parallelize(Given([300]), policy(), strategy=chosen[0])
    experts = torch_ext.parallelize(Given([300]), policy(), strategy=chosen[1], process_group=pairs[rank // 2])
    optimizer = torch_ext.AdamW([*dense.parameters(), *experts.parameters()])
    for step in range(2):
        for model in (dense, experts):
            model(noise(step, rank, [300])).backward()
        if step == 0:
            optimizer.step()  # without a norm both can be stepped
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"over ranks \[.*\] and \[.*clip each"):
        torch_ext.clip_grad_norm_(optimizer, 1.0)
    apart = [torch_ext.AdamW(model.parameters()) for model in (dense, experts)]
    assert all(torch_ext.clip_grad_norm_(one, 1.0) > 0 for one in apart)


def _all_mixed_norms(rank: int, world: int) -> None:
    for chosen in (("no_shard", "no_shard"), ("optim", "optim"), ("no_shard", "optim_grads")):
        _mixed_norms(rank, world, chosen)


def test_one_norm_over_different_groups_is_refused() -> None:
    ranks.run(4, _all_mixed_norms)
