"""optim_grads_params: what goes wrong on one rank is an error on every rank, and training goes on where FSDP2 can."""

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, bits, gradients, noise, policy
from ranks import Died, Raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from units import RECOVERS, SHAPES, UNUSED_COUNT_AS_ZERO, Blocks, accumulated, mean_of_ranks, shard_of

import torch_ext
from torch_ext.parallel.fsdp import unit_exchange

FULLY = "optim_grads_params"
needs_recovery = pytest.mark.skipif(not RECOVERS, reason="FSDP2 of torch < 2.13 cannot go on after such a backward")


def _parallel(dtype: torch.dtype = FP32, main: Any = FP32, **options: Any) -> Any:
    return torch_ext.parallelize(Blocks(dtype), policy(dtype, main, bucket_size=1), strategy=FULLY, **options)


def _grads(rank: int, seed: int = 1, without: int | None = None) -> list[Any]:
    """Returns a rank's gradients; `without`: the position of a parameter that gets none."""
    grads: list[Any] = noise(seed, rank, SHAPES)
    if without is not None:
        grads[without] = None
    return grads


def _error(call: Callable[[], object]) -> str:
    """Returns the text of the error that `call` must raise."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
        call()
    return str(raised.value)


def _check(model: torch.nn.Module, seeds: list[int], world: int, main: torch.dtype = FP32) -> None:
    """The gradients must be the accumulated means of these micro-batches, to the bit."""
    means = [mean_of_ranks(seed, range(world), (FP32, main, main)) for seed in seeds]
    for param, grad, whole in zip(model.parameters(), gradients(model), accumulated(means, main), strict=True):
        assert grad is not None and bits([grad]) == bits([shard_of(param, whole).float()])  # type: ignore[arg-type]


# -- gradients that are not finite (E7) ------------------------------------------------------------------------------


def _nan(rank: int, world: int, dtype: torch.dtype) -> str:
    """The last rank has NaN and infinity. After zero_grad() training must go on."""
    checked = policy(dtype, FP32, bucket_size=1, check_for_nan_in_grad=True)
    model = torch_ext.parallelize(Blocks(dtype), checked, strategy=FULLY)
    grads = _grads(rank)
    if rank == world - 1:
        grads[7][100] = float("nan")  # the last block's third parameter, which is sent first
        grads[1][4, 2] = float("-inf")
    message = _error(lambda: model(grads).backward())
    optimizer = torch_ext.AdamW(model.parameters())
    assert "call zero_grad() first" in _error(optimizer.step)
    model.zero_grad()
    optimizer.step()
    model(_grads(rank, 2)).backward()
    if dtype == FP32:
        _check(model, [2], world)
    return message


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16-main-fp32"])
@pytest.mark.parametrize("world", [1, 3])
def test_e7_a_gradient_that_is_not_finite_stops_every_rank(world: int, dtype: torch.dtype) -> None:
    messages = ranks.run(world, _nan, dtype)
    assert len(set(messages)) == 1
    assert "NaN or Inf before communication" in messages[0]
    assert f"'blocks.2.p2' on rank {world - 1}" in messages[0] or f"'blocks.0.p0' on rank {world - 1}" in messages[0]


# -- parameters that are not used (F5) ------------------------------------------------------------------------------


def _unused(rank: int, world: int, who: tuple[int, ...], find: bool) -> Any:
    """On the ranks in `who`, a parameter gets no gradient. Returns the error, or the gradients."""
    model = _parallel(find_unused_parameters=find)
    started = time.monotonic()
    try:
        for seed in (1, 2):
            model(_grads(rank, seed, 1 if rank in who else None)).backward()
    except RuntimeError as error:
        assert time.monotonic() - started < 10, "long before the timeout"
        return str(error)
    return [bits([grad]) if grad is not None else None for grad in gradients(model)]


@pytest.mark.parametrize("who", [(1,), (0, 1)], ids=["on one rank", "on all ranks"])
def test_f5_a_parameter_without_a_gradient_is_named(who: tuple[int, ...]) -> None:
    first, second = ranks.run(2, _unused, who, False)
    assert first == second
    assert (
        ("unit 'blocks.0'" in first) if len(who) == 1 else first.startswith("no gradient is ready for 'blocks.0.p0'.")
    )
    assert "find_unused_parameters=True" in first


@pytest.mark.parametrize("who", [(1,), (0, 1)], ids=["on one rank", "on all ranks"])
def test_unused_parameters_count_as_zero(who: tuple[int, ...]) -> None:
    answers = ranks.run(2, _unused, who, True)
    if len(who) == 1 and not UNUSED_COUNT_AS_ZERO:
        assert "torch >= 2.13" in answers[0]
        return
    for rank, answer in enumerate(answers):
        assert isinstance(answer, list), answer
        sums = sum(0.5 * noise(seed, r, SHAPES)[1] for seed in (1, 2) for r in range(2) if r not in who)
        if isinstance(sums, int):
            assert answer[1] is None
        else:
            assert answer[1] == bits([sums[3 * rank : 3 * rank + 3]])


def _unused_between(rank: int, world: int, bucket_size: int | None, main: torch.dtype, early: bool) -> None:
    """A parameter that no rank used must keep the gradient that it had, or have none, whatever its unit sends."""
    if early:
        unit_exchange.UNITS_IN_FLIGHT = 1  # sums arrive before the ranks know which parameters were unused
    checked = policy(FP32, main, bucket_size=bucket_size)
    model = torch_ext.parallelize(Blocks(), checked, strategy=FULLY, find_unused_parameters=True)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    params = list(model.parameters())

    def backward(seed: int, *without: int) -> list[Any]:
        grads = _grads(rank, seed)
        for i in without:
            grads[i] = None
        model(grads).backward()
        return gradients(model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def kept(before: list[bytes], now: list[bytes]) -> list[int]:
        return [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a and a == b]

    before = bits(backward(1))
    assert kept(before, bits(backward(2, 1, 4))) == [1, 4], "one of a unit's, and all of another's"
    step()
    before = bits([p.to_local() for p in params])
    assert [i for i, grad in enumerate(backward(3, 1, 4)) if grad is None] == [1, 4]
    step()
    assert kept(before, bits([p.to_local() for p in params])) == [1, 4]
    assert [i for i, p in enumerate(params) if float(optimizer.state[p]["step"]) == 1.0] == [1, 4]
    assert all(grad is not None for grad in backward(4)), "as before"
    step()
    # A parameter that one rank used, or whose gradient FSDP2 kept for a later backward, does have a gradient.
    assert all(grad is not None for grad in backward(5, *([1, 4] if rank == 0 else [])))
    step()
    model.set_requires_gradient_sync(False)
    backward(6)
    model.set_requires_gradient_sync(True)
    assert all(grad is not None for grad in backward(7, 1, 4))


@pytest.mark.parametrize(
    ("bucket_size", "main", "early"),
    [
        pytest.param(1, FP32, False, id="each block"),
        pytest.param(1, FP32, True, id="sums that are there early"),
        pytest.param(1, BF16, False, id="kept by the engine"),
        pytest.param(None, FP32, False, id="blocks that share a unit"),
    ],
)
@pytest.mark.skipif(not UNUSED_COUNT_AS_ZERO, reason="FSDP2 of torch < 2.13 sends no zeros")
def test_d8_what_no_rank_used_is_left_alone(bucket_size: int | None, main: torch.dtype, early: bool) -> None:
    ranks.run(2, _unused_between, bucket_size, main, early)


def _skips_a_unit(rank: int, world: int, which: slice) -> str:
    """Rank 0's loss leaves out the parameters in `which`, all of a unit; returns the error."""
    model = _parallel()
    grads = _grads(rank)
    if rank == 0:
        grads[which] = [None] * len(grads[which])
    return _error(lambda: model(grads).backward())


def test_f5_a_rank_that_skips_a_unit() -> None:
    first, second = ranks.run(2, _skips_a_unit, slice(1, 4))
    assert first == second
    assert "unit 'blocks.0' (rank 0 0 elements in 0 reductions, rank 1 28 elements in 1 reductions)" in first


def test_f5_a_rank_that_skips_a_unit_whose_sum_is_waited_for() -> None:
    """More units than may be in flight: the sum is waited for before backward ends, so only the time-out can tell."""
    first, second = ranks.run(2, _skips_a_unit, slice(5, 8), timeout=2.0)
    assert "rank 1 did not respond" in first
    assert "gradients of cycle 0, unit 'blocks.2': rank 0 did not respond" in second and "Timed out" in second


def _freezes_a_unit(rank: int, world: int) -> str:
    model = _parallel()
    if rank == 0:
        model.blocks[2].requires_grad_(False)
    return _error(lambda: model(_grads(rank)).backward())


def test_a_unit_that_is_frozen_on_one_rank_is_named_where_its_sum_is_waited_for() -> None:
    first, second = ranks.run(2, _freezes_a_unit, timeout=5.0)
    for message in (first, second):
        assert "with 'blocks.2." in message and "frozen since parallelize" in message, message
    # Rank 0 waits in two calls, for a sum and at the end of the cycle. Either may fail first.
    waits = r"(end of gradient cycle 0|gradients of cycle 0, unit 'blocks.\d')"
    assert re.search(rf"rank 0 in \"{waits}, with 'blocks.2", second), second


# -- ranks that are lost --------------------------------------------------------------------------------------------


def _dies(rank: int, world: int) -> None:
    """Rank 1 dies in its second backward."""
    model = _parallel()
    model(_grads(rank)).backward()
    if rank == 1:
        model.blocks[0].register_full_backward_hook(lambda *_: os._exit(7))
    for _ in range(2):
        model(_grads(rank)).backward()


def test_a_rank_that_dies_in_backward_is_a_message_on_the_others() -> None:
    answers = ranks.outcomes(3, _dies)
    assert answers[1] == Died(7)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised) and answer.kind == "RuntimeError"
        assert "did not respond" in answer.message or "cannot be reached" in answer.message
        assert any(what in answer.message for what in ("weights of unit", "gradients of cycle", "end of gradient"))


def _lags(rank: int, world: int) -> str:
    """Rank 1 is later than the time-out. Returns the error, which step() and the next backward must repeat."""
    model = _parallel()
    model(_grads(rank)).backward()
    if rank == 1:
        time.sleep(6.0)
    message = _error(lambda: model(_grads(rank)).backward())
    optimizer = torch_ext.AdamW(model.parameters())
    assert _error(optimizer.step) == f"step() after an exchange that failed: {message}"
    assert message in _error(lambda: model(_grads(rank)).backward())
    return message


def test_a_rank_that_lags_beyond_the_timeout_is_named() -> None:
    first, _, third = ranks.run(3, _lags, timeout=2.0)
    for message in (first, third):
        assert "weights of the root's unit: rank 1 did not respond" in message and "Timed out" in message


# -- exceptions in user code ----------------------------------------------------------------------------------------


def _goes_on(rank: int, world: int, then: str, main: torch.dtype, where: str) -> str:
    """Raises in a backward, then goes on as `then` says. where: before any unit, or with units in flight."""
    model = _parallel(FP32, main)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.0)
    model(_grads(rank, 1)).backward()

    def fail(*_: Any) -> None:
        raise KeyError

    if where == "at once":
        loss = model(_grads(rank, 2))
        loss.register_hook(fail)
    else:
        handle = model.blocks[0].register_full_backward_pre_hook(fail)
        loss = model(_grads(rank, 2))
        handle.remove()
    with pytest.raises(KeyError):
        loss.backward()
    if not RECOVERS:
        return _error(optimizer.zero_grad)
    if then == "step":
        optimizer.step()  # steps the first micro-batch; the one that failed is lost
        _check(model, [1], world, main)
    if then != "next":
        optimizer.zero_grad() if then == "step" else model.zero_grad()
        model(_grads(rank, 3)).backward()
        _check(model, [3], world, main)
    else:
        model(_grads(rank, 3)).backward()
        _check(model, [1, 3], world, main)
    return ""


@pytest.mark.parametrize("main", [FP32, BF16], ids=["in .grad", "kept by the engine"])
@pytest.mark.parametrize("then", ["step", "zero_grad", "next"])
@pytest.mark.parametrize("where", ["at once", "with units on their way"])
def test_training_goes_on_after_an_exception(where: str, then: str, main: torch.dtype) -> None:
    for answer in ranks.run(2, _goes_on, then, main, where):
        assert answer == "" if RECOVERS else "torch >= 2.13" in answer


def _drops(rank: int, world: int) -> str:
    """Goes on after an error, with an FSDP2 that drops gradients when it recovers."""
    reset = FSDPModule.reset_iter_state

    def drop(module: Any) -> None:
        reset(module)
        for param in module.parameters():
            param.grad = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "reset_iter_state", drop)
        return _goes_on(rank, world, "step", FP32, "at once")


@needs_recovery
def test_gradients_outlive_a_recovery_in_which_fsdp2_drops_them() -> None:
    """From torch 2.15 on FSDP2 does."""
    assert ranks.run(2, _drops) == ["", ""]


def _fail(*_: Any) -> None:
    raise KeyError


def _forward_raises(rank: int, world: int, reshard: Any, kept: int) -> None:
    """After a forward that raised, a unit must keep as much of its weights as after one that did not.

    kept: quarters of the weights that are here after a forward: those of the shard, of two shards, or all."""
    model = Blocks(FP32)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    torch_ext.parallelize(model, policy(FP32), strategy="optim_grads_params")
    block = model.blocks[1]
    shard = block.p0

    def here() -> int:
        p: Any = block.p0
        return 4 * (p.to_local() if hasattr(p, "to_local") else p).numel() // p.numel()

    with torch.no_grad():
        model(_grads(rank, 1))
        assert here() == kept
        handle = block.register_forward_pre_hook(_fail)  # runs after FSDP2's hook
        for drops in (torch_ext.sync_parameters, torch_ext.offload):
            with pytest.raises(KeyError):
                model(_grads(rank, 1))
            for _ in range(2):
                drops(model)
            assert block.p0 is shard, "what is stale after a step is dropped"
            torch_ext.onload(model)
        handle.remove()
        model(_grads(rank, 1))
        assert here() == kept


@pytest.mark.parametrize(
    ("reshard", "kept"), [(True, 1), (False, 4), (2, 2)], ids=["sharded", "whole", "over two ranks"]
)
def test_a_unit_is_kept_as_before_after_a_forward_that_raised(reshard: Any, kept: int) -> None:
    ranks.run(4, _forward_raises, reshard, kept)


def _whole_gradients(rank: int, world: int, then: str) -> None:
    """Unsharded gradients that FSDP2 has not reduced yet: the first parallelize must keep the user's; a second one
    drops them, as it drops sharded gradients."""
    model: Any = Blocks()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if then != "the user's":
        torch_ext.parallelize(model, policy(), strategy=FULLY)
    if then == "of a backward that raised":
        handle = model.blocks[0].register_full_backward_pre_hook(_fail)
        loss = model(_grads(rank, 1))
        handle.remove()
        with pytest.raises(KeyError):
            loss.backward()
        model.zero_grad()
    else:
        model.set_requires_gradient_sync(False)
        model(_grads(rank, 1)).backward()
        model.set_requires_gradient_sync(True)
    for _ in range(1 if then == "the user's" else 2):
        torch_ext.parallelize(model, policy(), strategy=FULLY)
    model(_grads(rank, 2)).backward()
    sent = [noise(2, r, SHAPES) for r in range(world)]
    if then == "the user's":
        sent = [[a + b for a, b in zip(noise(1, r, SHAPES), sent[r], strict=True)] for r in range(world)]
    for param, grad, first, second in zip(model.parameters(), gradients(model), *sent, strict=True):
        assert grad is not None and bits([grad]) == bits([shard_of(param, (first + second) * 0.5)])


@pytest.mark.parametrize(
    "then", [pytest.param("of a backward that raised", marks=needs_recovery), "of an engine before", "the user's"]
)
def test_whole_gradients_at_parallelize(then: str) -> None:
    ranks.run(2, _whole_gradients, then)


def _parallelizes_again(rank: int, world: int, before: str) -> None:
    """Parallelizes again after a forward without a backward, or one that raised: the root's unit is unsharded then."""
    model = Blocks()
    if before == "the user's":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        torch_ext.parallelize(model, policy(bucket_size=1), strategy=FULLY)
        model(_grads(rank, 1)).backward()
    if before == "raised":
        handle = model.blocks[1].register_forward_hook(_fail)
        with pytest.raises(KeyError):
            model(_grads(rank, 2))
        handle.remove()
    else:
        with torch.no_grad():
            model(_grads(rank, 2))
    torch_ext.parallelize(model, policy(bucket_size=1), strategy=FULLY)
    model(_grads(rank, 3)).backward()
    _check(model, [3], world)


@pytest.mark.parametrize("before", ["evaluated", "raised", "the user's"])
def test_parallelize_after_a_forward(before: str) -> None:
    ranks.run(2, _parallelizes_again, before)


def _some_were_added(rank: int, world: int) -> None:
    """With as many units in flight as are allowed, sums are added before backward ends: step() must then raise."""
    unit_exchange.UNITS_IN_FLIGHT = 1
    model = _parallel()
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.0)
    model(_grads(rank, 1)).backward()

    def fail(*_: Any) -> None:
        raise KeyError

    handle = model.blocks[0].register_full_backward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(_grads(rank, 2)).backward()
    handle.remove()
    if RECOVERS:
        assert "repeat the micro-batches" in _error(optimizer.step)
        optimizer.zero_grad()
        optimizer.step()
        model(_grads(rank, 3)).backward()
        _check(model, [3], world)
        optimizer.step()


def test_a_sum_that_was_added_to_is_not_stepped() -> None:
    ranks.run(2, _some_were_added)


# -- changes that would lose gradients ------------------------------------------------------------------------------


def _changes(rank: int, world: int, what: str) -> str:
    """Changes the model after parallelize; returns the next backward's error."""
    model = Blocks()
    model.blocks[1].p0.requires_grad_("thaw" not in what)
    torch_ext.parallelize(model, policy(bucket_size=1), strategy=FULLY)
    model(_grads(rank)).backward()
    model.zero_grad()
    if what == "thaw":
        model.blocks[1].p0.requires_grad_(True)
    elif what == "thaw in forward":  # after parallelize's own check

        def thaw(*_: Any) -> None:
            model.blocks[1].p0.requires_grad_(True)

        model.blocks[0].register_forward_pre_hook(thaw)
    elif what == "assign":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    elif what == "hook":
        model.blocks[0].set_all_reduce_hook(lambda output: None)
    elif what == "factor":
        model.blocks[0].set_gradient_divide_factor(4.0)
        model.blocks[0].set_force_sum_reduction_for_comms(True)
    return _error(lambda: model(_grads(rank)).backward())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("thaw", "'blocks.1.p0' was thawed"),
        ("thaw in forward", "a parameter of unit 'blocks.1' that parallelize did not plan for"),
        ("assign", "'own' is another tensor now"),
        ("hook", "set_all_reduce_hook"),
        ("factor", "gradient_divide_factor"),
    ],
)
def test_a_change_that_would_lose_gradients_is_named(what: str, message: str) -> None:
    for answer in ranks.run(2, _changes, what):
        assert message in answer


# -- models that cannot be parallelized ------------------------------------------------------------------------------


def _replicas_in_bf16(rank: int, world: int) -> Any:
    """HSDP whose replicas FSDP2 would add in bf16."""
    model = Blocks(BF16)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    torch_ext.parallelize(model, policy(BF16), strategy=FULLY)
    model(_grads(rank)).backward()


def _scaled_in_fp16(rank: int, world: int) -> Any:
    """fp16 gradients that FSDP2 would scale in fp16."""
    model = Blocks(FP16)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    torch_ext.parallelize(model, policy(FP16), strategy=FULLY)
    model(_grads(rank)).backward()


def _half_sharded(rank: int, world: int) -> Any:
    """Only one block of the model is sharded."""
    model = Blocks()
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (world,)))
    torch_ext.parallelize(model, policy(), strategy=FULLY)


def _sharded_elsewhere(rank: int, world: int) -> Any:
    """The model is sharded over other ranks than process_group."""
    model = Blocks()
    groups = [torch.distributed.new_group([2 * i, 2 * i + 1]) for i in range(2)]
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    torch_ext.parallelize(model, policy(), strategy=FULLY, process_group=groups[rank // 2])


def _hooked(rank: int, world: int) -> Any:
    """A parameter has a hook that runs after its gradient is accumulated."""
    model = Blocks()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model.own.register_post_accumulate_grad_hook(lambda param: None)
    torch_ext.parallelize(model, policy(), strategy=FULLY)


def _empty(rank: int, world: int) -> Any:
    """A parameter has no elements."""
    model = Blocks()
    model.blocks[0].p1 = torch.nn.Parameter(torch.zeros(0, 3))
    torch_ext.parallelize(model, policy(), strategy=FULLY)


def _two_dtypes_in_a_module(rank: int, world: int) -> Any:
    """A module has parameters of two dtypes."""
    model = Blocks(BF16)
    model.blocks[0].p1 = torch.nn.Parameter(torch.zeros(4))
    torch_ext.parallelize(model, policy(BF16), strategy=FULLY)


def _sharded_already(rank: int, world: int) -> Any:
    """The model is sharded and another strategy is requested."""
    torch_ext.parallelize(_parallel(), policy(), strategy="no_shard")


def _has_state(rank: int, world: int) -> Any:
    """An optimizer has state for the parameters."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    model(_grads(rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_ext.parallelize(model, policy(), strategy=FULLY)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            _replicas_in_bf16,
            ["the root's unit: FSDP2 would add up the 2 replicas in torch.bfloat16", "reduce_dtype=torch.float32"],
        ),
        (_scaled_in_fp16, ["the root's unit: FSDP2 would scale", "in torch.float16", "reduce_dtype=torch.float32"]),
        (_half_sharded, ["'own' is not sharded", "fully_shard"]),
        (_sharded_elsewhere, ["'own' is sharded over ranks [0, 1, 2, 3]", "process_group"]),
        (_hooked, ["'own' has hooks", "after backward"]),
        (_empty, ["'blocks.0.p1' has no elements"]),
        (_two_dtypes_in_a_module, ["Block", "torch.bfloat16 and torch.float32"]),
        (_sharded_already, ["'own' is a", "no_shard takes plain parameters"]),
        (_has_state, ["an optimizer (AdamW) has state for parameter 'own'"]),
    ],
)
def test_what_is_not_legal_says_so_on_every_rank(body: Any, words: list[str]) -> None:
    for answer in ranks.outcomes(4, body):
        assert isinstance(answer, Raised), answer
        for word in words:
            assert word in answer.message


def _unlike(rank: int, world: int) -> None:
    """The ranks have sharded different blocks."""
    mesh = init_device_mesh("cpu", (world,))
    model = Blocks()
    for block in model.blocks[rank:]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch_ext.parallelize(model, policy(), strategy=FULLY)


def test_ranks_with_other_units() -> None:
    for answer in ranks.outcomes(2, _unlike):
        assert isinstance(answer, Raised) and "rank 1 differs" in answer.message
        assert "rank 0 has \"unit 'blocks.0'" in answer.message
