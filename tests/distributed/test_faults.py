"""What goes wrong on one rank is a message on every rank (F5, F6, E7), and training goes on where it can."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, FP32, Given, noise, policy
from ranks import Died, Raised
from torch.nn.parallel import DistributedDataParallel

import torch_ext
from torch_ext import _agreement, _library

SHAPES = [(4,), (200,), (3,)]


def _parallel(**options: Any) -> Any:
    return torch_ext.parallelize(Given(SHAPES), policy(bucket_size=1, overlap_grad_reduce=True), **options)


def _ones() -> list[torch.Tensor]:
    return [torch.ones(s) for s in SHAPES]


# -- ranks that differ (F6) ---------------------------------------------------------------------------------------


def _other_model(rank: int) -> Any:
    return torch_ext.parallelize(Given([(4,), (200 + (rank == 1),)]), policy())


def _other_dtype(rank: int) -> Any:
    return torch_ext.parallelize(Given(SHAPES, BF16 if rank == 1 else FP32), policy(BF16, FP32))


def _other_policy(rank: int) -> Any:
    return torch_ext.parallelize(Given(SHAPES), policy(FP32, FP32, BF16 if rank == 1 else FP32))


def _other_cap(rank: int) -> Any:
    return torch_ext.parallelize(Given(SHAPES), policy(bucket_size=1000 if rank == 1 else 1, overlap_grad_reduce=True))


def _other_factor(rank: int) -> Any:
    return _parallel(gradient_divide_factor=1.0 + rank)


def _one_parameter_more(rank: int) -> Any:
    return torch_ext.parallelize(Given(SHAPES + [(1,)] * (rank == 1)), policy())


def _other_frozen(rank: int) -> Any:
    model = Given(SHAPES)
    model.p1.requires_grad_(rank != 1)
    return torch_ext.parallelize(model, policy())


def _other_buffer(rank: int) -> Any:
    model = Given(SHAPES)
    model.register_buffer("mask", torch.zeros(3 + (rank == 1)))
    return torch_ext.parallelize(model, policy())


def _other_version(rank: int) -> Any:
    if rank == 1:
        real = _library.function
        _agreement._library.function = lambda name, *a, **k: (
            (lambda: (9 << 16) + (1 << 8)) if name == "tx_version" else real(name, *a, **k)
        )
    return torch_ext.parallelize(Given(SHAPES), policy())


def _hook_other_policy(rank: int) -> Any:
    return torch_ext.register_comm_hook(
        DistributedDataParallel(Given(SHAPES)), policy(FP32, FP32, BF16 if rank == 1 else FP32)
    )


DIFFERENCES = [
    pytest.param(_other_model, ["rank 1 has 'p1 [201]", "rank 0 has 'p1 [200]"], id="shape"),
    pytest.param(_other_dtype, ["rank 1 has 'p0 [4] torch.bfloat16", "rank 0 has 'p0 [4] torch.float32"], id="dtype"),
    pytest.param(_other_policy, ["bfloat16 on the wire", "float32 on the wire"], id="policy"),
    pytest.param(_other_cap, ["rank 1 has '1 bucket over", "rank 0 has '3 buckets over"], id="bucket size"),
    pytest.param(
        _other_factor, ["ranks 1, 2 differ from rank 0", "divide by 2.0", "divide by 1.0"], id="divide factor"
    ),
    pytest.param(_one_parameter_more, ["rank 1 has 'p3 [1] torch.float32"], id="a parameter more"),
    pytest.param(_other_frozen, ["rank 1 has 'p1 [200] torch.float32, trainable False'"], id="frozen"),
    pytest.param(_other_buffer, ["rank 1 has 'mask [4]", "rank 0 has 'mask [3]"], id="buffer"),
    pytest.param(_other_version, ["rank 1 has 'torch_ext 9.1.0'"], id="library version"),
    pytest.param(_hook_other_policy, ["register_comm_hook: rank 1 differs", "bfloat16 on the wire"], id="comm hook"),
]


def _differ(rank: int, world: int, make: Callable[[int], Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        make(rank)
    dist.barrier()  # the group is as good as before
    return str(raised.value)


@pytest.mark.parametrize(("make", "words"), DIFFERENCES)
def test_f6_ranks_that_differ_get_a_message(make: Callable[[int], Any], words: list[str]) -> None:
    messages = ranks.run(3, _differ, make)
    assert len(set(messages)) == 1
    for word in [*words, "nothing was exchanged"]:
        assert word in messages[0]


def _fails_on_one(rank: int, world: int) -> str:
    model = Given(SHAPES)
    if rank == 1:
        model.p2.grad = torch.ones(3)
    with pytest.raises(RuntimeError) as raised:
        torch_ext.parallelize(model, policy())
    assert type(model) is Given and model.p0.grad is None
    return str(raised.value)


def test_f6_an_error_on_one_rank_stops_all() -> None:
    first, second, third = ranks.run(3, _fails_on_one)
    assert first == third == f"parallelize: stopped on all ranks, because on rank 1: {second}"
    assert second == "parameter 'p2' has a gradient: call zero_grad() before parallelize"


# -- gradients that do not come (F5) ------------------------------------------------------------------------------


def _skips_a_layer(rank: int, world: int) -> str:
    model = _parallel()
    model(_ones()).backward()
    model.zero_grad()
    grads: list[Any] = _ones()
    if rank == 1:
        grads[1] = None
    with pytest.raises(RuntimeError) as raised:
        model(grads).backward()
    model.zero_grad()
    model(_ones()).backward()  # nothing is left of the failure
    assert model.p1.grad.tolist() == [1.0] * 200
    return str(raised.value)


def test_f5_a_gradient_that_never_came_is_named_on_every_rank() -> None:
    messages = ranks.run(3, _skips_a_layer)
    assert len(set(messages)) == 1
    assert messages[0].startswith("no gradient came for 'p1' on rank 1.")
    assert "find_unused_parameters=True" in messages[0]


def _came_earlier(rank: int, world: int) -> list[float]:
    model = _parallel()
    with model.no_sync():
        model(_ones()).backward()
    last: list[Any] = _ones()
    last[1] = None
    model(last).backward()
    return [float(p.grad.mean()) for p in model.parameters()]


def test_f5_a_gradient_of_an_earlier_microbatch_has_come() -> None:
    assert ranks.run(2, _came_earlier) == [[2.0, 1.0, 2.0]] * 2


def _twice(rank: int, world: int) -> None:
    class Doubler(torch.autograd.Function):
        """A nested backward into the same parameter, as reentrant checkpointing of a shared layer does."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            ctx.p = p
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            with torch.enable_grad():
                ctx.p.sum().backward()
            return grad, None

    model = _parallel()
    later = Doubler.apply(torch.ones((), requires_grad=True), model.p2)
    with pytest.raises(RuntimeError, match="p2"):
        (model(_ones()) + later).backward()


def test_f5_a_second_gradient_in_one_backward_is_named() -> None:
    ranks.run(2, _twice)


# -- not a number (E7) --------------------------------------------------------------------------------------------


def _nan_on_one(rank: int, world: int, how: str, overlap: bool) -> str:
    checked = policy(bucket_size=1, overlap_grad_reduce=overlap, check_for_nan_in_grad=True)
    model: Any
    if how == "hook":
        model = DistributedDataParallel(Given(SHAPES))
        torch_ext.register_comm_hook(model, checked)
    else:
        model = torch_ext.parallelize(Given(SHAPES), checked)
    grads = _ones()
    if rank == 1:
        grads[1][7] = float("nan")
        grads[0][2] = float("inf")
    with pytest.raises(RuntimeError) as raised:
        model(grads).backward()
    if how != "hook":
        model.zero_grad()
        model(_ones()).backward()
        assert model.p1.grad.tolist() == [1.0] * 200
    return str(raised.value)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one bucket"])
@pytest.mark.parametrize("how", ["no_shard", "hook"])
def test_e7_a_gradient_that_is_not_finite_stops_every_rank(how: str, overlap: bool) -> None:
    messages = ranks.run(2, _nan_on_one, how, overlap)
    assert len(set(messages)) == 1
    assert "NaN or Inf before communication" in messages[0] and "on rank 1" in messages[0]
    assert ("'p1'" if how == "no_shard" else "'p") in messages[0], "the first of the bucket that left first"


# -- ranks that are lost ------------------------------------------------------------------------------------------


def _dies(rank: int, world: int, how: str) -> None:
    model: Any
    if how == "hook":
        # Two buckets after the first backward: the rank dies with one of them sent.
        model = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0001)
        torch_ext.register_comm_hook(model, policy())
        parameter = model.module.p0
    else:
        model = _parallel()
        parameter = model.p0
    for _ in range(2):
        model.zero_grad()
        model(_ones()).backward()
    if rank == 1:
        parameter.register_hook(lambda grad: os._exit(7))
    model(_ones()).backward()


@pytest.mark.parametrize("how", ["no_shard", "hook"])
def test_a_rank_that_dies_in_backward_is_a_message_on_the_others(how: str) -> None:
    answers = ranks.outcomes(3, _dies, how)
    assert answers[1] == Died(7)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised) and answer.kind == "RuntimeError"
        assert "did not come" in answer.message or "cannot be reached" in answer.message
        assert "gradients of cycle 2" in answer.message or "end of gradient cycle 2" in answer.message


def _lags(rank: int, world: int) -> str:
    model = _parallel()
    model(_ones()).backward()
    model.zero_grad()
    if rank == 1:
        time.sleep(6.0)
    with pytest.raises(RuntimeError) as raised:
        model(_ones()).backward()
    if rank != 1:
        with pytest.raises(RuntimeError, match="cannot be reduced any more"):
            model(_ones()).backward()
    return str(raised.value)


def test_a_rank_that_lags_beyond_the_timeout_is_named() -> None:
    first, _, third = ranks.run(3, _lags, timeout=2.0)
    for message in (first, third):
        assert "rank 1 did not come" in message and "Timed out" in message
        assert "cycle 1, bucket 0 of 3 ('p2')" in message


def _never_parallelizes(rank: int, world: int) -> str:
    if rank == 2:
        time.sleep(4.0)
        return ""
    with pytest.raises(RuntimeError) as raised:
        _parallel()
    return str(raised.value)


def test_a_rank_that_does_not_call_parallelize_is_named() -> None:
    first, second, _ = ranks.run(3, _never_parallelizes, timeout=2.0)
    for message in (first, second):
        assert "parallelize: comparing the ranks' plans: rank 2 did not come" in message


# -- exceptions in user code --------------------------------------------------------------------------------------


class _Oops(Exception):
    pass


def _goes_on(rank: int, world: int, where: str) -> list[float]:
    model = _parallel()

    def fail(grad: torch.Tensor) -> None:
        raise _Oops

    if where == "between micro-batches, on one rank":
        try:
            with model.no_sync():
                model(_ones()).backward()
                if rank == 1:
                    raise _Oops
        except _Oops:
            pass
    else:  # in backward, with one bucket sent and two not
        handle = model.p1.register_hook(fail)
        with pytest.raises(_Oops):
            model(_ones()).backward()
        handle.remove()
    model.zero_grad()
    for step in range(2):
        model.zero_grad()
        model(noise(step, rank, SHAPES)).backward()
    assert not model.p0.grad.isnan().any()
    return model.p1.grad.tolist()


@pytest.mark.parametrize("where", ["between micro-batches, on one rank", "in backward, on all ranks"])
def test_training_goes_on_after_an_exception(where: str) -> None:
    first, second = ranks.run(2, _goes_on, where)
    expected = (noise(1, 0, SHAPES)[1] + noise(1, 1, SHAPES)[1]) / 2
    assert first == second == expected.tolist()


def _user_error(rank: int, world: int) -> None:
    model = _parallel()
    if rank == 1:
        model.p1.register_hook(lambda grad: (_ for _ in ()).throw(_Oops("in user code")))
    model(_ones()).backward()


def test_an_exception_on_one_rank_ends_the_others_with_a_message() -> None:
    first, second = ranks.outcomes(2, _user_error)
    assert isinstance(second, Raised) and second.kind == "_Oops"
    assert isinstance(first, Raised) and ("rank 1 did not come" in first.message or "rank 1 cannot be" in first.message)


# -- steps and changes that would lose gradients ------------------------------------------------------------------


def _steps_unreduced(rank: int, world: int) -> None:
    model = _parallel()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch_ext.AdamW(model.parameters(), lr=0.1)]
    for optimizer in optimizers:
        model.zero_grad()
        before = model.p0.detach().clone()
        with model.no_sync():
            model(_ones()).backward()
        with pytest.raises(RuntimeError, match="'p0'.*no_sync"):
            optimizer.step()
        assert torch.equal(model.p0, before)
        model(_ones()).backward()
        optimizer.step()
        assert not torch.equal(model.p0, before)
        model.zero_grad()
        with model.no_sync():
            model(_ones()).backward()
        model.zero_grad()
        optimizer.step()  # nothing to lose


def test_e8_step_with_gradients_of_no_sync_is_an_error() -> None:
    ranks.run(2, _steps_unreduced)


def _second_backward(rank: int, world: int) -> None:
    """Two losses, one after the other, on one graph: what DDP gives."""
    stock, ours = DistributedDataParallel(Given(SHAPES)), _parallel()
    for model in (stock, ours):
        loss = model(noise(5, rank, SHAPES))
        loss.backward(retain_graph=True)
        if model is ours:
            loss.backward()
        else:
            stock(noise(5, rank, SHAPES)).backward()
    for a, b in zip(stock.module.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_e5_a_second_backward_without_a_step_loses_nothing() -> None:
    ranks.run(2, _second_backward)
