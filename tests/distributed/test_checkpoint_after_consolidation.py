"""Right after consolidate_state_dict, the next save through torch.distributed.checkpoint must have the whole state,
whichever function gives it the state."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from checkpointed import EIGHT_BIT, made, steps, whole
from torch.distributed.checkpoint.state_dict import get_state_dict

WAYS = ["objects", "state dicts", "get_state_dict"]


def _given(way: str, model: Any, optimizer: Any) -> dict[str, Any]:
    """Returns what is given to dcp.save or dcp.load, by one of WAYS."""
    if way == "objects":
        return {"model": model, "optimizer": optimizer}
    if way == "state dicts":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": state, "optimizer": optimizer_state}


def _saves(rank: int, world: int, strategy: str, folder: str) -> None:
    """Consolidates to rank 0, 1 or all, saves, and loads in place into another optimizer: the states must be equal."""
    receivers = itertools.cycle((0, 1, None, 0))
    for way, config, to in zip([*WAYS, *WAYS], [None] * 3 + [EIGHT_BIT] * 3, receivers, strict=False):
        at = f"{folder}/{way}, {to}, {config is None}"
        model, optimizer = made(strategy, config)
        steps(model, optimizer, range(2))
        expected = whole(optimizer)
        optimizer.consolidate_state_dict(to=to)
        dcp.save(_given(way, model, optimizer), checkpoint_id=at)
        other_model, other = made(strategy, config, seed=8)
        steps(other_model, other, range(1))
        dcp.load(_given(way, other_model, other), checkpoint_id=at)  # in place
        assert whole(other) == expected, at


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_the_next_save_after_consolidate_state_dict_works(strategy: str, tmp_path: Path) -> None:
    ranks.run(2, _saves, strategy, str(tmp_path))


def _alone(rank: int, world: int, folder: str) -> None:
    """Rank 0 saves without the others what it consolidated; another strategy loads it into what rank 1 consolidated."""
    model, optimizer = made("optim_grads")
    steps(model, optimizer, range(2))
    expected = whole(optimizer)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
    torch.distributed.barrier()
    other_model, other = made("optim", seed=8)
    steps(other_model, other, range(1))
    # Loading goes into whole tensors, which only rank 1 has: it must load all of them.
    other.consolidate_state_dict(to=1)
    dcp.load({"optimizer": other}, checkpoint_id=folder)
    other_model.load_state_dict(model.state_dict())
    assert whole(other) == expected


def test_one_rank_alone_may_save_what_it_consolidated(tmp_path: Path) -> None:
    ranks.run(2, _alone, str(tmp_path))
