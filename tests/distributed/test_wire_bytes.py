"""`wire_bytes()`: the bytes that a rank sends for one optimizer step, counted alike under every strategy and in the
hook of DistributedDataParallel. The expected numbers are sums over the sizes of the messages."""

from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, policy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_ext

ELEMENTS = 10240  # a multiple of 2 * 128: no padding with two ranks
PARTS = SUMS = ELEMENTS // 2 * 2  # of the bucket, in bf16: half of it is sent to the other rank
WEIGHTS = ELEMENTS // 2 * 4  # half of the weights, in fp32
REPORT, REPORT_OF_UNITS = 17, 25  # 16 bytes, one for each parameter, and 8 for each unit
PLAIN: Any = {"grad_comm_compression": "off"}
EVERY, LAST = "every backward reduces", "the last backward reduces"

# Bytes of a backward that reduces; of each micro-batch; of a step.
COSTS = {
    "no_shard": (PARTS + SUMS + REPORT, 0, 0),
    "optim": (PARTS + REPORT, 0, WEIGHTS),
    "optim_grads": (PARTS + REPORT, 0, WEIGHTS),
    "optim_grads_params": (
        PARTS + REPORT_OF_UNITS,
        WEIGHTS,
        0,
    ),  # one unit, the root's: gathered once for forward and backward
    "DDP hook": (PARTS + SUMS, 0, 0),
}
EVERY_BACKWARD_REDUCES = ["optim_grads", "optim_grads_params"]


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.p * x).sum()


def _made(strategy: str, dtype: torch.dtype = FP32) -> tuple[Any, Any, Any]:
    """Returns a model, what counts its bytes, and the policy."""
    chosen, model = policy(dtype, FP32, BF16, **PLAIN), Model(dtype)
    if strategy == "DDP hook":
        ddp = DistributedDataParallel(model)
        return ddp, torch_ext.register_comm_hook(ddp, chosen), chosen
    parallel: Any = torch_ext.parallelize(model, chosen, strategy=strategy)
    return parallel, parallel, chosen


def _backward(model: Any, reduces: bool, nested: bool) -> None:
    """Runs a backward inside no_sync() unless it reduces. nested: and then inside sync() within no_sync()."""
    if isinstance(model, DistributedDataParallel):
        if reduces:
            return model(torch.ones(1)).backward()
        with model.no_sync():
            return model(torch.ones(1)).backward()
    if reduces and not nested:
        return model(torch.ones(1)).backward()
    with model.no_sync():
        if reduces:
            with model.sync():
                return model(torch.ones(1)).backward()
        return model(torch.ones(1)).backward()


def _counts(rank: int, world: int, strategy: str, adam: str) -> dict[Any, list[list[int]]]:
    """Returns, for numbers of micro-batches and ways to reduce, the counts of three steps: after each backward and
    after step()."""
    found = {}
    for micro_batches in (1, 3):
        for reduces in (EVERY, LAST):
            for nested in (False, True):
                model, counts, chosen = _made(strategy)
                ours = torch_ext.AdamW(model.parameters(), policy=chosen)
                optimizer = ours if adam == "ours" else torch.optim.SGD(model.parameters(), lr=0.1)
                assert counts.wire_bytes() == 0
                steps: list[list[int]] = []
                for _ in range(3):
                    steps.append([])
                    for i in range(micro_batches):
                        _backward(model, reduces == EVERY or i == micro_batches - 1, nested)
                        steps[-1].append(counts.wire_bytes())
                    optimizer.step()
                    steps[-1].append(counts.wire_bytes())
                    optimizer.zero_grad()
                    assert counts.wire_bytes() == steps[-1][-1]
                found[micro_batches, reduces, nested] = steps
    return found


@pytest.mark.parametrize(
    ("strategy", "adam"),
    [*((strategy, "ours") for strategy in COSTS), ("no_shard", "torch's"), ("DDP hook", "torch's")],
)
def test_all_micro_batches_of_a_step_count(strategy: str, adam: str) -> None:
    reduction, micro_batch, step = COSTS[strategy]
    for found in ranks.run(2, _counts, strategy, adam):
        for (micro_batches, reduces, nested), steps in found.items():
            all_reduce = reduces == EVERY or strategy in EVERY_BACKWARD_REDUCES
            reductions = micro_batches if all_reduce else 1
            whole = micro_batches * micro_batch + reductions * reduction + step
            for number, counts in enumerate(steps):
                # Until a backward reduces, the count is that of the step before.
                nothing = [whole if number else 0] * (micro_batches - reductions)
                sums = [i * (micro_batch + reduction) for i in range(1, reductions + 1)]
                assert counts == [*nothing, *sums, whole], (micro_batches, reduces, nested, number)
    assert len(found) == 8


def _skipped(rank: int, world: int, strategy: str) -> list[int]:
    """Returns the counts after each scaler.step(); gradients of the second one overflow."""
    model, counts, chosen = _made(strategy, FP16)
    optimizer = torch_ext.AdamW(model.parameters(), policy=chosen)
    scaler = chosen.grad_scaler()
    found = []
    for step in range(3):
        scaler.scale(model(torch.full((1,), float("inf") if step == 1 else 1.0))).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(counts.wire_bytes())
        optimizer.zero_grad()
    assert optimizer.skipped_steps() == 1
    return found


@pytest.mark.parametrize("strategy", COSTS)
def test_a_step_that_the_loss_scale_skips_is_a_step_without_gathered_weights(strategy: str) -> None:
    reduction, micro_batch, step = COSTS[strategy]
    before = reduction + micro_batch // 2  # fp16 weights
    for found in ranks.run(2, _skipped, strategy):
        assert found == [before + step // 2, before, before + step // 2]


def _two_optimizers(rank: int, world: int) -> list[int]:
    """Returns the counts of a model whose parameters are split between two optimizers, after each one's step()."""
    chosen = policy(FP32, FP32, BF16, bucket_size=1, **PLAIN)
    model: Any = torch.nn.ModuleList([Model(), Model()])
    torch_ext.parallelize(model, chosen, strategy="optim")
    optimizers = [torch_ext.AdamW(part.parameters(), policy=chosen) for part in model]
    found = []
    for _ in range(2):
        (model[0](torch.ones(1)) + model[1](torch.ones(1))).backward()
        for optimizer in optimizers:
            optimizer.step()
            found.append(model.wire_bytes())
        model.zero_grad()
    return found


def test_the_steps_of_several_optimizers_count_as_one() -> None:
    reduced, order = 2 * PARTS + REPORT + 1, 3 * 8  # the first backward also exchanges the order of the gradients
    for found in ranks.run(2, _two_optimizers):
        both = [reduced + WEIGHTS, reduced + 2 * WEIGHTS]
        assert found == [n + order for n in both] + both


def _evaluated(rank: int, world: int) -> list[int]:
    """Returns the counts under FSDP2 with two units: of a step, of the evaluation after it, and of the next step."""
    model: Any = torch.nn.Sequential(Model(), torch.nn.Identity())
    fully_shard(model[0])
    fully_shard(model)
    chosen = policy(FP32, FP32, BF16, **PLAIN)
    torch_ext.parallelize(model, chosen, strategy="optim_grads_params")
    optimizer = torch_ext.AdamW(model.parameters(), policy=chosen)
    found = []
    for evaluates in (False, True, False):
        if evaluates:
            with torch.no_grad():
                model(torch.ones(1))
            found.append(model.wire_bytes())
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.wire_bytes())
    return found


def test_weights_that_an_evaluation_gathers_count_for_the_next_step() -> None:
    trained = 2 * WEIGHTS + PARTS + REPORT_OF_UNITS + 8  # the unit is gathered for forward, and again for backward
    for found in ranks.run(2, _evaluated):
        assert found == [trained, trained, WEIGHTS + trained, trained]
