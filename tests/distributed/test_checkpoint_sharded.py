"""Sharded optimizer states in torch's tools: copies, StateDictOptions, saves while training goes on."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from checkpointed import EIGHT_BIT, SHAPES, made, steps, whole
from gradients import BF16, FP32, Given, bits
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import torch_ext

# -- operations that need a whole tensor, of a state that is sharded

WHOLE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "state dict, saved": lambda model, optimizer, t: torch.save(optimizer.state_dict(), io.BytesIO()),
    "full_state_dict, saved": lambda model, optimizer, t: torch.save(
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)), io.BytesIO()
    ),
    "full_state_dict on the CPU, saved": lambda model, optimizer, t: [
        torch.save(value, io.BytesIO())
        for options in [StateDictOptions(full_state_dict=True, cpu_offload=True)]
        for value in [get_optimizer_state_dict(model, optimizer, options=options) or t]
    ],
    "arithmetic": lambda model, optimizer, t: t + 1,
    "numpy": lambda model, optimizer, t: t.numpy(),
    "a list": lambda model, optimizer, t: t.tolist(),
    "a collective": lambda model, optimizer, t: torch.distributed.broadcast(t, 0),
    "written by arithmetic": lambda model, optimizer, t: t.mul_(2),
    "copied into a whole one": lambda model, optimizer, t: torch.empty(t.shape).copy_(t),
}


def _whole_ones(rank: int, world: int) -> None:
    """Every operation that needs the whole tensor must raise, name it and suggest consolidate_state_dict."""
    model, optimizer = made("optim", EIGHT_BIT)
    steps(model, optimizer, range(1))
    before = whole(optimizer)
    for key in ("exp_avg", "master_param"):
        t = optimizer.state_dict()["state"][1][key]
        assert (t.shape, t.dtype) == ((700,), FP32)
        for what, do in WHOLE.items():
            with pytest.raises(RuntimeError, match=r"\w+ of 'p\d' .*\[\d+, \d+\).*consolidate_state_dict") as refusal:
                do(model, optimizer, t)
            assert what.endswith("saved") or f"{key} of 'p1' is sharded" in str(refusal.value), what
    assert whole(optimizer) == before


def test_whole_tensors_of_sharded_state_are_refused_by_name() -> None:
    ranks.run(2, _whole_ones)


# -- copies

COPIES: dict[str, Callable[[Any, Any], Any]] = {
    "as it is": lambda model, optimizer: optimizer.state_dict(),
    "deepcopy": lambda model, optimizer: copy.deepcopy(optimizer.state_dict()),
    "clones": lambda model, optimizer: _each(optimizer.state_dict(), torch.Tensor.clone),
    "detached": lambda model, optimizer: _each(optimizer.state_dict(), torch.Tensor.detach),
    "to the same dtype, copied": lambda model, optimizer: _each(
        optimizer.state_dict(), lambda t: t.to(t.dtype, copy=True)
    ),
    "copied into an empty one": lambda model, optimizer: _each(
        optimizer.state_dict(), lambda t: torch.empty_like(t).copy_(t)
    ),
    "copied into a new one": lambda model, optimizer: _each(
        optimizer.state_dict(), lambda t: t.new_empty(t.shape).copy_(t)
    ),
    "cpu_offload": lambda model, optimizer: get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(cpu_offload=True)
    ),
}


def _each(state_dict: dict[str, Any], do: Callable[[Any], Any]) -> dict[str, Any]:
    """Applies `do` to each tensor of the state dict."""
    state = {index: {key: do(value) for key, value in entry.items()} for index, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _copied(rank: int, world: int, config: dict[str, Any]) -> None:
    """Every kind of copy must load, and real copies must keep the old values while training goes on."""
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        model, optimizer = made(strategy, config)
        steps(model, optimizer, range(2))
        before = whole(optimizer)
        weights = copy.deepcopy(model.state_dict())
        copies = {way: take(model, optimizer) for way, take in COPIES.items()}
        for way, state_dict in copies.items():
            other_model, other = made(strategy, config, seed=8)
            other.load_state_dict(state_dict)
            other_model.load_state_dict(model.state_dict())
            assert whole(other) == before, (strategy, way)
        steps(model, optimizer, range(2, 4))
        model.load_state_dict(weights)
        for way in set(COPIES) - {"as it is", "detached", "cpu_offload"}:
            optimizer.load_state_dict(copies[way])
            assert whole(optimizer) == before, (strategy, way, "a copy is not what training goes on with")


@pytest.mark.parametrize("config", [{}, EIGHT_BIT], ids=["masters", "8-bit and remainders"])
def test_D4_copies_of_cut_states_load_bit_for_bit(config: dict[str, Any]) -> None:
    ranks.run(2, _copied, config, limit=60.0)


# -- StateDictOptions


def _options(rank: int, world: int, strategy: str) -> None:
    """Sets whole tensors through set_optimizer_state_dict, given to every rank or to rank 0 only."""
    model, optimizer = made(strategy, EIGHT_BIT)
    steps(model, optimizer, range(2))
    before = whole(optimizer)
    consolidated = optimizer.consolidate_state_dict(to=None)
    optimizer.state_dict()
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    full: Any = {
        "state": {names[i]: entry for i, entry in consolidated["state"].items()},
        "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in consolidated["param_groups"]],
    }
    if strategy == "optim_grads_params":
        got = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        for name, entry in full["state"].items():
            assert bits(list(got["state"][name].values())) == bits(list(entry.values()))
    for broadcast in (False, True):
        other_model, other = made(strategy, EIGHT_BIT, seed=8)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        given = copy.deepcopy(full) if rank == 0 or not broadcast else {}
        set_optimizer_state_dict(other_model, other, given, options=options)
        other_model.load_state_dict(model.state_dict())
        assert whole(other) == before, broadcast


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_G5_full_state_dicts_are_taken_by_every_strategy(strategy: str) -> None:
    ranks.run(2, _options, strategy)


def _flattened(rank: int, world: int) -> None:
    """Flattens as torchtitan saves: names in the keys, which are those of logical states whatever is stored."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for strategy in ("optim", "optim_grads_params"):
        for config in ({}, {"store_param_remainders": True}, EIGHT_BIT):
            model, optimizer = made(strategy, config)
            steps(model, optimizer, range(2))
            before = whole(optimizer)
            flat = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
            weights = copy.deepcopy(model.state_dict())  # a remainder is a master only together with its weight
            steps(model, optimizer, range(2, 3))
            model.load_state_dict(weights)
            set_optimizer_state_dict(model, optimizer, flat, options=options)
            assert whole(optimizer) == before, (strategy, config)


def test_flattened_state_dicts() -> None:
    ranks.run(2, _flattened)


# -- saving while training goes on


def _asynchronous(rank: int, world: int, folder: str, writer: bool) -> None:
    """Trains on while a checkpoint is saved: it must have the state at the time of the call."""
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        for name, config in (("masters", {}), ("8-bit", EIGHT_BIT)):
            model, optimizer = made(strategy, config)
            steps(model, optimizer, range(2))
            then = whole(optimizer)
            weights = bits([p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()])
            state, optimizer_state = get_state_dict(model, optimizer)
            where = f"{folder}/{strategy} {name}"
            how = {"storage_writer": dcp.FileSystemWriter(where)} if writer else {"checkpoint_id": where}
            group = torch.distributed.new_group(backend="gloo")  # the save's collectives run between those of training
            saving = dcp.async_save({"model": state, "optimizer": optimizer_state}, process_group=group, **how)
            steps(model, optimizer, range(2, 6))
            saving.result()
            assert whole(optimizer) != then
            state, optimizer_state = get_state_dict(model, optimizer)
            dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=where)
            optimizer.load_state_dict(optimizer_state)
            assert whole(optimizer) == then, (strategy, name)
            after = bits([p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()])
            assert after == weights


def test_G5_async_save_holds_the_state_at_the_call(tmp_path: Any) -> None:
    ranks.run(2, _asynchronous, str(tmp_path), False, limit=60.0)


# -- masters by name


def _masters(rank: int, world: int) -> None:
    """master_state_dict must have every master by name, in the consolidated state's bits."""
    for strategy in ("no_shard", "optim", "optim_grads_params"):
        for config in ({}, EIGHT_BIT, {"main_params_dtype": None}):
            model, optimizer = made(strategy, config)
            steps(model, optimizer, range(2))
            found = optimizer.master_state_dict()
            assert list(found) == [name for name, _ in model.named_parameters()]
            consolidated = optimizer.consolidate_state_dict(to=None)["state"]
            for i, (name, p) in enumerate(model.named_parameters()):
                master, expected = found[name], consolidated[i].get("master_param", p.detach())
                assert master.shape == p.shape and master.dtype == expected.dtype
                if hasattr(master, "full_tensor"):
                    master = master.full_tensor()
                    expected = expected.full_tensor() if hasattr(expected, "full_tensor") else expected
                elif strategy == "optim":
                    source, run = master.handle.source, master.handle.run
                    part = expected.reshape(-1)[run.start : run.stop]
                    assert bits([source.read(0, run.numel)]) == bits([part])
                    continue
                assert bits([master.clone()]) == bits([expected.clone()])


def test_masters_by_name() -> None:
    ranks.run(2, _masters)


# -- shards of other ranks


def _cut_otherwise(rank: int, world: int) -> None:
    """Loads shards into an optimizer without shards, and one with other buckets: both must raise and change nothing."""
    model, optimizer = made("optim")
    parts = copy.deepcopy(optimizer.state_dict())
    plain = Given(SHAPES, BF16)
    other = torch_ext.AdamW(plain.named_parameters(), policy=optimizer.policy)
    with pytest.raises(ValueError, match=r"'p\d'.*sharded over other ranks.*consolidate_state_dict"):
        other.load_state_dict(parts)
    same_model, same = made("optim", seed=9)
    entries = iter(parts["state"].values())
    moved = {i: next(entries) for i in parts["state"]}
    shorter_buckets = torch_ext.load_policy(BF16, override_ddp_config={"bucket_size": 1})
    another = torch_ext.parallelize(Given(SHAPES, BF16), shorter_buckets, strategy="optim")
    entry = torch_ext.AdamW(another.named_parameters(), policy=optimizer.policy).state_dict()["state"][1]
    moved[1] = {**moved[1], "exp_avg": entry["exp_avg"]}
    before = whole(same)
    with pytest.raises(ValueError, match=r"state of 'p1': exp_avg is elements.*other ranks"):
        same.load_state_dict({**parts, "state": moved})
    assert whole(same) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(parts)
    steps(same_model, same, range(1))


def test_parts_of_other_ranks_are_refused() -> None:
    ranks.run(2, _cut_otherwise)
