"""A DistributedDataParallel with our hook can be copied and saved like one with torch's hooks. After an exchange that
failed or found a gradient that is not finite, no optimizer steps."""

import copy
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, FP32, Given, bits, noise, on_all_ranks, policy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import torch_ext

SHAPES = [(4,), (200,), (3,)]


def _through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": _through_a_file,
    "AveragedModel": lambda value: AveragedModel(value[0]).module,
}


def _train(model: Any, rank: int, steps: range) -> list[bytes]:
    """Runs a backward for each step and returns the last gradients."""
    for step in steps:
        model.zero_grad()
        model(noise(step, rank, SHAPES)).backward()
    return bits([p.grad for p in model.parameters()])


def _build(hook: str) -> tuple[Any, Any]:
    """Returns a DDP model with our hook or one of torch's, and our hook's state."""
    model = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0001)
    if hook == "ours":
        return model, torch_ext.register_comm_hook(model, policy(FP32, FP32, BF16))
    model.register_comm_hook(None, fp16_compress_hook)
    return model, None


def _copied(rank: int, world: int, way: str) -> None:
    """A copy must reduce like DDP without a hook, and the original with its hook. A copy can get a hook."""
    plain = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0001)
    without = _train(plain, rank, range(3))
    found = {}
    for hook in ("torch's", "ours"):
        model, state = _build(hook)
        _train(model, rank, range(2))
        made = WAYS[way]((model, torch_ext.AdamW(model.parameters(), lr=0.1)))
        other, optimizer = made if isinstance(made, tuple) else (made, torch_ext.AdamW(made.parameters(), lr=0.1))
        (_, theirs), *more = other._comm_hooks
        assert not more and theirs is not state or hook == "torch's"
        assert _train(other, rank, range(3)) == without, "a copy reduces as DDP without a hook"
        optimizer.step()
        found[hook] = bits([p.detach() for p in other.parameters()])
        assert _train(model, rank, range(3)) != without, "and the original as before"
        if hook == "ours":
            assert theirs.wire_bytes() == 0 and state.wire_bytes() > 0
            again = copy.deepcopy(model)
            torch_ext.register_comm_hook(again, policy(FP32, FP32, BF16))
            assert _train(again, rank, range(3)) == _train(model, rank, range(3))
    assert found["ours"] == found["torch's"]
    assert on_all_ranks(found["ours"]) == [found["ours"]] * world


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_what_that_of_a_model_with_torchs_hook_is(way: str) -> None:
    ranks.run(2, _copied, way)


def _state_alone(rank: int, world: int) -> None:
    """Saves the hook and its state without the model, as torch's documentation does with PowerSGDState."""
    model, state = _build("ours")
    wanted = _train(model, rank, range(3))
    ((hook, _),) = model._comm_hooks
    saved = _through_a_file({"hook": hook, "state": state, "model": model.state_dict()})
    fresh = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0001)
    fresh.load_state_dict(saved["model"])
    fresh.register_comm_hook(saved["state"], saved["hook"])
    assert type(saved["state"]) is type(state) and saved["state"].wire_bytes() == 0
    assert _train(fresh, rank, range(3)) == wanted
    assert saved["state"].wire_bytes() == state.wire_bytes() > 0


def test_a_state_that_was_saved_alone_is_registered_with_another_model() -> None:
    ranks.run(2, _state_alone)


def _differing(rank: int, world: int) -> list[str]:
    """Ranks that load states of different files must get an error in the first backward, and in step()."""
    model, state = _build("ours")
    loaded = _through_a_file(state)
    loaded._policy = policy(FP32, FP32, FP32 if rank else BF16)
    fresh = DistributedDataParallel(Given(SHAPES))
    ((hook, _),) = model._comm_hooks
    fresh.register_comm_hook(loaded, hook)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    said = []
    for call in (lambda: fresh(noise(0, rank, SHAPES)).backward(), optimizer.step):
        with pytest.raises(RuntimeError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_states_that_differ_are_told_apart() -> None:
    for backward, step in ranks.run(2, _differing):
        assert backward.startswith("register_comm_hook: rank 1 differs from rank 0")
        assert step == f"step() after an exchange that failed: {backward}"


# -- no step after a backward that raised -------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "ours": lambda params: torch_ext.AdamW(params, lr=0.1),
    "torch's": lambda params: torch.optim.SGD(params, lr=0.1),
}


def _fails(rank: int, world: int) -> None:
    """Rank 1 is lost: step() of each optimizer with these parameters must raise, of an unrelated one not."""
    model, _ = _build("ours")
    _train(model, rank, range(2))
    optimizers = [make(model.parameters()) for make in OPTIMIZERS.values()]
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    if rank == 1:
        time.sleep(6)
        return
    with pytest.raises(RuntimeError, match="rank 1 did not respond") as raised:
        model(noise(2, rank, SHAPES)).backward()
    for optimizer in optimizers:
        for _ in range(2):
            with pytest.raises(RuntimeError) as refused:
                optimizer.step()
            assert str(refused.value) == f"step() after an exchange that failed: {raised.value}"
    assert not any(p.any() for p in model.parameters())
    other.step()


def test_a_failed_exchange_makes_step_refuse() -> None:
    ranks.run(2, _fails, timeout=2.0)


def _poisoned(rank: int, world: int) -> None:
    """NaN on rank 1: step() must raise until zero_grad(), then training must go on."""
    model = DistributedDataParallel(Given(SHAPES))
    torch_ext.register_comm_hook(model, policy(check_for_nan_in_grad=True))
    grads = noise(0, rank, SHAPES)
    if rank == 1:
        grads[1][7] = float("nan")
    for optimizer in [make(model.parameters()) for make in OPTIMIZERS.values()]:
        for to_none in (True, False):
            with pytest.raises(RuntimeError, match="NaN or Inf before communication"):
                model(grads).backward()
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"step\(\) with gradients that have NaN or Inf \('p1'"):
                    optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            optimizer.step()
            optimizer.zero_grad()
            model(noise(1, rank, SHAPES)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_that_are_not_finite_make_step_refuse_until_they_are_zeroed() -> None:
    ranks.run(2, _poisoned)


# -- policies and parallelized models ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_policy_is_copied(way: str) -> None:
    one = policy(BF16, FP32, BF16)
    assert WAYS[way](one) == one


def _parallel(rank: int, world: int, way: str, strategy: str) -> None:
    """A copied parallelized model must be a plain one, with gradients of its own rank."""
    model: Any = Given(SHAPES, BF16)
    chosen = policy(BF16, FP32)
    torch_ext.parallelize(model, chosen, strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=chosen)
    model(noise(0, rank, SHAPES, BF16)).backward()
    optimizer.step()
    optimizer.zero_grad()
    other = WAYS[way](model)
    assert type(other) is Given and bits(other.parameters()) == bits(model.parameters())
    other(noise(0, rank, SHAPES, BF16)).backward()
    torch_ext.AdamW(other.parameters(), lr=0.1).step()
    torch_ext.parallelize(Given(SHAPES), policy(), strategy=strategy)
    dist.barrier()


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_parallelized_model_is_copied_as_a_plain_one(way: str, strategy: str) -> None:
    ranks.run(2, _parallel, way, strategy)
