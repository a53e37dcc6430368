"""Every operator on the device must have the CPU's bits."""

import os
from collections.abc import Callable
from typing import Any

import operator_samples as samples
import pytest
import torch
from operator_samples import BF16, F16, F32, I16, U8, Sample

DEVICE = os.environ.get("TORCH_EXT_GPU_TESTS_DEVICE", "cuda:0")
# Sizes around blocks of 128, tiles, and samples of 4096; the largest needs several blocks of threads.
NUMELS = (1, 127, 128, 129, 0, 1023, 4095, 4097, 100_003)


def as_it_comes(t: torch.Tensor) -> torch.Tensor:
    return t.to(DEVICE, copy=True)


def off_by_one(t: torch.Tensor) -> torch.Tensor:
    """Returns a copy that begins one element after an aligned address."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=DEVICE)
    return memory[1:].view(t.shape).copy_(t)


def values(arguments: list[Any]) -> list[bytes]:
    """Returns the bytes of every tensor among the arguments."""
    return [t.detach().cpu().contiguous().view(-1).view(U8).numpy().tobytes() for t in samples.tensors(arguments)]


def compare(operator: str, make: Callable[[], list[Any]], move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Calls the operator on the CPU and on the device; all tensors must end with the same bytes."""
    here = make()
    there = samples.moved(operator, make(), move)
    samples.overload(operator)(*here)
    samples.overload(operator)(*there)
    torch.cuda.synchronize()
    differing = [i for i, (a, b) in enumerate(zip(values(here), values(there), strict=True)) if a != b]
    assert not differing, f"of {len(values(here))} tensors those at {differing}"


@pytest.mark.parametrize("move", [as_it_comes, off_by_one], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("sample", samples.DISPATCHED, ids=lambda s: s.id)
def test_a_call_has_the_cpus_bits(sample: Sample, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compare(sample.operator, sample.make, move)


STEPS = {
    "fp32": {"param": F32},
    "bf16": {"param": BF16, "master": F32},
    "bf16_remainder": {"param": BF16, "master": I16},
    "8bit": {"param": BF16, "master": I16, "exp_avg": U8, "exp_avg_sq": U8},
    "fp16_states_of_16_bits": {"param": F16, "master": F32, "exp_avg": F16, "exp_avg_sq": F16},
    "no_master": {"param": BF16},
    "fp32_gradients": {"param": BF16, "master": F32, "grad": F32},
}


@pytest.mark.parametrize("rounding", [0, 1, 2], ids=["nearest", "dithered", "stochastic"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_has_the_cpus_bits(step: str, rounding: int) -> None:
    def make() -> list[Any]:
        external = 1 if STEPS[step].get("master") else 0
        arguments = samples.adamw_flat(external, numels=NUMELS, extras=True, **STEPS[step])
        arguments[-6:-4] = [rounding, rounding]
        return arguments

    compare("adamw_flat_", make, as_it_comes)


@pytest.mark.parametrize("numels", [(3,) * 1000, (300, 5) * 400], ids=["tiny", "small"])
def test_more_tensors_than_one_launch_takes(numels: tuple[int, ...]) -> None:
    """Tries the statistics, which have one result for all tensors, and a step."""
    compare("grad_stats_", lambda: samples.grad_stats(numels), as_it_comes)
    compare("adamw_", lambda: samples.adamw(numels, param=BF16, master=F32, extras=True), as_it_comes)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("bad", [(), (3, 5), (5,)], ids=["finite", "two", "last"])
def test_statistics_count_and_name_what_is_not_finite(dtype: torch.dtype, bad: tuple[int, ...]) -> None:
    def make() -> list[Any]:
        arguments = samples.grad_stats((1 << 20, 77, 0, 4097, 3, 131), dtype)
        for i in bad:
            arguments[0][i][-1] = float("inf") if i == 3 else float("nan")
        return arguments

    compare("grad_stats_", make, as_it_comes)


@pytest.mark.parametrize("wire", [F32, BF16, F16, U8], ids=str)
def test_buckets_have_the_cpus_bits(wire: torch.dtype) -> None:
    numels = (5, 130, 0, 40_000, 1)
    compare("bucket_pack_", lambda: samples.bucket_pack(F32, wire, numels), as_it_comes)
    for accumulate in (False, True):
        compare("bucket_reduce_", lambda: samples.bucket_reduce(wire, F32, True, accumulate), as_it_comes)  # noqa: B023
    compare("bucket_unpack_", lambda: samples.bucket_unpack(wire, F32), as_it_comes)


def test_more_elements_than_32_bits_count() -> None:
    n = (1 << 32) + 5
    if torch.cuda.mem_get_info(0)[0] < 5 * n:
        pytest.skip(f"less than {5 * n >> 30} GiB of memory are free on {DEVICE}")
    main = torch.zeros(n, dtype=BF16, device=DEVICE)
    grad = torch.zeros(n, dtype=BF16, device=DEVICE)
    for i in (0, 1 << 31, 1 << 32, n - 1):
        grad[i] = i % 7 + 1
    torch.ops.torch_ext.bucket_accumulate_([main], [grad])
    assert torch.equal(main, grad)


@pytest.mark.parametrize("chosen", range(5), ids=["param", "grad", "exp_avg", "exp_avg_sq", "master"])
@pytest.mark.parametrize("step", ["bf16_remainder", "8bit"])
def test_a_tensor_across_a_multiple_of_4_gib_has_the_cpus_bits(step: str, chosen: int) -> None:
    """Usual tiles add to the lower 32 bits of addresses only (cuda/adamw_copies.h)."""
    margin, before = 1 << 20, 3600  # before: bytes of the tensor before the multiple, which divides a tile
    memory = torch.empty((1 << 32) + 2 * margin, dtype=U8, device=DEVICE)
    at = -(memory.data_ptr() + margin) % (1 << 32) + margin
    moved = 0

    def move(t: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        moved += 1
        if moved - 1 != chosen:
            return as_it_comes(t)
        assert t.nbytes > 2 * before
        return memory[at - before :][: t.nbytes].view(t.dtype).view(t.shape).copy_(t)

    compare("adamw_", lambda: samples.adamw(numels=(20_000,), **STEPS[step]), move)


def test_a_refusal_is_the_cpus() -> None:
    messages = []
    for device in ("cpu", DEVICE):
        main = torch.zeros(3, device=device)
        with pytest.raises(RuntimeError) as refusal:
            torch.ops.torch_ext.bucket_accumulate_([main], [torch.zeros(3, dtype=I16, device=device)])
        messages.append(str(refusal.value).splitlines()[0])
        assert main.tolist() == [0, 0, 0]
    assert messages[0] == messages[1]
