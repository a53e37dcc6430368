"""torch's clipping functions, and its DDP, on parallelized models: the right result, or an error that names ours."""

from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, policy
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import torch_ext

SHAPES = [(6, 100), (5, 2)]
WAYS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
SHARDED = WAYS[1:]


def _norm(params: Any) -> float:
    return float(torch.nn.utils.clip_grad_norm_(params, 0.5))


def _norm_by_its_other_name(params: Any) -> float:
    return float(torch.nn.utils.clip_grad.clip_grad_norm_(parameters=params, max_norm=0.5))


def _imported(params: Any) -> float:
    return float(clip_grad_norm_(params, 0.5))  # imported before parallelize


def _measured(params: Any) -> float:
    return float(torch.nn.utils.clip_grad_norm_(params, float("inf"), norm_type=2))


def _ours(params: Any) -> float:
    return float(torch_ext.clip_grad_norm_(params, 0.5))


def _value(params: Any) -> float:
    torch.nn.utils.clip_grad_value_(params, 0.01)
    return 0.0


def _one_by_one(params: Any) -> list[float]:
    return [float(torch.nn.utils.clip_grad_norm_(p, 0.5)) for p in params]


CLIPS = {
    "clip_grad_norm_": _norm,
    "clip_grad.clip_grad_norm_": _norm_by_its_other_name,
    "from torch.nn.utils import clip_grad_norm_": _imported,
    "clip_grad_norm_(inf)": _measured,
    "clip_grad_value_": _value,
    "clip_grad_norm_(one tensor)": _one_by_one,
}


def _train(rank: int, way: str, clip: Any) -> tuple[list[Any], list[bytes]]:
    """Trains three steps with a clipping function; returns what it returned, and the bits of the weights."""
    # With fp32 sums of a bf16 model: those are not in `.grad` under optim_grads_params.
    chosen = policy(BF16, FP32, FP32, bucket_size=1)
    model = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=way)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=chosen)
    told = []
    for step in range(3):  # gradients that differ from rank to rank
        own = torch.Generator().manual_seed(10 * step + rank)
        model([torch.randn(shape, generator=own) for shape in SHAPES]).backward()
        told.append(clip(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return told, bits([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])


def _trained(rank: int, world: int, name: str) -> None:
    """Compares a clipping function on sharded gradients with no_shard, and with ours."""
    whole, whole_weights = _train(rank, "no_shard", CLIPS[name])
    for way in SHARDED:
        told, weights = _train(rank, way, CLIPS[name])
        assert torch.allclose(torch.tensor(told), torch.tensor(whole), rtol=1e-6), way
        if name in ("clip_grad_norm_(inf)", "clip_grad_value_"):
            assert weights == whole_weights, way
        if CLIPS[name] in (_norm, _norm_by_its_other_name, _imported):
            assert (told, weights) == _train(rank, way, _ours), way
            assert min(told) > 1.0, "something was clipped"


@pytest.mark.parametrize("name", CLIPS)
def test_torchs_clipping_finds_sharded_gradients(name: str) -> None:
    ranks.run(2, _trained, name)


def _refusals(rank: int, world: int) -> None:
    """Functions that cannot work with sharded gradients must raise; plain parameters must get torch's result."""
    chosen = policy(FP32, bucket_size=1)
    plain = Given(SHAPES)
    plain([torch.ones(shape) for shape in SHAPES]).backward()
    for way in ("optim", "optim_grads"):
        model = torch_ext.parallelize(Given(SHAPES), chosen, strategy=way)
        model([torch.ones(shape) for shape in SHAPES]).backward()
        with pytest.raises(ValueError, match=r"norm_type is inf; 2 is legal.*sharded"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        with pytest.raises(RuntimeError, match=r"torch_ext\.clip_grad_norm_\(optimizer"):
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.ones(()))
        with pytest.raises(RuntimeError, match="no_sync"):
            with model.no_sync():
                model([torch.ones(shape) for shape in SHAPES]).backward()
            if way == "optim_grads":  # reduces in every backward
                raise RuntimeError("no_sync")
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        assert float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 2.0, norm_type=float("inf"))) == 1.0
        torch.nn.utils.clip_grads_with_norm_(plain.parameters(), 2.0, torch.ones(()))
    assert torch.nn.utils.clip_grad_norm_.__name__ == "clip_grad_norm_"


def test_norms_that_others_took_are_refused_where_gradients_are_sharded() -> None:
    ranks.run(2, _refusals)


def _other_functions(rank: int, world: int, decorated: bool) -> None:
    """Replaces torch's function by a plain or a decorated one: parallelize must find it in either."""

    def plain(parameters: Any, scale: float) -> tuple[int, float]:
        return len(parameters), scale

    def decorator(func: Any) -> Any:
        return lambda *args, **options: func(*args, **options)

    home, other = torch.nn.utils, torch.nn.utils.clip_grad
    imported: Any = decorator(plain) if decorated else plain
    home.clip_grad_norm_ = other.clip_grad_norm_ = imported
    del home.clip_grads_with_norm_  # as in older torch
    for _ in range(2):  # a second call changes nothing more
        torch_ext.parallelize(Given(SHAPES), policy(FP32), strategy="optim")
    found: Any = home.clip_grad_norm_
    assert (found is imported) == decorated
    assert found is other.clip_grad_norm_
    assert found(iter([torch.ones(1), torch.ones(1)]), scale=2.0) == (2, 2.0)
    assert not hasattr(home, "clip_grads_with_norm_")


@pytest.mark.parametrize("decorated", [True, False])
def test_a_function_is_replaced_in_its_decorator_or_in_its_modules(decorated: bool) -> None:
    ranks.run(1, _other_functions, decorated)


def _wrapped(rank: int, world: int) -> None:
    """DDP around a parallelized model, or around a module that contains one, would reduce twice."""
    for way in WAYS:
        model = torch_ext.parallelize(Given(SHAPES), policy(FP32, bucket_size=1), strategy=way)
        for whole in (model, torch.nn.Sequential(model)):
            with pytest.raises(RuntimeError, match=r"'.*p0'.*register_comm_hook"):
                torch.nn.parallel.DistributedDataParallel(whole)
    plain = torch.nn.parallel.DistributedDataParallel(Given(SHAPES))
    with pytest.raises(TypeError, match="register_comm_hook"):
        torch_ext.parallelize(plain, policy(FP32))


def test_ddp_around_a_parallelized_model_is_refused() -> None:
    ranks.run(2, _wrapped)
