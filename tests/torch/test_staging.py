"""The parts of `offload_fraction`: the choice of parameters that the host steps, buffers for batches, and the library's
copies."""

import gc
import os
import subprocess
import sys
from typing import Any

import host_parts
import pytest
import torch
from torch import nn
from training import bits, policy_of, set_grads

import torch_ext
from torch_ext.optim.cpu_offload import copies, staged_args
from torch_ext.optim.cpu_offload.host_states import choose
from torch_ext.optim.cpu_offload.host_step import HostPlan
from torch_ext.tensors import dense

# -- the choice ---------------------------------------------------------------------------------------------------

CHOICES = {
    "nothing": ([5, 7], 0.0, []),
    "everything": ([5, 7, 3], 1.0, [0, 1, 2]),
    "what has no size stays": ([5, 0, 3], 1.0, [0, 2]),
    "nobody": ([], 0.5, []),
    "largest first": ([1, 4, 2, 1], 0.5, [1]),
    "the first of equal ones": ([2, 2, 2, 2], 0.5, [0, 1]),
    "larger ones that do not fit are passed over": ([10, 3, 2, 1], 0.25, [1, 3]),
    "one too many is nearer than one too few": ([10, 10, 10], 0.6, [0, 1]),
    "as near either way: less": ([2, 2], 0.25, []),
    "one, below a half": ([8], 0.4, []),
    "one, above a half": ([8], 0.6, [0]),
    "a fraction that no binary number is": ([1] * 10, 0.3, [0, 1, 2]),
    "beyond 2^53": ([2**60 + 1, 2**60], 0.5, [1]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice_is_a_function_of_sizes_and_fraction(case: str) -> None:
    sizes, fraction, chosen = CHOICES[case]
    assert [i for i, one in enumerate(choose(sizes, fraction)) if one] == chosen


def test_choice_is_off_by_half_of_the_smallest_left_out_at_most() -> None:
    generator = torch.Generator().manual_seed(5)
    for case in range(300):
        sizes = torch.randint(1, 10 ** (1 + case % 6), (1 + case % 37,), generator=generator).tolist()
        fraction = float(torch.rand((), generator=generator, dtype=torch.float64))
        chosen = choose(sizes, fraction)
        assert chosen == choose(list(sizes), fraction)
        share = sum(size for size, one in zip(sizes, chosen, strict=True) if one)
        left_out = [size for size, one in zip(sizes, chosen, strict=True) if not one]
        assert 2 * abs(share - fraction * sum(sizes)) <= min(left_out, default=max(sizes)) + 1e-6


# -- memory and copies -------------------------------------------------------------------------------------------------


def test_memory_that_is_left_for_a_larger_one_was_sent_before() -> None:
    """A buffer that is replaced by a larger one may still be being copied from: the copy must end first."""
    late = host_parts.LateCopies()
    buffers = copies.Buffers(late, torch.device("cpu"))
    small = buffers.take("batches", 100)
    assert buffers.take("batches", 40) is small
    there = torch.zeros(100, dtype=torch.uint8)
    small.fill_(5)
    late.copy(late.up, [there], [small])
    assert not there.eq(5).any()
    assert buffers.take("batches", 101).numel() >= 101
    assert there.eq(5).all()


def test_memory_that_nobody_has_any_more_was_sent_before() -> None:
    """Copies from and to buffers end before the buffers are freed."""
    late = host_parts.LateCopies()
    buffers = copies.Buffers(late, torch.device("cpu"))
    there, here = torch.zeros(100, dtype=torch.uint8), torch.full((100,), 6, dtype=torch.uint8)
    leaving, coming = buffers.take("batches", 100).fill_(5), buffers.take("scalars", 100)
    late.copy(late.up, [there], [leaving])
    late.to_host([coming], [here])
    assert late.up.done == late.down.done == 0
    del buffers
    assert there.eq(5).all() and late.up.done == late.down.done == 1


def test_an_optimizer_that_is_dropped_after_a_step_leaves_no_weight_behind() -> None:
    """The dropped optimizer's buffers may be reused and overwritten at once, so weights in them must have been copied
    before."""
    params = {fraction: [nn.Parameter(torch.ones(9000)), nn.Parameter(torch.ones(5))] for fraction in (0.0, 1.0)}
    memory: list[torch.Tensor] = []

    def run(fraction: float) -> None:
        optimizer = torch_ext.AdamW(params[fraction], lr=1e-2, offload_fraction=fraction)
        set_grads(params[fraction], 0)
        optimizer.step()
        if fraction:
            assert optimizer._states.host._buffers is not None
            memory.extend(optimizer._states.host._buffers._made.values())

    run(0.0)
    with host_parts.copying("late"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_parts.LateCopies, "end", lambda self: None)  # a device's end() does not make the host wait
        run(1.0)
    gc.collect()
    for one in memory:
        one.fill_(0xEE)
    assert [bits(p) for p in params[1.0]] == [bits(p) for p in params[0.0]]


class _FailedCopies(host_parts.LateCopies):
    """Copies of a device that reports an error."""

    def finish(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_memory_of_a_device_that_failed_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing buffers of a failed device must not raise in a finaliser."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    buffers = copies.Buffers(_FailedCopies(), torch.device("cpu"))
    del buffers
    assert not printed


_AT_EXIT = """
import atexit, torch
there = torch.zeros(100, dtype=torch.uint8)
atexit.register(lambda: print("sent" if there.eq(5).all() else "lost"))  # in torch's place: registered before
import host_parts
from torch_ext.optim.cpu_offload import copies
late = host_parts.LateCopies()
buffers = copies.Buffers(late, torch.device("cpu"))
late.copy(late.up, [there], [buffers.take("batches", 100).fill_(5)])
"""


def test_memory_is_sent_before_what_others_do_at_exit() -> None:
    """At exit, pending copies end before exit handlers that were registered earlier run."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", _AT_EXIT], capture_output=True, text=True, env=environment)
    assert (run.stdout, run.returncode) == ("sent\n", 0), run.stderr


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_buckets_of_other_dtypes_do_not_lie_where_weights_are_leaving_from(first: torch.dtype) -> None:
    """A step with two buckets: the first one's weights are still being copied to the device when the second one's
    gradients arrive."""

    def model() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(4)
        return [nn.Parameter(torch.randn(9000, generator=generator).to(t)) for t in (torch.bfloat16, torch.float32) * 2]

    def made(fraction: float) -> tuple[torch_ext.AdamW, list[nn.Parameter]]:
        params = model()
        optimizer = torch_ext.AdamW(params, lr=1e-2, policy=policy_of("bf16"), offload_fraction=fraction)
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
        return optimizer, params

    reference, expected = made(0.0)
    with host_parts.copying("late"):
        optimizer, params = made(1.0)
    assert optimizer._stepper.plan is not None and optimizer._stepper.plan.host is not None
    members = optimizer._stepper.plan.host.members
    buckets: list[Any] = ["first" if m.weight.dtype == first else "second" for m in members]
    assert optimizer._states.host._buffers is not None
    plan = HostPlan(members, buckets, optimizer._states.host._buffers, optimizer.averaging)
    for one in (params, expected):
        set_grads(one, 2)
    none = dense.EMPTY
    with torch.no_grad():
        plan.begin(
            [p.grad for p in params], optimizer._stepper.current_hyper(), (none, none, none), sample=False, external=0
        )
        for bucket in ("first", "second"):
            plan._calls[bucket].run(plan._buffers)  # as in `step`; there the device would wait, but the host never does
        plan.end()
    reference.step()
    assert [bits(p) for p in params] == [bits(p) for p in expected]


def test_copies_of_a_gpu_are_made_for_as_many_slots_as_threads_need(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    class Made(staged_args.CopyOps):
        def __init__(self, *arguments: Any) -> None:
            super().__init__()
            made.append(arguments)
            self.slots = arguments[-1]

    monkeypatch.setattr(copies, "_CudaCopyOps", Made)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"of {device}")
    native = copies.CudaCopies(torch.device("cuda:3")).native
    first = native(6)
    assert native(6) == first == native(3)
    second = native(12)
    assert second != first and native(6) == second
    assert made == [("of cuda:3", "of cuda:3", 6), ("of cuda:3", "of cuda:3", 12)]
    assert staged_args.CopyOps.from_address(first).size == 0, "copies may be under way in the earlier ones"


def test_device_that_nothing_copies_from_is_refused() -> None:
    with pytest.raises(ValueError, match="meta; cpu and cuda are legal"):
        copies.copies_of(torch.device("meta"))


def test_cuda_copies_to_the_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: its streams and pinned buffers are not looked at")
    made = copies.CudaCopies(torch.device("cuda"))
    there, here = torch.arange(1 << 20, device="cuda", dtype=torch.float32), made.buffer(1 << 22).view(torch.float32)
    made.begin()
    made.to_host([here], [there])
    made.wait(made.mark())
    assert bool((here == torch.arange(1 << 20)).all()) and here.is_pinned()
    here += 1
    with torch.cuda.stream(made._up):  # copies to the device are made by the library
        there.copy_(here, non_blocking=True)
    made.end()
    assert bool((there.cpu() == torch.arange(1 << 20) + 1).all())
