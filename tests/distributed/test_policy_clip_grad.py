"""A policy's clip_grad must be applied in step(), under every strategy, FSDP2 and DDP, unless the user has clipped."""

from typing import Any

import pytest
import ranks
import torch
from gradients import FP32, Given, bits
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES = [(6, 100), (5, 2), (1,)]
LIMIT, LARGER = 0.5, 2.0


def _parallelized(strategy: str) -> Any:
    """Returns a function that makes a model under the strategy."""

    def make(policy: Any) -> Any:
        return torch_ext.parallelize(Given(SHAPES), policy, strategy=strategy)

    return make


def _fsdp2(policy: Any) -> Any:
    return fully_shard(Given(SHAPES))


def _ddp(policy: Any) -> Any:
    model = DistributedDataParallel(Given(SHAPES))
    torch_ext.register_comm_hook(model, policy)
    return model


def _plain_ddp(policy: Any) -> Any:
    return DistributedDataParallel(Given(SHAPES))


# By kind, each of which runs in one set of processes: functions that make the model.
MODELS = {
    "our buckets": {name: _parallelized(name) for name in ("no_shard", "optim", "optim_grads")},
    "FSDP2": {"optim_grads_params": _parallelized("optim_grads_params"), "fully_shard alone": _fsdp2},
    "DDP": {"with our hook": _ddp, "alone": _plain_ddp},
}


def _by_the_optimizer(optimizer: Any, params: list[Any], limit: float) -> None:
    torch_ext.clip_grad_norm_(optimizer, limit)


def _in_place(optimizer: Any, params: list[Any], limit: float) -> None:
    torch_ext.clip_grad_norm_(params, limit)


def _torchs(optimizer: Any, params: list[Any], limit: float) -> None:
    torch.nn.utils.clip_grad_norm_(params, limit)


def _torchs_value(optimizer: Any, params: list[Any], limit: float) -> None:
    torch.nn.utils.clip_grad_value_(params, 0.1)


def _nothing(optimizer: Any, params: list[Any], limit: float) -> None:
    pass


USERS = {
    "ours, by the optimizer": _by_the_optimizer,
    "ours, in place": _in_place,
    "torch's": _torchs,
    "torch's, by value": _torchs_value,
}


def _train(rank: int, make: Any, clip_grad: float, clip: Any, limit: float, to_none: bool = True) -> list[bytes]:
    """Trains three steps in which `clip(optimizer, params, limit)` is called; returns the bits of the whole weights."""
    policy = torch_ext.load_policy(
        FP32, optimizer_config={"clip_grad": clip_grad}, override_ddp_config={"bucket_size": 1}
    )
    model = make(policy)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=0.1, eps=0.1, policy=policy)
    for step in range(3):
        own = torch.Generator().manual_seed(10 * step + rank)
        model([torch.randn(shape, generator=own) for shape in SHAPES]).backward()
        clip(optimizer, list(model.parameters()), limit)
        optimizer.step()
        (optimizer if step else model).zero_grad(set_to_none=to_none)
    return bits([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])


def _policy_clips(rank: int, world: int, kind: str) -> None:
    """The policy's clipping must have the bits of the user's; measuring the norm must not count as clipping."""
    for name, make in MODELS[kind].items():
        expected = _train(rank, make, 0.0, _by_the_optimizer, LIMIT)
        assert expected != _train(rank, make, 0.0, _nothing, LIMIT), "something is clipped"
        assert _train(rank, make, LIMIT, _nothing, LIMIT) == expected, name
        assert _train(rank, make, LIMIT, _nothing, LIMIT, to_none=False) == expected, name
        for measure in (_by_the_optimizer, _torchs):
            assert _train(rank, make, LIMIT, measure, float("inf")) == expected, (name, "measuring is not clipping")


@pytest.mark.parametrize("kind", MODELS)
def test_the_policys_clip_grad_is_applied_in_the_step(kind: str) -> None:
    ranks.run(2, _policy_clips, kind)


def _user_clips(rank: int, world: int, kind: str) -> None:
    """The user's clipping must have its bits whether or not the policy clips."""
    for name, make in MODELS[kind].items():
        for how, clip in USERS.items():
            expected = _train(rank, make, 0.0, clip, LARGER)
            assert _train(rank, make, LIMIT, clip, LARGER) == expected, (name, how)
            if clip is _torchs:
                assert _train(rank, make, LIMIT, clip, LARGER, to_none=False) == expected, (name, how)


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_user_clipped_is_not_clipped_once_more(kind: str) -> None:
    ranks.run(2, _user_clips, kind)


def _stepped_in_backward(rank: int, world: int) -> None:
    """In backward the norm would be known too late, so this is rejected before anything is stepped."""
    clips = torch_ext.load_policy(
        FP32, optimizer_config={"clip_grad": LIMIT}, override_ddp_config={"step_in_backward": True, "bucket_size": 1}
    )
    does_not = torch_ext.load_policy(FP32, override_ddp_config={"step_in_backward": True, "bucket_size": 1})
    with pytest.raises(ValueError, match=r"step_in_backward=True and clip_grad=0\.5"):
        torch_ext.parallelize(Given(SHAPES), clips, strategy="optim")
    model = torch_ext.parallelize(Given(SHAPES), does_not, strategy="optim")
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=clips)
    model([torch.ones(shape) for shape in SHAPES]).backward()
    optimizer.step()  # the first backward steps nothing, as there are no states yet
    optimizer.zero_grad()
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match=r"step_in_backward=True .* clip_grad=0\.5"):
        model([torch.ones(shape) for shape in SHAPES]).backward()
    assert bits(model.parameters()) == before


def test_step_in_backward_refuses_the_policys_clip_grad() -> None:
    ranks.run(2, _stepped_in_backward)
