"""grad_comm_dtype="fp8": the codes that are sent, that they depend on the parameter only, and the error."""

import ctypes
from typing import Any

import c_api
import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, gradients, noise, policy, whole_gradients

import torch_ext

SHAPES: list[Any] = [(3, 5), (700,), (0,), (129,), (16, 130), (1,)]


# The seeds of rounding: of what a rank sends (its number is added), and of sums.
SEED_OF_PARTS, SEED_OF_SUMS = 0x5EED_0000_0000, 0x5EED_8000_0000
NONE = torch.empty(0)


def _through_8_bits(values: torch.Tensor, param: int, seed: int, cycle: int) -> torch.Tensor:
    """Returns what 8 bits keep of a parameter's values, with the operator applied to this parameter only."""
    id_of = c_api.function("tx_param_id", ctypes.c_char_p, restype=ctypes.c_int64)
    flat = values.reshape(-1).contiguous()
    codes = torch.empty(flat.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-flat.numel() // 128), dtype=torch.uint8)
    decoded = torch.empty(flat.numel())
    if flat.numel():
        meta = torch.tensor([[id_of(f"p{param}".encode()), 0, 0]])
        torch.ops.torch_ext.cast_([flat], [codes], [], [scales], meta, 0, 1, seed, cycle)
        torch.ops.torch_ext.cast_([codes], [decoded], [scales], [], NONE, 0, 0, 0, 0)
    return decoded.view(values.shape)


def _expected(world: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the fp32 means of each rank's values after 8 bits."""
    grads = [noise(step, r, SHAPES, dtype) for r in range(world)]
    means = []
    for i in range(len(SHAPES)):
        total = torch.zeros(SHAPES[i])
        for r in range(world):
            total = total + _through_8_bits(grads[r][i], i, SEED_OF_PARTS + r, step)
        means.append(total * (1.0 / world))
    return means


def _reduced(rank: int, world: int, strategy: str, size: int | None, main: Any, gather: Any) -> list[list[bytes]]:
    """Returns what the optimizers read after each of two backwards."""
    chosen = policy(BF16, main, "fp8", bucket_size=size, grad_gather_dtype=gather)
    model = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy)
    found = []
    for step in range(2):
        model(noise(step, rank, SHAPES, BF16)).backward()
        found.append(bits(whole_gradients(model)))
        model.zero_grad()
    return found


def _cases(rank: int, world: int, cases: list[Any]) -> list[Any]:
    return [_reduced(rank, world, *case) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_are_those_of_the_codes_in_rank_order(world: int) -> None:
    cases = [
        (s, size, main, None) for s in ("optim", "optim_grads") for size in (None, 1, 900) for main in (FP32, None)
    ]
    by_rank = ranks.run(world, _cases, cases)
    for answers in by_rank:
        for (_, _, main, _), steps in zip(cases, answers, strict=True):
            for step, answer in enumerate(steps):
                assert answer == bits([mean.to(main or BF16).float() for mean in _expected(world, step, BF16)])


@pytest.mark.parametrize("world", [2, 3])  # with two ranks, the parts themselves may be exchanged instead of sums
@pytest.mark.parametrize("gather", [None, "bf16", "fp32", "fp8"])
def test_no_shard_gathers_in_grad_gather_dtype(gather: str | None, world: int) -> None:
    cases = [("no_shard", size, main, gather) for size in (None, 1, 900) for main in (FP32, None)]
    by_rank = ranks.run(world, _cases, cases)
    for answers in by_rank:
        for (_, _, main, _), steps in zip(cases, answers, strict=True):
            for step, answer in enumerate(steps):
                means = _expected(world, step, BF16)
                if gather == "fp8":
                    means = [_through_8_bits(m, i, SEED_OF_SUMS, step) for i, m in enumerate(means)]
                elif gather != "fp32":
                    means = [mean.to(BF16) for mean in means]
                assert answer == bits([mean.to(main or BF16).float() for mean in means])


def _bytes_sent(rank: int, world: int, strategy: str, wire: str, gather: str | None) -> float:
    """Returns the bytes that the gradients' exchange sends, as a fraction of those of an fp32 all-reduce."""
    numel = 3 << 15
    # Compressed messages, which a slow link gets, would be smaller; the link of a busy machine is slow.
    chosen = policy(BF16, None, wire, grad_gather_dtype=gather, grad_comm_compression="off")
    model = torch_ext.parallelize(Given([numel], BF16), chosen, strategy=strategy)
    model([torch.ones(numel)]).backward()
    return model.wire_bytes() / (2 * 4 * numel * (world - 1) / world)


_CODED = 1 + 1 / 128  # bytes per element, with its part of a scale


@pytest.mark.parametrize(
    ("strategy", "wire", "gather", "there", "back", "traded"),
    [
        pytest.param("no_shard", "bf16", None, 2, 2, False, id="no_shard, bf16"),
        pytest.param("no_shard", "bf16", "fp8", 2, _CODED, False, id="no_shard, bf16, gathered in fp8"),
        pytest.param("no_shard", "fp8", None, _CODED, 2, True, id="no_shard, fp8, gathered in bf16"),
        pytest.param("no_shard", "fp8", "fp8", _CODED, _CODED, False, id="no_shard, fp8, gathered in fp8"),
        pytest.param("optim", "fp8", None, _CODED, 0, False, id="optim, fp8 (weights are gathered by the step)"),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_on_the_wire(
    world: int, strategy: str, wire: str, gather: str | None, there: float, back: float, traded: bool
) -> None:
    """there, back: bytes per element. traded: two ranks exchange all codes instead of sums, where that is less."""
    share = (2 * there if traded and world == 2 else there + back) / 8
    for answer in ranks.run(world, _bytes_sent, strategy, wire, gather):
        assert share <= answer < share + 0.001, "a report of some bytes comes with every cycle"


def test_the_mean_of_many_ranks_is_better_than_one_rank_says() -> None:
    """Rounding thresholds differ between ranks. With equal ones the mean's error would be one rank's."""
    gradient = noise(3, 0, [(4096,)])[0]
    worlds = [1, 4, 16]
    errors = []
    for world in worlds:
        total = sum(_through_8_bits(gradient, 0, SEED_OF_PARTS + r, 0).double() for r in range(world)) / world
        errors.append(float((total - gradient.double()).norm() / gradient.double().norm()))
    assert 0.005 < errors[0] < 0.05
    assert errors[1] < 0.7 * errors[0] and errors[2] < 0.7 * errors[1]


def _nan(rank: int, world: int, strategy: str) -> list[bool]:
    """Rank 1 has NaN and infinity; returns which gradients are finite."""
    model = torch_ext.parallelize(Given(SHAPES, BF16), policy(BF16, FP32, "fp8"), strategy=strategy)
    grads = noise(0, rank, SHAPES, BF16)
    if rank == 1:
        grads[1][3] = float("nan")
        grads[4][0, 0] = float("inf")
    model(grads).backward()
    return [bool(grad.isfinite().all()) for grad in gradients(model) if grad is not None]


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_what_is_not_finite_arrives(strategy: str) -> None:
    answers = ranks.run(2, _nan, strategy)
    anywhere = [all(flags) for flags in zip(*answers, strict=True)]
    assert anywhere == [True, False, True, True, False, True]
