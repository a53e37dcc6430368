"""A parameter that is frozen on one rank only must be an error on every rank that names both."""

import os
from typing import Any

import pytest
import ranks
import torch
from gradients import Given, policy
from ranks import Died
from strategies import STRATEGIES
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES = [(4,), (200,), (3,)]


def _ones() -> list[torch.Tensor]:
    return [torch.ones(s) for s in SHAPES]


def _freezes(rank: int, world: int, strategy: str, which: str, unused: bool) -> list[str]:
    """Freezes the parameter on rank 1 only, thaws it, then freezes it on every rank. Returns each backward's error."""
    chosen = policy(bucket_size=1, overlap_grad_reduce=True)
    model: Any = torch_ext.parallelize(Given(SHAPES), chosen, strategy=strategy, find_unused_parameters=unused)
    said = []
    for step in range(4):
        if step in (1, 2):
            model.get_parameter(which).requires_grad_(rank != 1 or step == 2)
        if step == 3:  # legal, as it is on every rank
            model.get_parameter(which).requires_grad_(False)
        try:
            model(_ones()).backward()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        model.zero_grad()
    return said


@pytest.mark.parametrize("unused", [False, True], ids=["", "unused count as zero"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "optim_grads_params"])
def test_it_is_named_on_every_rank(strategy: str, unused: bool) -> None:
    wanted = "the ranks train different parameters: 'p0' is frozen on rank 1 and trainable on ranks 0, 2. "
    answers = ranks.run(3, _freezes, strategy, "p0", unused)
    assert answers[0] == answers[1] == answers[2]
    before, frozen, *after = answers[0]
    assert before == "" and frozen.startswith(wanted)
    if strategy != "optim_grads_params":  # FSDP2's exchange cannot go on after the error
        assert after == ["", ""], "alike everywhere: nothing is wrong"


def _frozen_later(rank: int, world: int) -> None:
    """Its gradient came in an earlier micro-batch, on one rank only, before every rank froze it."""
    model: Any = torch_ext.parallelize(Given(SHAPES), policy(), strategy="no_shard", find_unused_parameters=True)
    first: list[Any] = _ones()
    if rank == 1:
        first[0] = None
    with model.no_sync():
        model(first).backward()
    model.p0.requires_grad_(False)
    model(_ones()).backward()
    assert model.p0.grad.eq(0.5).all() and model.p1.grad.eq(2).all()


def test_what_came_before_it_was_frozen_everywhere_counts() -> None:
    ranks.run(2, _frozen_later)


def _under_ddp(rank: int, world: int) -> list[str]:
    """Freezes a parameter on rank 1 in a DDP model with our hook; returns the errors."""
    model: Any = DistributedDataParallel(Given(SHAPES))
    torch_ext.register_comm_hook(model, policy())
    for _ in range(3):  # until after the second forward, whose errors are DDP's own
        model.zero_grad()
        model(_ones()).backward()
    said = []
    for _ in range(2):
        model.zero_grad()
        model.module.p0.requires_grad_(rank != 1)
        with pytest.raises(RuntimeError) as raised:
            model(_ones()).backward()
        said.append(str(raised.value))
    return said


def test_under_ddp_with_our_hook_it_is_named_on_every_rank_within_the_timeout() -> None:
    answers = ranks.run(3, _under_ddp, timeout=3.0)
    for rank, messages in enumerate(answers):
        for message in messages:
            assert "forward of a DistributedDataParallel on rank 1: 'p0' frozen since it was made" in message
            assert rank == 1 or "no rank is lost" in message


def _thawed(rank: int, world: int) -> None:
    """A forward with the frozen parameter raises, and announces it to the other ranks. Training goes on after thawing.

    When rank 1 is lost later, the error must not be the announced one any more."""
    model: Any = DistributedDataParallel(Given(SHAPES))
    torch_ext.register_comm_hook(model, policy())
    for step in range(3):
        model.zero_grad()
        model.module.p0.requires_grad_(step != 1)
        if step == 1:
            with pytest.raises(RuntimeError, match="'p0' frozen since it was made"):
                model(_ones())
            with torch.no_grad():
                model(_ones())
        else:
            model(_ones()).backward()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="rank 1 did not respond"):
        model(_ones()).backward()
    os._exit(0)


def test_a_rank_that_goes_on_takes_its_word_back() -> None:
    assert ranks.outcomes(2, _thawed) == [Died(0), Died(0)]
