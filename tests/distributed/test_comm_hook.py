"""register_comm_hook: the bits are no_shard's. Where something goes wrong, every rank gets our message."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, noise, on_all_ranks, policy
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES = [(4,), (200,), (3,), (500,)]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one bucket": {"bucket_cap_mb": 25},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "collectives": {},
}


def _hooked(way: str = "plain", **ddp: Any) -> Any:
    """Returns a DDP model with our hook; it has several buckets after the first backward, except for "one bucket"."""
    group = ranks.group_with_collectives() if way == "collectives" else None
    model = DistributedDataParallel(Given(SHAPES), process_group=group, **({"bucket_cap_mb": 0.0001} | WAYS[way]))
    torch_ext.register_comm_hook(model, policy(**ddp))
    return model


def _is_mean(model: Any, step: int, world: int) -> bool:
    """Whether the gradients are the mean of the ranks' noise of this step."""
    each = [noise(step, rank, SHAPES) for rank in range(world)]
    return all(
        torch.allclose(p.grad, torch.stack(grads).mean(0), atol=1e-6)
        for p, grads in zip(model.parameters(), zip(*each, strict=True), strict=True)
    )


# -- the bits -----------------------------------------------------------------------------------------------------

SHAPES_OF_ALL_KINDS: list[Any] = [(), (300,), (1,), (0, 3), (127,), (129, 3), (4, 6, 3, 3), (5000,), (2,)]
DTYPES = {  # of parameters, gradients, wire, gathered sums
    "fp8": (FP32, None, "fp8", None),
    "fp8, gathered in fp8": (FP32, None, "fp8", "fp8"),
    "bf16 in fp8": (BF16, "bf16", "fp8", None),
    "bf16, gathered in fp8": (FP32, None, "bf16", "fp8"),
    "bf16, gathered in fp32": (FP32, None, "bf16", "fp32"),
}


def _model_of_all_kinds(dtype: torch.dtype) -> Any:
    """Returns a model with parameters of all shapes, one transposed and one channels_last."""
    model = Given(SHAPES_OF_ALL_KINDS, dtype)
    model.p5.data = torch.zeros(3, 129, dtype=dtype).t()
    model.p6.data = model.p6.data.to(memory_format=torch.channels_last)
    return model


def _trained(model: Any, rank: int) -> list[list[bytes]]:
    """Returns the gradients of three backwards."""
    found = []
    for step in range(3):
        model.zero_grad()
        grads = noise(step, rank, SHAPES_OF_ALL_KINDS)
        model(grads).backward()
        found.append(bits([p.grad for p in model.parameters()]))
    return found


def _as_no_shard(rank: int, world: int, dtypes: Any, **options: Any) -> None:
    """With buckets of any size, and with any transport, DDP's gradients must be no_shard's."""
    dtype, main, wire, gather = dtypes
    chosen = policy(dtype, main, wire, grad_gather_dtype=gather)
    expected = _trained(torch_ext.parallelize(_model_of_all_kinds(dtype), chosen, strategy="no_shard", **options), rank)
    for transport in ("point to point", "collectives"):
        group = ranks.group_with_collectives() if transport == "collectives" else None
        for cap_mb in (25, 0.002, 0.00001):
            model = DistributedDataParallel(_model_of_all_kinds(dtype), process_group=group, bucket_cap_mb=cap_mb)
            torch_ext.register_comm_hook(model, chosen, **options)
            assert _trained(model, rank) == expected, f"{transport}, DDP's buckets of {cap_mb} MB"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_bits_are_those_of_no_shard_whatever_ddps_buckets_are(world: int, dtypes: Any) -> None:
    ranks.run(world, _as_no_shard, dtypes)


def _divided(rank: int, world: int, dtypes: Any, factor: float) -> None:
    """A gradient_divide_factor must divide the sums, as no_shard divides them."""
    _as_no_shard(rank, world, dtypes, gradient_divide_factor=factor)
    model = DistributedDataParallel(Given(SHAPES))
    torch_ext.register_comm_hook(model, policy(wire="fp32"), gradient_divide_factor=factor)
    grads = [noise(0, each, SHAPES) for each in range(world)]
    model(grads[rank]).backward()
    for p, of_ranks in zip(model.parameters(), zip(*grads, strict=True), strict=True):
        torch.testing.assert_close(p.grad, torch.stack(of_ranks).sum(0) / factor)


@pytest.mark.parametrize("factor", [1.0, 0.75, 6.0])
@pytest.mark.parametrize("dtypes", [DTYPES["fp8"], DTYPES["bf16, gathered in fp32"]], ids=["fp8", "bf16"])
def test_sums_are_divided_by_the_factor_as_no_shard_divides_them(dtypes: Any, factor: float) -> None:
    ranks.run(2, _divided, dtypes, factor)


def _refused_factor(rank: int, world: int, factors: list[float]) -> str:
    model = DistributedDataParallel(Given(SHAPES))
    with pytest.raises((ValueError, RuntimeError)) as raised:
        torch_ext.register_comm_hook(model, policy(), gradient_divide_factor=factors[rank])
    return str(raised.value)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        pytest.param([2.0, 0.0], ["gradient_divide_factor is 0.0; a finite number > 0 is legal"], id="zero"),
        pytest.param([float("nan"), 2.0], ["gradient_divide_factor is nan"], id="no number"),
        pytest.param([2.0, 1.0], ["divide by 2.0", "divide by 1.0"], id="different ones"),
    ],
)
def test_a_factor_that_is_not_legal_or_not_equal_is_refused_on_every_rank(
    factors: list[float], words: list[str]
) -> None:
    for message in ranks.run(2, _refused_factor, factors):
        assert all(word in message for word in words), message


LONG = [(300_001,), (3,), (129, 7), (700_000,)]


def _cut(rank: int, world: int, wire: str, dtype: torch.dtype) -> None:
    """A slow link makes the hook cut buckets inside parameters, and compress bf16. The bits must be a fast link's."""
    found, messages = [], []
    for gbps in (1000, 0.1):
        model = DistributedDataParallel(Given(LONG, dtype))
        state = torch_ext.register_comm_hook(model, policy(dtype, wire=wire, link_gbps=gbps))
        for step in range(2):
            model.zero_grad()
            model(noise(step, rank, LONG)).backward()
        found.append(bits([p.grad for p in model.parameters()]))
        assert state._connection is not None
        messages.append(state._connection.messages)
    assert found[0] == found[1]
    assert messages[0] <= 2 < 4 <= messages[1], messages


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("wire", "dtype"), [("fp32", FP32), ("bf16", BF16), ("fp8", FP32)], ids=["fp32", "bf16", "fp8"]
)
def test_bits_are_the_same_wherever_buckets_are_cut(world: int, wire: str, dtype: torch.dtype) -> None:
    ranks.run(world, _cut, wire, dtype)


def _gathers_differ(rank: int, world: int) -> str:
    model = DistributedDataParallel(Given(SHAPES))
    with pytest.raises(RuntimeError) as raised:
        torch_ext.register_comm_hook(model, policy(wire="fp8", grad_gather_dtype="fp32" if rank else "bf16"))
    return str(raised.value)


def test_ranks_agree_on_what_sums_are_gathered_in() -> None:
    for message in ranks.run(2, _gathers_differ):
        assert "sums gathered in torch.float32" in message and "sums gathered in torch.bfloat16" in message


def _uneven(rank: int, world: int, hooked: bool) -> list[list[float]]:
    """Trains under model.join(): rank r has `world - r` batches, then every rank has one more. Returns the weights."""
    model = DistributedDataParallel(torch.nn.Linear(8, 5), bucket_cap_mb=0.0001)
    if hooked:
        torch_ext.register_comm_hook(model, policy(wire="fp32"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))

    def step(seed: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * rank + seed))
        model(x).square().mean().backward()
        optimizer.step()

    with model.join():
        for seed in range(world - rank):
            step(seed)
    step(9)
    return [p.detach().view(-1).tolist() for p in model.parameters()]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_have_joined_reduce_zeros(world: int) -> None:
    """DDP.join() calls the hook outside of a backward on a rank that has no batch left."""
    found, expected = ranks.run(world, _uneven, True), ranks.run(world, _uneven, False)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == found[0]
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b))


# -- gradients that are not finite -----------------------------------------------------------------------------------


def _nan_then_on(rank: int, world: int, way: str) -> list[str]:
    """Some steps have NaN; the gradients of the other steps must be right. Returns the errors."""
    model = _hooked(way, check_for_nan_in_grad=True)
    messages = []
    for step in range(6):
        grads = noise(step, rank, SHAPES)
        broken = step in (0, 2, 3)
        if broken and rank == 1:
            grads[step][1] = float("nan")
        model.zero_grad()
        if broken:
            with pytest.raises(RuntimeError) as raised:
                model(grads).backward()
            messages.append(str(raised.value))
        else:
            model(grads).backward()
            assert _is_mean(model, step, world), f"step {step}"
    return messages


@pytest.mark.parametrize("way", WAYS)
def test_after_a_gradient_that_is_not_finite_the_next_backward_is_right(way: str) -> None:
    first, second = ranks.run(2, _nan_then_on, way)
    assert first == second
    for i, message in zip((0, 2, 3), first, strict=True):
        assert message == (f"gradients with NaN or Inf before communication (check_for_nan_in_grad): 'p{i}' on rank 1")


def _raises_later(rank: int, world: int) -> None:
    """An error that zero_grad() has cleared must not block step() after a later backward in which the user's own code
    raised: the gradients are then the user's affair, as without a hook."""
    model = _hooked(check_for_nan_in_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grads = noise(0, rank, SHAPES)
    grads[0][0] = float("nan")
    with pytest.raises(RuntimeError, match="NaN or Inf"):
        model(grads).backward()
    model.zero_grad()

    def stop(_: Any) -> None:
        raise KeyError("the user's")

    handle = model.module.p0.register_hook(stop)  # p0's gradient comes last
    with pytest.raises(KeyError):
        model(noise(1, rank, SHAPES)).backward()
    handle.remove()
    optimizer.step()


def test_a_step_after_a_backward_in_which_the_users_code_raised_is_the_users_own() -> None:
    ranks.run(2, _raises_later)


def _used_by_nobody(rank: int, world: int) -> None:
    """DDP's record of the parameters in use must be that of this backward, not of the one before, which failed."""
    model = _hooked("find_unused_parameters", check_for_nan_in_grad=True)
    grads: list[Any] = noise(0, rank, SHAPES)
    grads[1][0] = float("inf")
    with pytest.raises(RuntimeError, match="'p1' on rank 0, 'p1' on rank 1"):
        model(grads).backward()
    model.zero_grad()
    grads[1] = None
    model(grads).backward()
    assert model.module.p1.grad is None and model.module.p3.grad is not None


def test_a_parameter_that_only_the_failed_backward_used_has_no_gradient_afterwards() -> None:
    ranks.run(2, _used_by_nobody)


def _two_models(rank: int, world: int) -> None:
    """Two models in one backward, of which one has NaN. The other's sums must be right, and the next backward, too."""
    one, two = _hooked(check_for_nan_in_grad=True), _hooked(check_for_nan_in_grad=True)
    for step in range(4):
        grads = noise(step, rank, SHAPES)
        one.zero_grad(), two.zero_grad()
        if step % 2:
            bad = [g.clone() for g in grads]
            bad[0][rank] = float("nan")
            with pytest.raises(RuntimeError, match="'p0' on rank 0, 'p0' on rank 1"):
                (one(bad) + two(grads)).backward()
        else:
            (one(grads) + two(grads)).backward()
            assert _is_mean(one, step, world)
        assert _is_mean(two, step, world)


def test_another_model_in_the_same_backward_goes_on() -> None:
    ranks.run(2, _two_models)


# -- a rank that is lost, or that fails alone ------------------------------------------------------------------------


def _opened(rank: int, world: int, way: str) -> None:
    """Steps with parameters that master_weights() has replaced by their masters in between: ranks must stay equal."""
    model = DistributedDataParallel(Given(SHAPES, BF16), bucket_cap_mb=0.0001, **WAYS.get(way, {}))
    if way != "without our hook":
        torch_ext.register_comm_hook(model, policy(BF16))
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2)
    for step in range(4):
        loss = model(noise(step, rank, SHAPES, BF16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            del loss
        with optimizer.master_weights() as masters:
            for p, master in zip(model.parameters(), masters.values(), strict=True):
                assert p.dtype == FP32 and torch.equal(p, master)
                p.mul_(0.75)
        assert all(each == bits(list(model.parameters())) for each in on_all_ranks(bits(list(model.parameters())))), (
            step
        )


@pytest.mark.parametrize("way", ["without our hook", "plain", "gradient_as_bucket_view"])
def test_gradients_are_reduced_after_parameters_were_their_masters(way: str) -> None:
    ranks.run(2, _opened, way)


def _no_memory(*_: Any) -> Any:
    raise MemoryError("no memory for the bucket")


@contextlib.contextmanager
def _second_bucket_fails(model: Any, where: str) -> Iterator[None]:
    """Makes the second bucket fail: in the hook itself, or on the thread that packs the message."""
    ((_, state),) = model._comm_hooks
    connection, calls = state._connection, []
    reduce, communicator = connection.reduce, connection.communicator
    reduce_scatter = communicator.reduce_scatter

    def fails_in_hook(*args: Any) -> Any:
        calls.append(args)
        return reduce(*args) if len(calls) < 2 else _no_memory()

    def fails_packing(pack: Any, *args: Any, **options: Any) -> Any:
        calls.append(args)
        return reduce_scatter(pack if len(calls) < 2 else _no_memory, *args, **options)

    if where == "hook":
        connection.reduce = fails_in_hook
    else:
        communicator.reduce_scatter = fails_packing
    try:
        yield
    finally:
        connection.reduce, communicator.reduce_scatter = reduce, reduce_scatter


def _fails_in_the_hook(rank: int, world: int, where: str) -> list[str]:
    """Rank 1's hook fails. Returns the errors, of which the later ones must repeat the first."""
    model = _hooked()
    model(noise(0, rank, SHAPES)).backward()
    messages = []
    for _ in range(3):
        model.zero_grad()
        loss = model(noise(1, rank, SHAPES))
        with pytest.raises((RuntimeError, MemoryError)) as raised, contextlib.ExitStack() as stack:
            if rank == 1:
                stack.enter_context(_second_bucket_fails(model, where))
            loss.backward()
        messages.append(str(raised.value))
    assert messages[1:] == [f"gradients cannot be reduced any more: {messages[0]}"] * 2
    return messages


@pytest.mark.parametrize("where", ["hook", "packing"])
def test_an_error_inside_the_hook_is_the_message_and_so_it_stays(where: str) -> None:
    first, second = ranks.run(2, _fails_in_the_hook, where, timeout=3)
    assert second[0] == "no memory for the bucket"
    assert "rank 1 did not respond" in first[0] and "gradients of cycle 1, DDP bucket 1 ('p2' ... 'p1')" in first[0]


def _lags(rank: int, world: int, way: str) -> list[str]:
    """Rank 1 comes later than the time-out. Returns rank 0's errors."""
    model = _hooked(way)
    for step in range(2):  # DDP's own messages to the other ranks come before the second forward
        model.zero_grad()
        model(noise(step, rank, SHAPES)).backward()
    if rank == 1:
        time.sleep(6.0)
        return []
    messages = []
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(RuntimeError) as raised:
            model(noise(1, rank, SHAPES)).backward()
        messages.append(str(raised.value))
    return messages


@pytest.mark.parametrize("way", ["plain", "collectives"])
def test_the_message_of_a_lost_rank_is_the_exchanges_own(way: str) -> None:
    (first, again), _ = ranks.run(2, _lags, way, timeout=3)
    assert "cast" not in first and "time" in first.lower()
    if way == "plain":  # another back end has its own error text
        assert first.startswith("gradients of cycle 2, DDP bucket 0 ('p3' ... 'p3'): rank 1 did not respond (")
        assert first.endswith("this process group cannot be used any more.")
    assert again == f"gradients cannot be reduced any more: {first}"


# -- sparse gradients ---------------------------------------------------------------------------------------------


def _net(sparse: bool) -> Any:
    return torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=sparse), torch.nn.Linear(4, 3))


def _sparse(rank: int, world: int) -> str:
    model = DistributedDataParallel(_net(sparse=True))
    with pytest.raises((ValueError, RuntimeError)) as raised:
        torch_ext.register_comm_hook(model, policy())
    for frozen in (True, False):
        model = _net(sparse=frozen)
        model[0].weight.requires_grad_(not frozen)
        model = DistributedDataParallel(model)
        torch_ext.register_comm_hook(model, policy())
        model(torch.tensor([1, rank])).sum().backward()
    assert model.module[0].weight.grad[1].tolist() == on_all_ranks(model.module[0].weight.grad[1].tolist())[0]
    return str(raised.value)


def test_a_sparse_gradient_is_refused_by_name_before_anything_is_sent() -> None:
    for message in ranks.run(2, _sparse):
        assert (
            message
            == "parameter '0.weight' has a sparse gradient; buckets are dense: build the layer with sparse=False"
        )
