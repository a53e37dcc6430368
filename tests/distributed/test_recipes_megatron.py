"""docs/recipes/megatron.md: its lines on 2 x 2 ranks must train the weights of the same model on one process."""

import contextlib
import functools
from typing import Any

import pytest
import ranks
import recipes
import tensor_parallel
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gradients import bits, on_all_ranks
from strategies import STRATEGIES
from tensor_parallel import WIDTH, Groups, Model
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.checkpoint import checkpoint

import torch_ext

BF16, FP32 = torch.bfloat16, torch.float32
TP, DP, STEPS, MAX_NORM, LR = 2, 2, 4, 0.5, 1e-3
ULP = torch.finfo(FP32).eps  # of weights near 1, the largest ones
NEAR = 4 * ULP  # tolerance: one process adds the products of a linear in another order


def _batch(step: int, dp_rank: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(DP * step + dp_rank))


def _loss(model: Model, x: torch.Tensor) -> torch.Tensor:
    return (model(x.to(model.head.weight.dtype)).float() - x.abs().sum(1)).square().mean()


@functools.cache
def _groups() -> Groups:
    return tensor_parallel.two_by_two()


def _lines(strategy: str, dtype: torch.dtype = FP32, model: Model | None = None, **options: Any) -> dict[str, Any]:
    """Runs all of the page's lines and returns its names. options: of AdamW, in addition to the page's."""
    groups = _groups()
    names: dict[str, Any] = {
        **groups._asdict(),
        "model": Model(groups).to(dtype) if model is None else model,
        "strategy": strategy,
        "tp_and_dp": dist.group.WORLD,
        "etp": groups.tp,
        "expert_parts": dist.group.WORLD,
    }
    with pytest.MonkeyPatch.context() as patch:
        if options:
            patch.setattr(torch_ext, "AdamW", functools.partial(torch_ext.AdamW, **options))
        recipes.run("megatron", 0, names)
    for block in range(1, len(recipes.blocks("megatron", "python"))):
        recipes.run("megatron", block, names)
    return names


def _train(names: dict[str, Any], steps: range, max_norm: float = MAX_NORM) -> list[float]:
    """Trains these steps with the page's functions; returns the norms."""
    norms = []
    for step in steps:
        names["through_parts"](_loss(names["model"], _batch(step, names["dp"].rank()))).backward()
        norms.append(float(names["step"](max_norm)))
    return norms


def _alone(steps: int) -> tuple[Model, torch_ext.AdamW, list[float]]:
    """Trains the whole model on one process, with the batches of all data-parallel ranks."""
    model = Model()
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=LR)
    norms = []
    for step in range(steps):
        (sum(_loss(model, _batch(step, d)) for d in range(DP)) / DP).backward()  # type: ignore[union-attr]
        norms.append(float(torch_ext.clip_grad_norm_(optimizer, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, norms


def _whole_name(name: str, ep_rank: int) -> str:
    """Returns a local parameter's name in the whole model."""
    return name.replace("experts.0.", f"experts.{ep_rank}.")


def _part_of(whole: torch.Tensor, p: Any, tp_rank: int) -> torch.Tensor:
    """Returns the part of a whole parameter that a rank of tp has."""
    return whole.chunk(TP, p.partition_dim)[tp_rank] if getattr(p, "tensor_model_parallel", False) else whole


def _trains(rank: int, world: int) -> None:
    """Compares each strategy with one process: norms, weights, copies."""
    reference, _, expected = _alone(STEPS)
    whole = dict(reference.named_parameters())
    weights = {}
    for strategy in STRATEGIES:
        names = _lines(strategy)
        norms = _train(names, range(STEPS))
        assert min(norms) > MAX_NORM, "every step is clipped"
        assert norms == pytest.approx(expected, rel=NEAR), strategy
        params = dict(names["model"].named_parameters())
        for name, p in params.items():
            right = _part_of(whole[_whole_name(name, names["ep"].rank())], p, names["tp"].rank())
            assert float((p - right).detach().abs().max()) < NEAR, name
        weights[strategy] = bits(list(params.values()))
        _copies_agree(names)
        both = torch_ext.AdamW([*names["parts"]["cut"].parameters(), *names["parts"]["experts"].parameters()])
        with pytest.raises(RuntimeError, match=r"over ranks \[.*clip each"):
            torch_ext.clip_grad_norm_(both, MAX_NORM)
        assert _accumulated(_lines(strategy)) == pytest.approx(expected[0], rel=NEAR), strategy
    assert weights["no_shard"] == weights["optim"] == weights["optim_grads"]


def _accumulated(names: dict[str, Any]) -> float:
    """Returns the norm of a first step whose batch is given in two halves."""
    halves = _batch(0, names["dp"].rank()).chunk(2)
    with contextlib.ExitStack() as stack:
        for part in names["parts"].values():
            stack.enter_context(part.no_sync())
        names["through_parts"](_loss(names["model"], halves[0]) / 2).backward()
    names["through_parts"](_loss(names["model"], halves[1]) / 2).backward()
    return float(names["step"](MAX_NORM))


def _copies_agree(names: dict[str, Any]) -> None:
    """Copies of a parameter must be equal: replicated ones on all ranks, cut ones on the data-parallel ranks."""
    named = names["model"].named_parameters()
    keys = {names["key_of"](name, names["kind_of"](p)): bits([p]) for name, p in named}
    for theirs in on_all_ranks(keys):
        assert all(keys[key] == theirs[key] for key in keys.keys() & theirs.keys())


def test_four_ranks_train_what_one_process_does_under_each_strategy() -> None:
    ranks.run(4, _trains)


def _bf16(rank: int, world: int) -> None:
    """Trains a bf16 model whose copies must stay equal; with another seed per tp rank they must not."""
    names = _lines("optim", BF16)
    norms = _train(names, range(STEPS))
    assert on_all_ranks(norms) == [norms] * world
    _copies_agree(names)
    states = names["checkpoint"]()["optimizer"]
    assert all(entry["master_param"].dtype == FP32 for entry in states.values())
    # What the page warns of: another seed on each rank of tp makes copies differ.
    names = _lines("no_shard", BF16, seed=names["tp"].rank())
    _train(names, range(STEPS))
    apart = on_all_ranks(bits([names["model"].embed.weight]))
    assert apart[0] == apart[2] != apart[1] == apart[3]


def test_copies_of_a_bf16_model_keep_the_same_bits() -> None:
    ranks.run(4, _bf16)


def _recomputed(rank: int, world: int) -> None:
    """Runs backwards within a backward, two for one kind of parameters; and a model with kinds that are all frozen."""
    expected = _alone(2)[2]
    for strategy in STRATEGIES:
        model = Model(_groups())
        for linear in (model.dense.up, model.dense.down):
            linear.forward = functools.partial(checkpoint, linear.forward, use_reentrant=True)  # type: ignore[method-assign]
        names = _lines(strategy, model=model)
        assert _train(names, range(2)) == pytest.approx(expected, rel=NEAR), strategy
        with pytest.raises(RuntimeError, match=r"no gradient is ready for 'dense/up/"):
            _loss(model, _batch(2, 0)).backward()

    model = Model(_groups())
    for frozen in (model.moe.experts, model.tokens_norm):
        frozen.requires_grad_(False)
    names = _lines("optim", model=model)
    assert list(names["parts"]) == ["cut", "copies"]
    norms = _train(names, range(2))
    assert on_all_ranks(norms) == [norms] * world
    _copies_agree(names)


def test_recomputed_activations_and_kinds_that_are_not_there() -> None:
    ranks.run(4, _recomputed)


def _nonfinite(rank: int, world: int) -> None:
    """One expert's gradient, which one data-parallel rank has, is NaN: no rank may step."""
    names = _lines("optim_grads")
    before = bits(list(names["model"].parameters()))
    if rank == 3:
        names["model"].moe.experts[0].up.weight.register_hook(lambda grad: grad * float("nan"))
    (norm,) = _train(names, range(1))
    assert norm != norm
    assert bits(list(names["model"].parameters())) == before


def test_a_norm_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    ranks.run(4, _nonfinite)


def _saves(rank: int, world: int, folder: str) -> None:
    """Saves halfway and resumes under other strategies; all must end with the same bits."""
    first = _lines("optim")
    _train(first, range(STEPS // 2))
    dcp.save(first["checkpoint"](), checkpoint_id=folder)
    _train(first, range(STEPS // 2, STEPS))
    for strategy in ("no_shard", "optim_grads"):
        second = _lines(strategy)
        dcp.load(second["checkpoint"](), checkpoint_id=folder)
        _train(second, range(STEPS // 2, STEPS))
        assert bits(list(first["model"].parameters())) == bits(list(second["model"].parameters())), strategy
    _loses_parts_by_names_alone(first, f"{folder}-by-name")


def _loses_parts_by_names_alone(names: dict[str, Any], folder: str) -> None:
    """What the page warns of: with names alone as keys, one rank's part of a parameter is loaded by all."""
    named = {name: p.detach() for name, p in names["model"].named_parameters()}
    loaded = {name: torch.empty_like(p) for name, p in named.items()}
    dcp.save(named, checkpoint_id=folder)
    dcp.load(loaded, checkpoint_id=folder)
    before, after = (on_all_ranks(bits([found["dense.up.weight"]])[0]) for found in (named, loaded))
    assert (len(set(before)), len(set(after))) == (TP, 1)


def test_a_checkpoint_goes_to_another_strategy_and_to_one_process(tmp_path: Any) -> None:
    folder, file = str(tmp_path / "checkpoint"), tmp_path / "whole.pt"
    ranks.run(4, _saves, folder)
    dcp_to_torch_save(folder, str(file))
    saved = torch.load(file, weights_only=True)
    model, optimizer, _ = _alone(STEPS // 2)
    cut = {name: p for name, p in Model(Groups()).named_parameters() if getattr(p, "tensor_model_parallel", False)}
    found = optimizer.state_dict()
    for i, (name, p) in enumerate(model.named_parameters()):
        for key, right in {"": p, **found["state"][i]}.items():
            parts = _parts(saved["optimizer" if key else "model"], name, name in cut, key)
            merged = torch.cat(parts, cut[name].partition_dim) if len(parts) > 1 and key != "step" else parts[0]  # type: ignore[attr-defined]
            assert merged.shape == right.shape, (name, key)
            assert torch.allclose(merged, right.detach(), rtol=1e-4, atol=NEAR), (name, key)


def _parts(saved: dict[str, Any], name: str, cut: bool, key: str) -> list[torch.Tensor]:
    """Returns the parts of a parameter of the whole model, by the page's keys, in the order of tp."""
    keys = [name]
    if "experts." in name:
        local = name.replace("experts.1.", "experts.0.")
        keys = [f"ep{int('experts.1.' in name)}.etp{t}.{local}" for t in range(TP)]
    elif cut:
        keys = [f"tp{t}.{name}" for t in range(TP)]
    return [saved[k][key] if key else saved[k] for k in keys]
