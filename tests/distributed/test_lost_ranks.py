"""A rank that is lost, late, or raises alone must be an error on every other rank, within the time-out."""

import datetime
import os
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import Given, policy
from ranks import Died, Raised
from strategies import SHARDED, STRATEGIES
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES = [(4,), (200,), (3,)]


def _parallel(strategy: str, **options: Any) -> Any:
    chosen = policy(bucket_size=1, overlap_grad_reduce=True)
    return torch_ext.parallelize(Given(SHAPES), chosen, strategy=strategy, **options)


def _ones() -> list[torch.Tensor]:
    return [torch.ones(s) for s in SHAPES]


# -- ranks that are killed -------------------------------------------------------------------------------------------


def _dies_in_backward(rank: int, world: int, how: str) -> None:
    """Rank 1 dies in its third backward."""
    model: Any
    if how == "hook":
        # Two buckets after the first backward: the rank dies with one of them sent.
        model = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0001)
        torch_ext.register_comm_hook(model, policy())
        parameter = model.module.p0
    else:
        model = _parallel(how)
        parameter = model.p0
    for _ in range(2):
        model.zero_grad()
        model(_ones()).backward()
    if rank == 1:
        parameter.register_hook(lambda grad: os._exit(7))
    model(_ones()).backward()


@pytest.mark.parametrize("how", [*STRATEGIES, "hook"])
def test_a_rank_that_dies_in_backward_is_a_message_on_the_others(how: str) -> None:
    answers = ranks.outcomes(3, _dies_in_backward, how)
    assert answers[1] == Died(7)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised) and answer.kind == "RuntimeError"
        assert "did not respond" in answer.message or "cannot be reached" in answer.message
        assert "gradients of cycle 2" in answer.message or "end of gradient cycle 2" in answer.message


# -- ranks that are late ---------------------------------------------------------------------------------------------

TIMEOUT = 1.5
LATER = 1.0 + len(STRATEGIES) * 1.5 * TIMEOUT  # after a time-out, asking who is alive takes up to half of one


def _with_own_group(strategy: str) -> Any:
    """Returns a model on a process group of its own, so that its failure does not affect the next model."""
    return _parallel(strategy, process_group=dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT)))


def _lags_in_backward(rank: int, world: int) -> dict[str, str]:
    """Rank 1 comes too late to a backward of each strategy; returns the others' errors."""
    models = {strategy: _with_own_group(strategy) for strategy in STRATEGIES}
    for model in models.values():
        model(_ones()).backward()
        model.zero_grad()
    if rank == 1:
        time.sleep(LATER)
    messages = {}
    for strategy, model in models.items():
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError) as raised:
            model(_ones()).backward()
        messages[strategy] = str(raised.value)
        with pytest.raises(RuntimeError, match="an exchange that failed"):
            optimizer.step()
        assert not any(p.any() for p in model.parameters())
        with pytest.raises(RuntimeError, match="cannot be reduced any more"):
            model(_ones()).backward()
    return messages


def test_a_rank_that_lags_in_backward_beyond_the_timeout_is_named() -> None:
    first, _, third = ranks.run(3, _lags_in_backward)
    for message in (*first.values(), *third.values()):
        assert "rank 1 did not respond" in message and "Timed out" in message
        assert "cycle 1, bucket 0 of 3 ('p2')" in message


def _lags_in_step(rank: int, world: int) -> dict[str, str]:
    """Rank 1 comes too late to a step of each sharded strategy; returns the others' errors."""
    models = {strategy: _with_own_group(strategy) for strategy in SHARDED}
    optimizers = {strategy: torch_ext.AdamW(model.parameters(), lr=0.1) for strategy, model in models.items()}
    for model, optimizer in zip(models.values(), optimizers.values(), strict=True):
        for last in (False, True):  # a first step also compares the ranks' states
            model(_ones()).backward()
            if not last:
                optimizer.step()
                optimizer.zero_grad()
    if rank == 1:
        time.sleep(LATER)
    messages = {}
    for strategy, optimizer in optimizers.items():
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        messages[strategy] = str(raised.value)
    return messages


def test_a_rank_that_lags_in_step_beyond_the_timeout_is_named() -> None:
    first, _, third = ranks.run(3, _lags_in_step)
    for message in (*first.values(), *third.values()):
        assert "weights of bucket 2 of 3 ('p0'): rank 1 did not respond" in message and "Timed out" in message


def _never_parallelizes(rank: int, world: int, how: str) -> str:
    """Rank 2 does not call parallelize, or ranks 0 and 1 call it in a group without rank 2. Returns the error."""
    subgroup = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=TIMEOUT))
    if how == "another world":
        if rank < 2:
            return str(_parallel("optim", process_group=subgroup)(_ones()).backward())
    elif rank == 2:
        time.sleep(LATER)
        return ""
    with pytest.raises(RuntimeError) as raised:
        _parallel("optim")
    return str(raised.value)


def test_a_rank_that_does_not_call_parallelize_is_named() -> None:
    first, second, _ = ranks.run(3, _never_parallelizes, "does not", timeout=TIMEOUT)
    for message in (first, second):
        assert "parallelize: comparing the ranks' plans: rank 2 did not respond" in message


def test_a_rank_in_another_world_is_told_who_did_not_come() -> None:
    *_, third = ranks.run(3, _never_parallelizes, "another world", timeout=TIMEOUT)
    assert "parallelize: comparing the ranks' plans: rank" in third and "did not respond" in third


# -- the store ends ------------------------------------------------------------------------------------------------


def _rank_0_keeps_the_store(rank: int, world: int, behind: float) -> None:
    """Rank 0 has the store, and exits as soon as it knows who is lost. Rank 2 asks `behind` seconds later."""
    host, port = "127.0.0.1", [0]
    store = dist.TCPStore(host, 0, world, True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        port = [store.port]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore(host, port[0], world, False)
    dist.barrier()
    dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    if rank == 1:
        time.sleep(3 * TIMEOUT)
        os._exit(0)
    time.sleep(behind * (rank == 2))
    _parallel("optim")


@pytest.mark.parametrize("behind", [0.0, 0.3, 1.2])  # the last: rank 0 has ended before rank 2 asks
def test_a_lost_rank_is_named_where_the_store_ends_with_the_first_that_was_told(behind: float) -> None:
    first, _, third = ranks.outcomes(3, _rank_0_keeps_the_store, behind)
    for answer in (first, third):
        assert isinstance(answer, Raised)
        assert "parallelize: comparing the ranks' plans: rank 1 did not respond" in answer.message


# -- an exception on one rank -------------------------------------------------------------------------------------


class _Oops(Exception):
    pass


def _raises_alone(rank: int, world: int, strategy: str) -> None:
    """Rank 1's user code raises in its second backward."""
    model = _parallel(strategy)
    model(_ones()).backward()
    model.zero_grad()
    if rank == 1:
        model.p1.register_hook(lambda grad: (_ for _ in ()).throw(_Oops("in user code")))
    model(_ones()).backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exception_on_one_rank_ends_the_others_with_a_message(strategy: str) -> None:
    first, second = ranks.outcomes(2, _raises_alone, strategy)
    assert isinstance(second, Raised) and second.kind == "_Oops"
    assert isinstance(first, Raised) and (
        "rank 1 did not respond" in first.message or "rank 1 cannot be" in first.message
    )
