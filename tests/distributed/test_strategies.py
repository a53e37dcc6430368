"""Sharded strategies: which elements are where (E2, E3), exact numbers (E4, E5), the step, and equal bits."""

from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, Given, bits, gradient, noise, policy

import torch_ext

SHARDED = ["optim", "optim_grads"]
STRATEGIES = ["no_shard", *SHARDED]

# -- E4, E5: the exact numbers ------------------------------------------------------------------------------------

A = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
B = ([1.0] * 4, [3.0] * 4)
MEAN_A, SUM_A = [3.0, 4.0, 5.0, 6.0], [6.0, 8.0, 10.0, 12.0]
MEAN_AB, SUM_AB = [5.0, 6.0, 7.0, 8.0], [10.0, 12.0, 14.0, 16.0]
DTYPES = [
    (FP32, None, None),
    (BF16, None, None),
    (BF16, FP32, FP32),
    (BF16, FP32, BF16),
    (FP32, FP32, BF16),
    (FP16, None, None),
]


class Quarters(torch.nn.Module):
    """Four numbers; with two ranks the first two are in rank 0's shard and the last two in rank 1's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.p0 = torch.nn.Parameter(torch.zeros(256, dtype=dtype))

    def forward(self, numbers: list[float]) -> torch.Tensor:
        grad = torch.zeros(256, dtype=self.p0.dtype)
        grad[:2], grad[128:130] = torch.tensor(numbers[:2]), torch.tensor(numbers[2:])
        return (self.p0 * grad).sum()


def _shard_of(model: Any) -> list[float]:
    """Returns the two numbers that this rank's optimizer reads."""
    grad = gradient(model, model.p0)
    assert grad is not None and grad.numel() == 128 and not grad[2:].any()
    return grad[:2].tolist()


def _microbatches(rank: int, world: int, strategy: str, dtypes: Any, factor: float | None, how: str) -> Any:
    """Runs the micro-batches A, or A and B, in one of several ways; returns this rank's gradient."""
    model = Quarters(dtypes[0])
    torch_ext.parallelize(model, policy(*dtypes), strategy=strategy, gradient_divide_factor=factor)
    a, b = list(A[rank]), list(B[rank])
    if how == "one":
        model(a).backward()
    elif how == "no_sync":
        with model.no_sync():
            model(a).backward()
        model(b).backward()
    else:
        model(a).backward()
        if how == "zeroed":
            model.zero_grad()
        model(b).backward()
    return _shard_of(model)


def _all_dtypes(rank: int, world: int, strategy: str, factor: float | None, how: str) -> Any:
    return [_microbatches(rank, world, strategy, d, factor, how) for d in DTYPES]


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    ("how", "mean", "total"),
    [
        pytest.param("one", MEAN_A, SUM_A, id="E4-one microbatch"),
        pytest.param("no_sync", MEAN_AB, SUM_AB, id="E5-no_sync"),
        pytest.param("two", MEAN_AB, SUM_AB, id="E5-two backwards"),
        pytest.param("zeroed", [2.0] * 4, [4.0] * 4, id="E5-zeroed between"),
    ],
)
def test_e4_e5_the_exact_numbers(strategy: str, how: str, mean: list[float], total: list[float]) -> None:
    for factor, expected in ((None, mean), (1.0, total)):
        answers = ranks.run(2, _all_dtypes, strategy, factor, how)
        for rank, by_dtypes in enumerate(answers):
            for dtypes, shard in zip(DTYPES, by_dtypes, strict=True):
                assert shard == expected[2 * rank : 2 * rank + 2], dtypes


# -- equal results ------------------------------------------------------------------------------------------------

# Empty, smaller than a block, not a multiple of a block, larger than a bucket, two-dimensional.
SHAPES: list[Any] = [(3, 5), (700,), (0,), (129,), (16, 130), (1,), (64, 4)]
POLICIES: dict[str, Any] = {
    "fp32": {"param": FP32},
    "bf16, fp32 sums": {"param": BF16, "main": FP32, "wire": FP32},
    "bf16": {"param": BF16},
    "bf16, fp32 main, bf16 wire": {"param": BF16, "main": FP32, "wire": BF16},
    "bf16, no masters": {"param": BF16, "main_params_dtype": None},
}


def _policy(name: str, bucket_size: int | None, **optimizer: Any) -> Any:
    """Returns the policy of POLICIES; optimizer: more overrides."""
    options = dict(POLICIES[name])
    param, main, wire = options.pop("param"), options.pop("main", None), options.pop("wire", None)
    ddp: dict[str, Any] = {"bucket_size": bucket_size}
    if wire is not None:
        ddp["grad_comm_dtype"] = wire
    if main is not None:
        options["main_grads_dtype"] = main
    return torch_ext.load_policy(param, override_optimizer_config={**options, **optimizer}, override_ddp_config=ddp)


def _model(dtype: torch.dtype) -> Any:
    torch.manual_seed(7)
    model = Given(SHAPES, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    return model


def _trained(rank: int, how: dict[str, Any]) -> tuple[list[bytes], list[float]]:
    """Returns weights and norms after four steps with two groups and clipping. In the second step a gradient is
    missing."""
    chosen = _policy(how["policy"], how.get("bucket_size"), **how.get("optimizer", {}))
    model = _model(chosen.param_dtype)
    torch_ext.parallelize(model, chosen, strategy=how["strategy"], find_unused_parameters=True)
    named = list(model.named_parameters())
    groups = [{"params": named[:3], "lr": 0.1}, {"params": named[3:], "weight_decay": 0.3}]
    optimizer = torch_ext.AdamW(groups, lr=0.01, policy=chosen, seed=3)
    norms = []
    for step in range(4):
        for microbatch in range(how.get("microbatches", 1)):
            grads: list[Any] = noise(10 * step + microbatch, rank, SHAPES, chosen.param_dtype)
            if step == 1:
                grads[1] = None
            last = microbatch == how.get("microbatches", 1) - 1
            with model.sync() if last else model.no_sync():
                model(grads).backward()
        norms.append(float(torch_ext.clip_grad_norm_(optimizer, 5.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [4.0, 3.0, *[4.0] * (len(SHAPES) - 2)]
    return bits(list(model.parameters())), norms


def _all_trained(rank: int, world: int, hows: list[dict[str, Any]]) -> list[Any]:
    return [_trained(rank, how) for how in hows]


def _compare(world: int, hows: list[dict[str, Any]]) -> None:
    """All ways must have the same weights and norms, on every rank."""
    by_rank = ranks.run(world, _all_trained, hows)
    for answers in by_rank:
        for how, (weights, norms) in zip(hows, answers, strict=True):
            assert norms == by_rank[0][0][1], f"{how}: the global norm"
            assert weights == by_rank[0][0][0], f"{how}: the same weights, on every rank"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["fp32", "bf16, fp32 sums"])
def test_bits_no_shard_equals_sharded_where_sums_stay_fp32(name: str, world: int) -> None:
    sizes = [None, 1, 900]
    _compare(world, [{"policy": name, "strategy": s, "bucket_size": size} for s in STRATEGIES for size in sizes])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "bf16, fp32 main, bf16 wire", "bf16, no masters"])
def test_bits_optim_equals_optim_grads_for_one_microbatch(name: str, world: int) -> None:
    sizes = [None, 1, 900]
    _compare(world, [{"policy": name, "strategy": s, "bucket_size": size} for s in SHARDED for size in sizes])


STATES = {
    "8-bit moments, remainders": {
        "exp_avg_dtype": "fp8",
        "exp_avg_sq_dtype": "fp8",
        "store_param_remainders": True,
        "use_precision_aware_optimizer": True,
    },
    "fp16 moments": {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16", "use_precision_aware_optimizer": True},
    "stochastic": {"moment_rounding": "stochastic"},
}


@pytest.mark.parametrize("states", STATES)
def test_bits_of_states_do_not_depend_on_the_split(states: str) -> None:
    case = {"policy": "bf16, fp32 sums", "optimizer": STATES[states]}
    _compare(3, [{**case, "strategy": s, "bucket_size": size} for s in STRATEGIES for size in (None, 1)])


def test_bits_of_accumulated_microbatches() -> None:
    case = {"policy": "fp32", "microbatches": 2}
    _compare(2, [{**case, "strategy": s, "bucket_size": size} for s in ("no_shard", "optim") for size in (None, 1)])
