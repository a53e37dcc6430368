"""get_ and set_optimizer_state_dict with each of their options: ours must load whatever torch.optim.AdamW can.

The table has all combinations of savers, loaders, strategies and options. torch.optim.AdamW is tried first in each.
"""

import copy
import itertools
import pickle
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, noise
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ext

SHAPES: list[Any] = [(3, 5), (129,), (4, 2, 3)]
STRATEGIES = ["no group", "no_shard", "optim", "optim_grads", "FSDP2"]
LOADERS = ["fresh", "with gradients", "stepped"]
# torch rejects broadcast_from_rank0 without full_state_dict, and cannot load a full_state_dict that it flattened.
# cpu_offload does nothing to tensors on the CPU, but takes another path in torch.
WAYS = [
    {"full_state_dict": full, "cpu_offload": cpu, "flatten_optimizer_state_dict": flat, "broadcast_from_rank0": all_}
    for full, cpu, flat, all_ in itertools.product((False, True), repeat=4)
    if (full or not all_) and not (full and flat) and cpu in (flat, all_)
]


def _build(kind: str, strategy: str, seed: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns a model and our optimizer or torch's. kind: "torch" or "ours"."""
    model: Any = Given(SHAPES, dtype)
    weights = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=weights))
    if kind == "torch":
        if strategy == "FSDP2":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    policy = torch_ext.load_policy(dtype)
    if strategy != "no group":
        torch_ext.parallelize(model, policy, strategy={"FSDP2": "optim_grads_params"}.get(strategy, strategy))
    return model, torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=policy)


def _step(model: Any, optimizer: Any, which: range, dtype: torch.dtype) -> None:
    for step in which:
        model(noise(step, 0, SHAPES, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(optimizer: Any) -> list[bytes]:
    """Returns the bits of the whole state, on every rank."""
    if isinstance(optimizer, torch_ext.AdamW):
        state = optimizer.consolidate_state_dict(to=None)["state"]
        optimizer.state_dict()
    else:
        state = optimizer.state_dict()["state"]
    values = [entry[key] for entry in state.values() for key in sorted(entry)]
    return bits([v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for v in values])


def _saved(kind: str, strategy: str, way: dict[str, bool], dtype: torch.dtype) -> tuple[Any, list[bytes]]:
    """Returns the saved state (with full_state_dict rank 0's, on every rank) or the error, and the bits of the state.

    With full_state_dict and cpu_offload torch gives the state to rank 0 only."""
    model, optimizer = _build(kind, strategy, 7, dtype)
    _step(model, optimizer, range(3), dtype)
    expected = _whole(optimizer)
    found: Any
    try:
        found = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**way)))
        if way["full_state_dict"]:
            pickle.dumps(found)
    except RuntimeError as error:
        found = str(error)
    if way["full_state_dict"]:
        given = [found]
        torch.distributed.broadcast_object_list(given)
        found = given[0]
    return found, expected


def _loads(
    source: tuple[Any, list[bytes]], kind: str, strategy: str, how: str, way: dict[str, bool], dtype: Any
) -> str:
    """Loads the state. Returns "loads", or what happens instead."""
    model, optimizer = _build(kind, strategy, 8, dtype)
    if how == "stepped":
        _step(model, optimizer, range(5, 6), dtype)
    if how == "with gradients":
        model(noise(6, 0, SHAPES, dtype)).backward()
    saved, expected = source
    if way["broadcast_from_rank0"] and torch.distributed.get_rank() > 0:
        saved = {}
    try:
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved), options=StateDictOptions(**way))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loads" if _whole(optimizer) == expected else "is another state, without a word"


def _table(rank: int, world: int, strategy: str, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
    """Returns by case what torch.optim.AdamW does and what ours does."""
    found: dict[str, tuple[str, str]] = {}
    theirs_under = "FSDP2" if strategy == "FSDP2" else "no group"
    for way in WAYS:
        options = " and ".join(key for key, value in way.items() if value) or "no options"
        theirs, ours = _saved("torch", theirs_under, way, dtype), _saved("ours", strategy, way, dtype)
        for how in LOADERS:
            as_torch = _loads(theirs, "torch", theirs_under, how, way, dtype)
            for saver, source in (("torch", theirs), ("ours", ours)):
                if saver == "torch" and dtype == BF16:
                    continue  # ours needs masters that were not saved: test_checkpoint_from_torch
                refused = source[0] if isinstance(source[0], str) else None
                as_ours = refused or _loads(source, "ours", strategy, how, way, dtype)
                found[f"from {saver}, {how}, {options}"] = as_torch, as_ours
    return found


_TORCHS_KEYS = "KeyError: 'param_groups.p0."  # torch looks for our options among the keys that it flattened
# Strategies that shard states, and both kinds of tensors, also in bf16, which has masters.
CASES = [*((strategy, FP32) for strategy in STRATEGIES), ("no group", BF16), ("optim_grads", BF16), ("FSDP2", BF16)]


@pytest.mark.parametrize(("strategy", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_ours_loads_by_every_option_by_which_torchs_does(strategy: str, dtype: torch.dtype) -> None:
    wrong = []
    for table in ranks.run(2, _table, strategy, dtype, limit=100.0):
        for case, (theirs, ours) in table.items():
            cut = strategy in ("optim", "optim_grads") and "from ours" in case and "full_state_dict" in case
            if cut and "consolidate_state_dict" in ours:
                continue
            if "from torch" in case and "flatten" in case and ours.startswith(_TORCHS_KEYS):
                continue
            if ours != "loads":
                wrong.append(f"{case}: torch {theirs}, ours {ours}")
    assert not wrong, "\n".join(wrong)


def _fresh(rank: int, world: int) -> None:
    """torch steps an optimizer without state once, with zero gradients. To avoid that, `optimizer.state` creates the
    state."""
    for strategy in ("no_shard", "optim", "optim_grads", "FSDP2"):
        model, optimizer = _build("ours", strategy, 8, BF16)
        before = bits([p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()])
        assert optimizer.state
        assert bits([p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]) == before
        assert all(float(entry["step"]) == 0 and "exp_avg" in entry for entry in optimizer.state.values())
        assert all(p.grad is None for p in model.parameters())
        _step(model, optimizer, range(1), BF16)
        other_model, other = _build("ours", strategy, 8, BF16)
        _step(other_model, other, range(1), BF16)
        assert _whole(other) == _whole(optimizer)


def test_E11_state_that_is_asked_for_is_made_without_effect() -> None:
    ranks.run(2, _fresh)
