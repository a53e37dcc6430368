"""Streams, several devices, numbers of kernel launches, and errors that other code left behind."""

import re

import operator_samples as samples
import other_process
import pytest
import torch
from test_gpu_operators import values
from test_gpu_training import DEVICE, POLICIES, assert_same, optimizer, set_grads, train

import torch_ext
from bench import cuda_rows, workload


def test_work_goes_to_the_current_stream() -> None:
    """The call must read what its stream is still to write, and must not wait for the default stream."""
    stream, n = torch.cuda.Stream(), 1 << 20
    main, grad = torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    torch.ops.torch_ext.bucket_accumulate_([torch.zeros_like(main)], [grad])  # loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles
        grad.fill_(3)
        torch.ops.torch_ext.bucket_accumulate_([main], [grad])
        assert not stream.query(), "the call returns before the work is done"
    stream.synchronize()
    assert torch.equal(main, torch.full_like(main, 3))


def test_workspaces_of_several_streams_do_not_meet() -> None:
    here, there = optimizer("bf16", "cpu"), optimizer("bf16", DEVICE)
    streams = [torch.cuda.Stream() for _ in range(3)]
    train(here)
    for i in range(6):
        with torch.cuda.stream(streams[i % 3]):
            if i:
                streams[i % 3].wait_stream(streams[(i - 1) % 3])
            train(there, 1, i)
    torch.cuda.synchronize()
    assert_same(here, there)


def several() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU; two are needed")


@pytest.mark.parametrize("sample", samples.DISPATCHED, ids=lambda s: s.id)
def test_tensors_need_not_be_on_the_current_device(sample: samples.Sample) -> None:
    several()
    here = sample.make()
    there = samples.moved(sample.operator, sample.make(), lambda t: t.to("cuda:1", copy=True))
    with torch.cuda.device(0):
        samples.overload(sample.operator)(*here)
        samples.overload(sample.operator)(*there)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert values(here) == values(there)


def test_tensors_on_two_gpus_are_refused_with_both() -> None:
    several()
    a, b = torch.zeros(3, device="cuda:0"), torch.zeros(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="cuda:[01] and .* cuda:[01]; all tensors of a call must be on one device"):
        torch.ops.torch_ext.bucket_accumulate_([a], [b])


def test_a_tensor_on_the_cpu_beside_one_on_the_gpu_is_refused_with_both() -> None:
    with pytest.raises(RuntimeError, match="all tensors of a call must be on one device") as refusal:
        torch.ops.torch_ext.bucket_accumulate_([torch.zeros(3, device=DEVICE)], [torch.zeros(3)])
    assert "cpu" in str(refusal.value) and DEVICE in str(refusal.value)


def test_an_error_of_somebody_elses_work_is_reported_as_such() -> None:
    code = """
import torch, torch_ext
x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
torch.cuda.synchronize()
x[torch.tensor([7], device="cuda")] = 1  # out of bounds: a device-side assert, which poisons the process
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    torch.ops.torch_ext.bucket_accumulate_([x], [y])
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0])
"""
    _, text = other_process.run(code)
    assert re.search("refused: .*earlier work on this device failed", text), text


@pytest.mark.parametrize("clips", [False, True], ids=["step", "clip_and_step"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_of_148_tensors_is_one_launch(name: str, clips: bool) -> None:
    """One launch for one combination of dtypes, with the check for external writes; clipping takes two more."""
    dtype, overrides = POLICIES[name]
    policy = torch_ext.load_policy(dtype, override_optimizer_config=overrides)
    shapes = workload.gpt2(64, 503, 32)
    params = [torch.nn.Parameter((torch.randn(shape, device=DEVICE) * 0.02).to(dtype)) for shape in shapes]
    assert len(params) == 148
    opt = torch_ext.AdamW(params, lr=1e-4, policy=policy)
    for _ in range(2):
        set_grads(opt, 0)
        opt.step()

    def step() -> None:
        if clips:
            torch_ext.clip_grad_norm_(opt, 1.0)
        opt.step()

    names = cuda_rows.launches(step)
    ours = [name for name in names if "at::native" not in name]
    assert len(ours) == (3 if clips else 1), names
