"""`.grad` when a backward begins that may not reach a parameter: with the result of an earlier reduction, assigned or
dropped by the user, or zeros on one rank and None on another."""

from collections.abc import Callable
from typing import Any

import pytest
import strategies
import torch
from gradients import BF16, FP32, Given, bits, gradient, gradients, noise, on_all_ranks, policy

import torch_ext

SHAPES: list[Any] = [(300,), (500,), (200,)]
SMALL: list[Any] = [(4,), (1000,)]


# -- an earlier reduction -----------------------------------------------------------------------------------------

# By name: dtype of the wire, gradient_divide_factor.
TRAVELS = {"fp32": ("fp32", None), "fp32, a sum / 5": ("fp32", 5.0), "bf16": ("bf16", None), "8 bits": ("fp8", None)}


def _unused(rank: int, world: int, strategy: str) -> dict[str, bool]:
    """Returns for each wire whether an unused parameter's gradient keeps its bits."""
    found = {}
    for name, (wire, factor) in TRAVELS.items():
        chosen = policy(FP32, FP32, wire, bucket_size=1)
        model: Any = torch_ext.parallelize(
            Given(SMALL), chosen, strategy=strategy, find_unused_parameters=True, gradient_divide_factor=factor
        )
        used, once = noise(1, rank, SMALL)
        model([used, once]).backward()
        before = gradient(model, model.p1)
        assert before is not None and before.any()
        for _ in range(2):
            model([used, None]).backward()
        now = gradient(model, model.p1)
        assert now is not None
        found[name] = bits([now]) == bits([before])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_gradient_that_nobody_adds_to_stays_as_it_was(world: int) -> None:
    for strategy, answers in strategies.run(world, _unused).items():
        assert answers == [dict.fromkeys(TRAVELS, True)] * world, strategy


def _used_on_one(rank: int, world: int, strategy: str) -> tuple[float, float]:
    """The second backward reaches a parameter on rank 0 only. Returns the smallest and the largest gradient element."""
    model: Any = torch_ext.parallelize(
        Given(SMALL), policy(bucket_size=1), strategy=strategy, find_unused_parameters=True
    )
    ones = [torch.ones(s) for s in SMALL]
    model(ones).backward()
    model([ones[0], 4 * ones[1] if rank == 0 else None]).backward()
    found = gradient(model, model.p1)
    assert found is not None
    return float(found.min()), float(found.max())


def test_what_one_rank_adds_to_is_no_longer_what_it_was() -> None:
    for strategy, answers in strategies.run(2, _used_on_one).items():
        assert answers == [(3.0, 3.0)] * 2, strategy


def _twice(rank: int, world: int, strategy: str) -> list[list[bytes]]:
    """Returns the weights after cycles of three reductions, for each wire and bucket size."""
    found = []
    for wire in ("fp32", "bf16", "fp8"):
        for size in (1, 10**6):
            model: Any = torch_ext.parallelize(
                Given(SHAPES), policy(FP32, FP32, wire, bucket_size=size), strategy=strategy
            )
            optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
            for cycle in range(2):
                for seed in (1, 2, 3):
                    model(noise(10 * cycle + seed, rank, SHAPES)).backward()
                torch_ext.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(bits([p.detach() for p in model.parameters()]))
    return found


def test_sums_of_several_reductions_have_the_bits_of_every_bucket_size() -> None:
    found = strategies.run(2, _twice)
    for strategy, (first, second) in found.items():
        assert first == second, strategy
        assert first[::2] == first[1::2], strategy
    # Both add the sums of several reductions in fp32 on the shard.
    assert found["optim"] == found["optim_grads"]


def _minus_zero(rank: int, world: int, strategy: str) -> list[bool]:
    """Parameters get a first gradient of -0 while another one has a sum from before; returns whether the sign stays."""
    signs = []
    for size in (1, 10**6):
        model: Any = torch_ext.parallelize(
            Given(SHAPES), policy(bucket_size=size), strategy=strategy, find_unused_parameters=True
        )
        minus = [torch.full(s, -0.0) for s in SHAPES]
        model([torch.ones(SHAPES[0]), None, None]).backward()
        model([torch.ones(SHAPES[0]), *minus[1:]]).backward()
        signs += [bool(g.signbit().all()) for g in gradients(model)[1:] if g is not None]
    return signs


def test_minus_zero_stays_beside_a_sum_from_before() -> None:
    for answer in strategies.run(2, _minus_zero, chosen=["optim"])["optim"]:
        assert answer == [True] * 4


def _of_a_micro_batch(rank: int, world: int, strategy: str) -> list[float]:
    """A parameter that is used under no_sync() only, after another cycle: the reducing backward must reduce it."""
    model: Any = torch_ext.parallelize(
        Given(SMALL), policy(bucket_size=1), strategy=strategy, find_unused_parameters=True
    )
    ones = [torch.ones(s) for s in SMALL]
    for drop in (model.zero_grad, lambda: model.zero_grad(set_to_none=False)):
        model(ones).backward()
        drop()
        with model.no_sync():
            model([ones[0], (1.0 + 2 * rank) * ones[1]]).backward()
        model([ones[0], None]).backward()
        found = gradient(model, model.p1)
        assert found is not None
    return sorted(set(found.tolist()))


def test_what_came_under_no_sync_is_reduced_in_every_cycle() -> None:
    for strategy, answers in strategies.run(2, _of_a_micro_batch).items():
        assert answers == [[2.0], [2.0]], strategy


# -- gradients that are assigned or dropped ------------------------------------------------------------------------


def _assigned(rank: int, world: int, strategy: str, factor: float | None) -> list[list[float]]:
    """Assigns `.grad` on each rank and runs a backward; returns the reduced values."""
    found = []
    model: Any = torch_ext.parallelize(
        Given([256, 4]),
        policy(bucket_size=1),
        strategy=strategy,
        gradient_divide_factor=factor,
        find_unused_parameters=True,
    )
    used = torch.full((256,), 1.0 + rank)
    for drop in (model.zero_grad, lambda: None):
        drop()
        model.p0.grad = torch.full((256,), 10.0 * (1 + rank))
        model([used, torch.ones(4)]).backward()
        found.append(sorted(set(gradients(model)[0].tolist())))  # type: ignore[union-attr]
    model.p0.grad = torch.full((256,), 10.0 * (1 + rank))  # the next backward does not reach p0
    model([None, torch.ones(4)]).backward()
    found.append(sorted(set(gradients(model)[0].tolist())))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_grad_that_somebody_assigned_is_this_ranks_own_in_every_cycle(factor: float | None) -> None:
    found = strategies.run(2, _assigned, factor)
    times = 1.0 if factor is None else 2.0
    for strategy in ("no_shard", "optim"):
        assert found[strategy] == [[[16.5 * times], [16.5 * times], [15.0 * times]]] * 2, strategy
    # optim_grads adds sums to its shard, in which the value from before stays without zero_grad().
    assert found["optim_grads"] == [[[16.5 * times], [33.0 * times], [48.0 * times]]] * 2


def _added_to_and_then(rank: int, world: int, strategy: str) -> dict[str, Any]:
    """Acts between a micro-batch that adds to an earlier reduction and the backward that reduces both."""
    found: dict[str, Any] = {}
    for what in ("nothing", "zero_grad", "to zeros", "assigned", "dropped", "dropped and unused"):
        model: Any = torch_ext.parallelize(
            Given([256, 4]), policy(bucket_size=1), strategy=strategy, find_unused_parameters=True
        )
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
        ones = [torch.ones(256), torch.zeros(4)]
        model(ones).backward()
        with model.no_sync():
            model(ones).backward()
        if what == "zero_grad":
            model.zero_grad()
        elif what == "to zeros":
            model.zero_grad(set_to_none=False)
        elif what == "assigned":
            model.p0.grad = torch.full((256,), 5.0)
        elif what.startswith("dropped"):
            model.p0.grad = None
        model([None if what.endswith("unused") else ones[0], ones[1]]).backward()
        grad = gradients(model)[0]
        norm = float(torch_ext.clip_grad_norm_(optimizer, 1e6))
        found[what] = None if grad is None else sorted(set(grad.tolist())), norm
    return found


def test_what_becomes_of_a_micro_batch_beside_an_earlier_reduction() -> None:
    for strategy, answers in strategies.run(2, _added_to_and_then, chosen=["no_shard", "optim"]).items():
        for answer in answers:
            assert answer == {
                "nothing": ([3.0], 48.0),
                "zero_grad": ([1.0], 16.0),
                "to zeros": ([1.0], 16.0),
                "assigned": ([6.0], 96.0),
                "dropped": ([1.0], 16.0),
                "dropped and unused": (None, 0.0),
            }, strategy


def _behind_master_weights(rank: int, world: int, strategy: str) -> list[float]:
    """master_weights() makes parameters fp32 for a while, so autograd's nodes for them are created again."""
    model: Any = torch_ext.parallelize(
        Given([256, 4], BF16),
        policy(BF16, bucket_size=1),
        strategy=strategy,
        gradient_divide_factor=1.0,
        find_unused_parameters=True,
    )
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    ones = [torch.ones(256, dtype=BF16), torch.zeros(4, dtype=BF16)]
    model(ones).backward()
    optimizer.step()
    with optimizer.master_weights():
        pass
    with model.no_sync():
        model(ones).backward()
    model([None, ones[1]]).backward()
    grad = gradients(model)[0]
    assert grad is not None
    return sorted(set(grad.tolist()))


def test_a_micro_batch_beside_an_earlier_reduction_behind_master_weights() -> None:
    for strategy, answers in strategies.run(2, _behind_master_weights, chosen=["no_shard", "optim"]).items():
        assert answers == [[4.0], [4.0]], strategy


def _left_and_not_named(rank: int, world: int, strategy: str) -> str:
    """A parameter has a gradient from before and gets none now: that must be an error."""
    model: Any = torch_ext.parallelize(Given([4, 4]), policy(bucket_size=1), strategy=strategy)
    ones = [torch.ones(4)] * 2
    model(ones).backward()
    with pytest.raises(RuntimeError) as error:
        model([ones[0], None]).backward()
    return str(error.value)


def test_a_gradient_that_does_not_come_is_named_beside_one_from_before() -> None:
    for strategy, answers in strategies.run(2, _left_and_not_named).items():
        for answer in answers:
            assert answer.startswith("no gradient is ready for 'p1' on rank 0; 'p1' on rank 1."), strategy


def _p_grad(model: Any, _optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = None


DROPPED: dict[str, Callable[[Any, Any], None]] = {
    "model.zero_grad": lambda model, _: model.zero_grad(),
    "optimizer.zero_grad of torch": lambda _, optimizer: optimizer.zero_grad(),
    "p.grad = None": _p_grad,
}


def _dropped(rank: int, world: int, strategy: str) -> dict[str, Any]:
    """Drops the gradient of a micro-batch in several ways; afterwards it must count as missing."""
    found: dict[str, Any] = {}
    for how, drop in DROPPED.items():
        for unused in (True, False):
            model: Any = torch_ext.parallelize(
                Given([4, 4]), policy(bucket_size=1), strategy=strategy, find_unused_parameters=unused
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ones = [torch.ones(4)] * 2
            model(ones).backward()
            model.zero_grad()
            with model.no_sync():
                model(ones).backward()
            drop(model, optimizer)
            try:
                model([ones[0], None]).backward()
                found[f"{how}, {unused}"] = [g is None for g in gradients(model)]
            except RuntimeError as error:
                found[f"{how}, {unused}"] = str(error)[:41]
    return found


def test_a_gradient_that_was_dropped_has_not_come() -> None:
    for strategy, answers in strategies.run(2, _dropped, chosen=["no_shard", "optim"]).items():
        for answer in answers:
            for how in DROPPED:
                assert answer[f"{how}, True"] == [False, True], (strategy, how)
                assert answer[f"{how}, False"] == "no gradient is ready for 'p1' on rank 0; ", (strategy, how)


def _here_and_not_there(rank: int, world: int, strategy: str) -> tuple[Any, ...]:
    """zero_grad(set_to_none=False) leaves zeros on rank 0 and None on rank 1: all ranks must step alike."""
    model: Any = torch_ext.parallelize(
        Given([4, 4]), policy(bucket_size=1), strategy=strategy, find_unused_parameters=True
    )
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    ones = [torch.ones(4)] * 2
    model(ones).backward()
    optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        model([ones[0], ones[1] if rank == 0 else None]).backward()
    optimizer.zero_grad(set_to_none=False)
    model([ones[0], None]).backward()
    there = [g is not None for g in gradients(model)]
    optimizer.step()
    return there, on_all_ranks([p.tolist() for p in model.parameters()])


def test_zeros_on_one_rank_are_a_gradient_on_all_or_on_none() -> None:
    for strategy, answers in strategies.run(2, _here_and_not_there).items():
        (first, weights), (second, _) = answers
        assert first == second, strategy
        assert weights[0] == weights[1], strategy


# -- backwards outside the training loop ---------------------------------------------------------------------------


def _autograd_grad(rank: int, world: int, strategy: str) -> list[Any]:
    """Calls torch.autograd.grad on rank 0 only, between backwards: it must send nothing and change no gradient."""
    found: list[Any] = []
    for factor in (None, 1.0):
        for unused in (False, True):
            model: Any = torch_ext.parallelize(
                Given([4, 4]),
                policy(bucket_size=1),
                strategy=strategy,
                gradient_divide_factor=factor,
                find_unused_parameters=unused,
            )
            ones = [torch.ones(4)] * 2
            for _ in range(2):
                if rank == 0:  # alone, so any message would hang
                    grads = torch.autograd.grad(model(ones), list(model.parameters()))
                    assert all(bool(g.eq(1).all()) for g in grads)
                found.append(model.wire_bytes() if not found else None)
                model(ones).backward()
                found.append([g.max().item() for g in gradients(model) if g is not None and g.numel()])
                model.zero_grad()
    return found


def test_torch_autograd_grad_is_no_backward_of_the_loop() -> None:
    for strategy, (first, _) in strategies.run(2, _autograd_grad).items():
        assert first[0] == 0, strategy
        sums = [s for s in first if isinstance(s, list)]
        assert len(sums) == 8 and all(set(s) == {1.0} for s in sums[:4]) and all(set(s) == {2.0} for s in sums[4:])


# -- gradients that the reducer was not told of --------------------------------------------------------------------


class _Oops(Exception):
    pass


def _untold(rank: int, world: int, strategy: str, kept: bool) -> tuple[str, bool]:
    """A user's hook raises before ours is called: step() must raise and change no weight until zero_grad()."""
    model: Any = Given(SHAPES)
    raises = [False]

    def hook(_param: torch.Tensor) -> None:
        if raises[0]:
            raise _Oops

    model.p2.register_post_accumulate_grad_hook(hook)  # called before ours
    torch_ext.parallelize(model, policy(bucket_size=1), strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(noise(step, rank, SHAPES)).backward()
        optimizer.step()
        if step == 0 or not kept:
            optimizer.zero_grad()
    before = bits([p.detach() for p in model.parameters()])
    raises[0] = True
    with pytest.raises(_Oops):
        model(noise(9, rank, SHAPES)).backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    same = bits([p.detach() for p in model.parameters()]) == before
    raises[0] = False
    optimizer.zero_grad()
    model(noise(10, rank, SHAPES)).backward()
    optimizer.step()
    return str(error.value), same


@pytest.mark.parametrize("kept", [False, True], ids=["new", "beside an earlier reduction"])
def test_step_with_a_gradient_whose_own_hook_raised_is_an_error(kept: bool) -> None:
    for strategy, answers in strategies.run(2, _untold, kept).items():
        for message, same in answers:
            assert same, strategy
            assert message.startswith("step() with gradients that no rank has reduced (parameter 'p"), strategy
            assert kept or "'p2'" in message, strategy


# -- several uses of a parameter -----------------------------------------------------------------------------------


class _Twice(torch.nn.Module):
    """Uses its weight twice, with gradients a and b."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, dtype=BF16))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.weight * a).sum() + (self.weight * b).sum()


def _two_uses(rank: int, world: int, strategy: str) -> tuple[Any, ...]:
    """256 + 1 from two uses must be 257 with fp32 main gradients, and 256 in bf16."""
    model: Any = torch_ext.parallelize(_Twice(), policy(BF16, FP32, "fp32"), strategy=strategy)
    model(torch.full((4,), 256.0, dtype=BF16), torch.ones(4, dtype=BF16)).backward()
    grad = gradient(model, model.weight)
    assert grad is not None
    other: Any = torch_ext.parallelize(model, policy(BF16), strategy=strategy)  # bf16 again
    other(torch.full((4,), 256.0, dtype=BF16), torch.ones(4, dtype=BF16)).backward()
    narrow = gradient(other, other.weight)
    assert narrow is not None
    return set(grad.tolist()), set(narrow.tolist())


def test_what_several_uses_of_a_bf16_parameter_bring_is_added_up_in_main_grads_dtype() -> None:
    for strategy, answers in strategies.run(2, _two_uses).items():
        wide = set().union(*(wide for wide, _ in answers))
        narrow = set().union(*(narrow for _, narrow in answers))
        assert (wide, narrow) == ({257.0}, {256.0}), strategy
