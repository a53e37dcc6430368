"""optim_grads_params: each shard's sum is bucket_reduce_'s, bit for bit, and stays in main_grads_dtype (E3, E6)."""

from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, bits, gradients, noise, policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from units import SHAPES, Blocks, accumulated, mean_of_ranks, shard_of

import torch_ext

STRATEGY = "optim_grads_params"
DTYPES = [
    pytest.param((FP32, FP32, FP32), id="fp32"),
    pytest.param((FP32, FP32, BF16), id="fp32-wire-bf16"),
    pytest.param((BF16, BF16, BF16), id="bf16"),
    pytest.param((BF16, FP32, BF16), id="bf16-main-fp32-wire-bf16"),
    pytest.param((BF16, FP32, FP32), id="bf16-main-fp32-wire-fp32"),
    pytest.param((FP16, FP32, FP32), id="fp16"),
]


def _check(model: torch.nn.Module, expected: list[torch.Tensor], what: Any) -> None:
    """Every shard's gradient must be its part of the expected whole gradient, to the bit."""
    for (name, param), grad, whole in zip(model.named_parameters(), gradients(model), expected, strict=True):
        assert isinstance(param, DTensor)
        want = shard_of(param, whole)
        assert grad is not None and grad.shape == param.to_local().shape == want.shape, (name, what)
        assert bits([grad]) == bits([want.float()]), (name, what)
        if param.grad is not None:
            assert param.grad.dtype == want.dtype and bits([param.grad.to_local()]) == bits([want]), (name, what)


def _sums(
    rank: int,
    world: int,
    dtypes: Any,
    microbatches: int,
    factor: float | None,
    bucket_size: int | None = 1,
    **options: Any,
) -> int:
    """Compares three steps' gradients with the expected means. Returns the bytes that were sent."""
    model = Blocks(dtypes[0])
    model_policy = policy(*dtypes, bucket_size=bucket_size)
    torch_ext.parallelize(model, model_policy, strategy=STRATEGY, gradient_divide_factor=factor, **options)
    all_ranks = range(world)
    for step in range(3):
        seeds = [10 * step + i for i in range(microbatches)]
        for seed in seeds:
            model(noise(seed, rank, SHAPES, dtypes[0])).backward()
        means = [mean_of_ranks(seed, all_ranks, dtypes, factor) for seed in seeds]
        _check(model, accumulated(means, dtypes[1]), f"step {step}")
        for param in model.parameters():
            # E3: no unsharded gradient is left; `.grad` is the shard if the parameter has main_grads_dtype.
            assert (param.grad is None) == (dtypes[0] != dtypes[1])
        model.zero_grad()
        assert all(g is None for g in gradients(model))
    return model.wire_bytes()


def _all_sums(rank: int, world: int, dtypes: Any) -> list[int]:
    return [_sums(rank, world, dtypes, *how) for how in ((1, None), (3, None), (2, 1.5))]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_sums_are_fp32_in_rank_order(world: int, dtypes: Any) -> None:
    for sent in ranks.run(world, _all_sums, dtypes):
        assert all((nbytes > 0) == (world > 1) for nbytes in sent)


@pytest.mark.parametrize("bucket_size", [20, None], ids=["two units", "one unit and the root's"])
def test_the_bits_depend_on_no_units(bucket_size: int | None) -> None:
    ranks.run(2, _sums, (BF16, FP32, BF16), 2, None, bucket_size)


def _collectives(rank: int, world: int, dtypes: Any) -> int:
    return _sums(rank, world, dtypes, 2, None, process_group=ranks.group_with_collectives())


def test_the_bits_depend_on_no_transport() -> None:
    ranks.run(2, _collectives, (BF16, FP32, BF16))


def _bytes_sent(rank: int, world: int, wire: Any) -> int:
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False, dtype=BF16) for _ in range(4)))
    torch_ext.parallelize(model, policy(BF16, FP32, wire), strategy=STRATEGY)
    before = 0
    for _ in range(2):
        before = model.wire_bytes()
        model(torch.ones(1, 128, dtype=BF16)).float().sum().backward()
    return model.wire_bytes() - before


def test_the_wire_has_the_policys_dtype() -> None:
    elements = 4 * 128 * 128 // 2  # half of the gradients
    gathered = 2 * 2 * elements  # bf16 weights, for forward and for backward
    report = sum(ranks.run(2, _bytes_sent, FP32)) // 2 - 2 * elements - gathered
    assert 0 < report < 200, "bf16 gradients are not widened"
    for wire, nbytes in ((BF16, 2 * elements), ("fp8", elements + elements // 128)):
        assert ranks.run(2, _bytes_sent, wire) == [nbytes + gathered + report] * 2


def _shards_of_masters(rank: int, world: int) -> None:
    """fp32 parameters under a policy for bf16: bf16 weights are gathered, fp32 shards are the masters."""
    model = Blocks(FP32)
    torch_ext.parallelize(model, policy(BF16, bucket_size=1), strategy=STRATEGY)
    seen: list[torch.dtype] = []
    model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(m.p0.dtype))
    for seed in (1, 2):
        model(noise(seed, rank, SHAPES, BF16)).backward()
    assert seen == [BF16, BF16] and model.own.dtype == FP32
    means = [mean_of_ranks(seed, range(world), (BF16, FP32, BF16)) for seed in (1, 2)]
    _check(model, accumulated(means, FP32), "masters")
    assert all(p.grad is not None and p.grad.dtype == FP32 for p in model.parameters())


def test_fp32_shards_as_masters() -> None:
    ranks.run(2, _shards_of_masters)


def _by_hand(rank: int, world: int, reduce_dtype: torch.dtype | None, main: torch.dtype) -> None:
    """The user's units must stay, among them one that is no block of a container, with the user's precisions."""
    model = Blocks(BF16)
    mesh = init_device_mesh("cpu", (world,))
    precision = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    before = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    torch_ext.parallelize(model, policy(BF16, main), strategy=STRATEGY)
    assert [name for name, m in model.named_modules() if isinstance(m, FSDPModule)] == before
    for step in range(2):
        for i in range(3):
            model(noise(3 * step + i, rank, SHAPES, BF16)).backward()
        means = [mean_of_ranks(3 * step + i, range(world), (BF16, main, BF16)) for i in range(3)]
        _check(model, accumulated(means, main), f"step {step}")
        model.zero_grad()


@pytest.mark.parametrize("main", [BF16, FP32], ids=["bf16 shards", "fp32 shards"])
@pytest.mark.parametrize("reduce_dtype", [None, FP32], ids=["reduced as computed", "reduced in fp32"])
def test_the_users_units_stay(reduce_dtype: torch.dtype | None, main: torch.dtype) -> None:
    ranks.run(2, _by_hand, reduce_dtype, main)


def _hybrid(rank: int, world: int, deferred: bool, factor: float | None = None) -> list[bytes]:
    """Trains with HSDP: two replicas of two shards. Returns the initial weights."""
    torch.manual_seed(rank)
    model = Blocks(BF16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    precision = MixedPrecisionPolicy(reduce_dtype=FP32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    torch_ext.parallelize(model, policy(BF16, FP32), strategy=STRATEGY, gradient_divide_factor=factor)
    weights = bits([p.to_local() for p in model.parameters()])
    dtypes = (BF16, FP32, BF16)
    for step in range(2):
        seeds = [3 * step + i for i in range(3)]
        for i, seed in enumerate(seeds):
            if deferred:
                model.set_requires_all_reduce(i == 2)
            model(noise(seed, rank, SHAPES, BF16)).backward()
        # The factor is for the sum over all ranks; FSDP2 itself takes the mean over the two replicas.
        of_pair = None if factor is None else factor / 2
        halves = [[mean_of_ranks(seed, pair, dtypes, of_pair) for seed in seeds] for pair in ((0, 1), (2, 3))]
        if deferred:  # FSDP2 first adds micro-batches, then replicas
            sums = [accumulated(half, FP32) for half in halves]
            means = [[(a + b) / 2 for a, b in zip(*sums, strict=True)]]
        else:
            means = [[(a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in zip(*halves, strict=True)]
        _check(model, accumulated(means, FP32), f"step {step}")
        model.zero_grad()
    return weights


@pytest.mark.parametrize(
    ("deferred", "factor"),
    [
        pytest.param(False, None, id="all-reduced every time"),
        pytest.param(True, None, id="all-reduced at the end"),
        pytest.param(False, 3.0, id="divided by three"),
    ],
)
def test_replicated_shards(deferred: bool, factor: float | None) -> None:
    weights = ranks.run(4, _hybrid, deferred, factor)
    assert weights[0] == weights[2] and weights[1] == weights[3], "replicas begin with the same weights"


def _microbatch_error(rank: int, world: int, microbatches: int) -> tuple[float, float]:
    """Returns the relative errors, against float64, with the fp32 shard and with bf16 main gradients."""
    shapes, errors = [(40, 50)], []
    batches = [[noise(b, r, shapes, BF16)[0] for r in range(world)] for b in range(microbatches)]
    exact = torch.stack([torch.stack([g.double() for g in batch]).mean(0) for batch in batches]).sum(0)
    for main in (FP32, BF16):
        model = torch.nn.Sequential(torch.nn.Linear(50, 40, bias=False, dtype=BF16))
        torch_ext.parallelize(model, policy(BF16, main, BF16), strategy=STRATEGY)
        for batch in batches:
            # The gradient of W x summed with weights g is g^T x; x are unit vectors.
            out = model(torch.eye(50, dtype=BF16))
            (out * batch[rank].T).sum().backward()
        (param,) = model.parameters()
        (grad,) = gradients(model)
        assert isinstance(param, DTensor) and grad is not None
        mine = shard_of(param, exact)
        errors.append(float((grad.double() - mine).norm() / mine.norm()))
    return errors[0], errors[1]


def test_error_of_the_fp32_shard() -> None:
    (fp32, _), _ = ranks.run(2, _microbatch_error, 1)
    assert fp32 < 1e-7
    for fp32, bf16 in ranks.run(2, _microbatch_error, 16):
        assert fp32 < 2e-7 and bf16 > 1000 * fp32


def _given_grads(rank: int, world: int) -> None:
    """Gradients are added to what is in `.grad`: None and zeros count as nothing, a user's tensor as itself."""
    model = Blocks(FP32)
    torch_ext.parallelize(model, policy(FP32), strategy=STRATEGY)
    dtypes = (FP32, FP32, FP32)

    def backward(seed: int) -> list[torch.Tensor]:
        model(noise(seed, rank, SHAPES)).backward()
        return mean_of_ranks(seed, range(world), dtypes)

    backward(1)
    for p in model.parameters():
        p.grad = None
    _check(model, backward(2), "None")
    model.zero_grad(set_to_none=False)
    third = backward(3)
    _check(model, third, "zeros")
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 2
    _check(model, [2 * a + b for a, b in zip(third, backward(4), strict=True)], "another tensor")
    with model.no_sync():  # E8: there is no place for gradients that are not reduced
        fifth = backward(5)
    means = [[2 * a for a in third], mean_of_ranks(4, range(world), dtypes), fifth]
    _check(model, accumulated(means, FP32), "no_sync reduces")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
    whole = torch.cat([grad.flatten() for grad in accumulated(means, FP32)])
    assert torch.allclose(norm, whole.norm()), "other people's clipping sees them too"


def test_what_is_in_grad_counts() -> None:
    ranks.run(2, _given_grads)


def _weights_of(rank: int, world: int) -> list[bytes]:
    """Parallelizes a model that differs between ranks; returns its weights and buffers."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    with torch.no_grad():
        model(torch.randn(9, 5))  # buffers that differ
    torch_ext.parallelize(model, policy(), strategy=STRATEGY)
    return bits([p.full_tensor() for p in model.parameters()]) + bits(list(model.buffers()))  # type: ignore[attr-defined]


def test_weights_and_buffers_become_rank_0s() -> None:
    alone, (first, second) = ranks.run(1, _weights_of)[0], ranks.run(2, _weights_of)
    assert alone == first == second
