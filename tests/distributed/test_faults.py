"""What differs, is missing or is not finite on one rank must be the same error on every rank (F5, F6, E7)."""

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import strategies
import torch
import torch.distributed as dist
from gradients import BF16, FP32, Given, gradients, policy
from strategies import STRATEGIES
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES = [(4,), (200,), (3,)]


def _parallel(strategy: str, model: Any = None, chosen: Any = None, **options: Any) -> Any:
    """Makes a model parallel; by default the one of SHAPES, one bucket for each parameter."""
    chosen = policy(bucket_size=1, overlap_grad_reduce=True) if chosen is None else chosen
    return torch_ext.parallelize(Given(SHAPES) if model is None else model, chosen, strategy=strategy, **options)


def _ones() -> list[torch.Tensor]:
    return [torch.ones(s) for s in SHAPES]


def _all_one(model: Any) -> bool:
    """Whether all elements of every gradient that this rank has are 1."""
    return all(grad is not None and bool(grad.eq(1).all()) for grad in gradients(model))


# -- ranks that differ (F6) ---------------------------------------------------------------------------------------


def _other_model(rank: int, strategy: str) -> Any:
    return _parallel(strategy, Given([(4,), (200 + (rank == 1),)]))


def _other_dtype(rank: int, strategy: str) -> Any:
    return _parallel(strategy, Given(SHAPES, BF16 if rank == 1 else FP32), policy(BF16, FP32))


def _other_policy(rank: int, strategy: str) -> Any:
    return _parallel(strategy, None, policy(FP32, FP32, BF16 if rank == 1 else FP32))


def _other_cap(rank: int, strategy: str) -> Any:
    return _parallel(strategy, None, policy(bucket_size=1000 if rank == 1 else 1, overlap_grad_reduce=True))


def _other_factor(rank: int, strategy: str) -> Any:
    return _parallel(strategy, gradient_divide_factor=1.0 + rank)


def _one_parameter_more(rank: int, strategy: str) -> Any:
    return _parallel(strategy, Given(SHAPES + [(1,)] * (rank == 1)))


def _other_frozen(rank: int, strategy: str) -> Any:
    model = Given(SHAPES)
    model.p1.requires_grad_(rank != 1)
    return _parallel(strategy, model)


def _other_buffer(rank: int, strategy: str) -> Any:
    model = Given(SHAPES)
    model.register_buffer("mask", torch.zeros(3 + (rank == 1)))
    return _parallel(strategy, model)


def _other_strategy(rank: int, strategy: str) -> Any:
    following = STRATEGIES[(STRATEGIES.index(strategy) + 1) % len(STRATEGIES)]
    return _parallel(following if rank == 1 else strategy)


def _hook_other_policy(rank: int, strategy: str) -> Any:
    return torch_ext.register_comm_hook(
        DistributedDataParallel(Given(SHAPES)), policy(FP32, FP32, BF16 if rank == 1 else FP32)
    )


DIFFERENCES: dict[str, tuple[Callable[[int, str], Any], list[str]]] = {
    "shape": (_other_model, ["rank 1 has 'p1 [201]", "rank 0 has 'p1 [200]"]),
    "dtype": (_other_dtype, ["rank 1 has 'p0 [4] torch.bfloat16", "rank 0 has 'p0 [4] torch.float32"]),
    "policy": (_other_policy, ["bfloat16 on the wire", "float32 on the wire"]),
    "bucket size": (_other_cap, ["rank 1 has '1 bucket over", "rank 0 has '3 buckets over"]),
    "divide factor": (_other_factor, ["ranks 1, 2 differ from rank 0", "divide by 2.0", "divide by 1.0"]),
    "a parameter more": (_one_parameter_more, ["rank 1 has 'p3 [1] torch.float32"]),
    "frozen": (_other_frozen, ["rank 1 has 'p1 [200] torch.float32, trainable False'"]),
    "buffer": (_other_buffer, ["rank 1 has 'mask [4]", "rank 0 has 'mask [3]"]),
    "strategy": (_other_strategy, ["rank 1 has 'strategy ", "rank 0 has 'strategy "]),
    "comm hook": (_hook_other_policy, ["register_comm_hook: rank 1 differs", "bfloat16 on the wire"]),
}


def _differ(rank: int, world: int, strategy: str) -> dict[str, str]:
    """Causes each difference and returns the errors. The group must work afterwards."""
    messages = {}
    for name, (make, _) in DIFFERENCES.items():
        with pytest.raises(RuntimeError) as raised:
            make(rank, strategy)
        dist.barrier()  # the group still works
        messages[name] = str(raised.value)
    model = _parallel(strategy)
    model(_ones()).backward()
    assert _all_one(model)
    return messages


@pytest.fixture(scope="module")
def differences() -> dict[str, list[dict[str, str]]]:
    return strategies.run(3, _differ)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_f6_ranks_that_differ_get_a_message(what: str, strategy: str, differences: Any) -> None:
    messages = [answer[what] for answer in differences[strategy]]
    assert len(set(messages)) == 1
    for word in [*DIFFERENCES[what][1], "nothing was exchanged"]:
        assert word in messages[0]


def _fails_on_one(rank: int, world: int, strategy: str) -> str:
    """On rank 1 a parameter has a gradient: parallelize must raise everywhere, and leave every model as it was."""
    model = Given(SHAPES)
    if rank == 1:
        model.p2.grad = torch.ones(3)
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(RuntimeError) as raised:
        _parallel(strategy, model)
    assert type(model) is Given and model.p0.grad is None
    assert addresses == [p.data_ptr() for p in model.parameters()]
    return str(raised.value)


def test_f6_an_error_on_one_rank_stops_all() -> None:
    for first, second, third in strategies.run(3, _fails_on_one).values():
        assert first == third == f"parallelize: stopped on all ranks, because on rank 1: {second}"
        assert second == "parameter 'p2' has a gradient: call zero_grad() before parallelize"


# -- gradients that do not come (F5) ------------------------------------------------------------------------------


def _skips_a_layer(rank: int, world: int, strategy: str) -> str:
    """Rank 1's backward leaves a parameter out. The next backward must be right."""
    model = _parallel(strategy)
    model(_ones()).backward()
    model.zero_grad()
    grads: list[Any] = _ones()
    if rank == 1:
        grads[1] = None
    with pytest.raises(RuntimeError) as raised:
        model(grads).backward()
    model.zero_grad()
    model(_ones()).backward()
    assert _all_one(model), "nothing is left of the failure"
    return str(raised.value)


def test_f5_a_gradient_that_never_came_is_named_on_every_rank() -> None:
    for messages in strategies.run(3, _skips_a_layer).values():
        assert len(set(messages)) == 1
        assert messages[0].startswith("no gradient is ready for 'p1' on rank 1.")
        assert "find_unused_parameters=True" in messages[0]


def _came_earlier(rank: int, world: int, strategy: str) -> Any:
    """The last backward leaves out a parameter that got its gradient in no_sync."""
    model = _parallel(strategy)
    last: list[Any] = _ones()
    last[1] = None
    with model.no_sync():
        model(_ones()).backward()
    if strategy == "optim_grads":  # it reduces every backward, so it checks every backward
        with pytest.raises(RuntimeError, match="no gradient is ready for 'p1' on rank 0; 'p1' on rank 1"):
            model(last).backward()
        return None
    model(last).backward()
    grads: list[Any] = gradients(model)
    return [float(grad.mean()) if grad.numel() else None for grad in grads]


def test_f5_a_gradient_of_an_earlier_microbatch_has_come() -> None:
    answers = strategies.run(2, _came_earlier)
    assert answers["no_shard"] == [[2.0, 1.0, 2.0]] * 2
    assert answers["optim"] == [[2.0, 1.0, 2.0], [None, 1.0, None]]


def _zeroed_earlier(rank: int, world: int, strategy: str) -> None:
    """A gradient that came before zero_grad(), of the model or the optimizer, must not count afterwards."""
    model = _parallel(strategy)
    optimizer = torch_ext.AdamW(model.parameters())
    last: list[Any] = _ones()
    last[1] = None
    for zero in (model.zero_grad, optimizer.zero_grad):
        with model.no_sync():
            model(_ones()).backward()
        zero()
        with pytest.raises(RuntimeError, match="no gradient is ready for 'p1' on rank 0; 'p1' on rank 1"):
            model(last).backward()
        zero()


def test_f5_a_gradient_that_was_zeroed_has_not_come() -> None:
    strategies.run(2, _zeroed_earlier)


class _Doubler(torch.autograd.Function):
    """Runs a nested backward into the same parameter, as reentrant checkpointing of a shared layer does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        ctx.p = p
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.p.sum().backward()
        return grad, None


def _twice(rank: int, world: int, strategy: str) -> None:
    """A parameter gets a second gradient in one backward, which must raise and name it."""
    model = _parallel(strategy)
    later = _Doubler.apply(torch.ones((), requires_grad=True), model.p2)
    with pytest.raises(RuntimeError, match="p2"):
        (model(_ones()) + later).backward()


def test_f5_a_second_gradient_in_one_backward_is_named() -> None:
    strategies.run(2, _twice)


# -- gradients that are not finite (E7) ------------------------------------------------------------------------------


def _nan_on_one(rank: int, world: int, strategy: str, overlap: bool) -> str:
    """Rank 1 has NaN and infinity: backward and step() must raise until zero_grad(), then training must go on."""
    checked = policy(bucket_size=1, overlap_grad_reduce=overlap, check_for_nan_in_grad=True)
    model = _parallel(strategy, None, checked)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    grads = _ones()
    if rank == 1:
        grads[1][7] = float("nan")
        grads[0][2] = float("inf")
    with pytest.raises(RuntimeError) as raised:
        model(grads).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"step\(\) with gradients that have NaN or Inf \('p1'.*zero_grad"):
            optimizer.step()
    assert not any(p.any() for p in model.parameters()), "nothing was stepped"
    optimizer.zero_grad()
    model(_ones()).backward()
    assert _all_one(model)
    optimizer.step()
    assert torch.allclose(model.p1, torch.full((200,), -0.1))
    return str(raised.value)


def _nan_in_hook(rank: int, world: int, overlap: bool) -> str:
    checked = policy(bucket_size=1, overlap_grad_reduce=overlap, check_for_nan_in_grad=True)
    model: Any = DistributedDataParallel(Given(SHAPES))
    torch_ext.register_comm_hook(model, checked)
    grads = _ones()
    if rank == 1:
        grads[1][7] = float("nan")
    with pytest.raises(RuntimeError) as raised:
        model(grads).backward()
    return str(raised.value)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one bucket"])
def test_e7_a_gradient_that_is_not_finite_stops_every_rank(overlap: bool) -> None:
    for messages in [*strategies.run(2, _nan_on_one, overlap).values(), ranks.run(2, _nan_in_hook, overlap)]:
        assert len(set(messages)) == 1
        assert "NaN or Inf before communication" in messages[0] and "on rank 1" in messages[0]
        assert "'p" in messages[0]


def _repaired(rank: int, world: int) -> None:
    """Under no_shard any optimizer's zero_grad counts, and gradients that were made finite can be stepped."""
    model = _parallel("no_shard", None, policy(bucket_size=1, overlap_grad_reduce=True, check_for_nan_in_grad=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repairs: list[Callable[[], Any]] = [
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: model.p1.grad.nan_to_num_(0.0),
    ]
    for repair in repairs:
        grads = _ones()
        grads[1][7] = float("nan")
        with pytest.raises(RuntimeError, match="NaN or Inf before communication"):
            model(grads).backward()
        with pytest.raises(RuntimeError, match="NaN or Inf"):
            optimizer.step()
        repair()
        optimizer.step()
        model.zero_grad()


def test_e7_gradients_that_were_made_finite_are_stepped() -> None:
    ranks.run(2, _repaired)
