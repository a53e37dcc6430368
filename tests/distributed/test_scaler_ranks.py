"""The loss scale over several ranks (semantics.md, G3): the ranks of the chosen group must agree on found_inf under
every strategy."""

import copy
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, FP16, FP32, Given, policy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_ext

# How gradients are reduced: by parallelize's strategies, by torch's FSDP2, or not at all ("nobody").
WAYS = ["no_shard", "optim", "optim_grads", "optim_grads_params", "FSDP2", "nobody"]
SHAPES = [(6, 100), (5, 2)]


def _model(way: str, dtype: torch.dtype, chosen: Any) -> Any:
    model = Given(SHAPES, dtype)
    if way == "nobody":
        return model
    return fully_shard(model) if way == "FSDP2" else torch_ext.parallelize(model, chosen, strategy=way)


def _backward(model: Any, scaler: Any, rank: int, value: float) -> None:
    """Runs a backward whose gradients are 1, except for one that rank 0 owns, which rank 1's batch sets to `value`."""
    grads = [torch.ones(shape) for shape in SHAPES]
    if rank == 1:
        grads[0][0, 3] = value
    scaler.scale(model(grads)).backward()


def _local(p: torch.Tensor) -> torch.Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def _tensors(optimizer: Any) -> list[torch.Tensor]:
    """Returns copies of this rank's weights and states."""
    found = []
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        found += [_local(t).detach().clone() for t in (p, *optimizer.state[p].values())]
    return found


def _scaler(scaler_of: str, **options: Any) -> Any:
    if scaler_of == "torch":
        return torch.amp.GradScaler("cpu", init_scale=16.0)
    settings = {"initial_loss_scale": 16.0, "hysteresis": 1}
    return torch_ext.load_policy(FP16, override_optimizer_config=settings).grad_scaler(**options)


def _skips(rank: int, world: int, ways: list[str], dtype: torch.dtype, scaler_of: str, unscale: bool) -> list[Any]:
    """Makes rank 1's batch overflow in rank 0's part, in the second of three steps. Returns scales, counters, norms."""
    answers = []
    for way in ways:
        chosen = policy(dtype, bucket_size=1)
        model = _model(way, dtype, chosen)
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=chosen)
        scaler = _scaler(scaler_of)
        scales, norms = [], []
        for step in range(3):
            before = _tensors(optimizer)
            _backward(model, scaler, rank, float("inf") if step == 1 else 1.0)
            if unscale:
                scaler.unscale_(optimizer)
                norms.append(float(torch_ext.clip_grad_norm_(optimizer, 1.0)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = _tensors(optimizer)
            same = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            scales.append((scaler.get_scale(), same))
        steps = {float(optimizer.state[p]["step"]) for p in model.parameters()}
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        answers.append(
            (scales, steps, norms[::2], all(torch.allclose(w.float(), AFTER_TWO, rtol=2e-3) for w in weights))
        )
    return answers


AFTER_TWO = torch.tensor(-0.2)  # weights after two steps by the learning rate, from 0


def _check(ways: list[str], answers: list[list[Any]], unscale: bool) -> None:
    """The ranks must agree, the second of three steps must be skipped and change nothing, and the scale must be halved
    once."""
    for way, first, second in zip(ways, *answers, strict=True):
        assert repr(first) == repr(second), f"{way}: the ranks' scales, counters and norms are equal"
        scales, steps, norms, moved = first
        assert [same for _, same in scales] == [False, True, False], f"{way}: a skipped step changes nothing"
        assert steps == {2.0}, f"{way}: the counters included"
        assert [scale for scale, _ in scales] == [16.0, 8.0, 8.0]
        assert moved, way
        assert norms == pytest.approx([610**0.5] * 2 if unscale else [], rel=1e-3)


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale, clip, step"])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_G3_ranks_skip_the_same_steps_under_every_strategy(dtype: torch.dtype, unscale: bool) -> None:
    _check(WAYS, ranks.run(2, _skips, WAYS, dtype, "policy", unscale), unscale)


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale, clip, step"])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_G3_torchs_scaler_where_gradients_are_in_grad(dtype: torch.dtype, unscale: bool) -> None:
    ways = ["no_shard"]  # its gradients are fp32 for an fp16 model, too
    if dtype == FP32:
        ways.append("optim_grads_params")
    if dtype == FP32 or not unscale:  # torch's own unscale_ rejects fp16 gradients
        ways.append("FSDP2")
    _check(ways, ranks.run(2, _skips, ways, dtype, "torch", unscale), unscale)


def _refused(rank: int, world: int, ways: list[str], unscale: bool) -> list[str]:
    """Returns the errors of torch's scaler where gradients are not in `.grad`."""
    messages = []
    for way in ways:
        chosen = policy(BF16, FP32, FP32, bucket_size=1)
        model = _model(way, BF16, chosen)
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=chosen)
        scaler = _scaler("torch")
        _backward(model, scaler, rank, 1.0)
        with pytest.raises(RuntimeError) as raised:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        messages.append(str(raised.value))
        assert not any(_local(p).any() for p in model.parameters()), "nothing was stepped"
    return messages


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale, step"])
def test_G3_torchs_scaler_names_ours_where_gradients_are_elsewhere(unscale: bool) -> None:
    ways = ["optim", "optim_grads", "optim_grads_params"]
    for of_rank in ranks.run(2, _refused, ways, unscale):
        for way, message in zip(ways, of_rank, strict=True):
            assert "policy.grad_scaler()" in message, way


def _two_pairs(rank: int, world: int, own_group: bool) -> tuple[float, float]:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another. The first one overflows."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = groups[rank // 2]
    chosen = policy(FP16, bucket_size=1)
    model = torch_ext.parallelize(Given(SHAPES, FP16), chosen, strategy="optim", process_group=pair)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=chosen)
    if own_group:
        with pytest.raises(ValueError, match="not a member of process_group"):
            _scaler("policy", process_group=groups[1 - rank // 2])
    scaler = _scaler("policy", process_group=pair if own_group else None)
    _backward(model, scaler, rank, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    step = optimizer.state[next(iter(model.parameters()))]["step"]
    if own_group:
        with pytest.raises(RuntimeError, match="state_dict"):
            copy.deepcopy(scaler)
    return float(step), scaler.get_scale()


@pytest.mark.parametrize("own_group", [True, False], ids=["a group each", "all ranks"])
def test_G3_found_inf_is_agreed_in_the_process_group(own_group: bool) -> None:
    skipped, stepped = (0.0, 8.0), (1.0, 16.0)
    others = stepped if own_group else skipped
    assert ranks.run(4, _two_pairs, own_group) == [skipped, skipped, others, others]


def _reduced_first(rank: int, world: int) -> None:
    """Gradients that were not reduced must be an error, not an overflow on one rank."""
    chosen = policy(FP16, bucket_size=1)
    model = torch_ext.parallelize(Given(SHAPES, FP16), chosen, strategy="no_shard")
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=chosen)
    scaler = _scaler("policy")
    with model.no_sync():
        _backward(model, scaler, rank, float("inf"))
    with pytest.raises(RuntimeError, match="no_sync"):
        scaler.unscale_(optimizer)


def test_G3_gradients_are_reduced_before_they_are_looked_at() -> None:
    ranks.run(2, _reduced_first)
