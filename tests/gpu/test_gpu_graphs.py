"""clip and step, captured into a CUDA graph and replayed, must have the bits of the same steps on the CPU."""

import other_process
import pytest
import torch
from test_gpu_training import DEVICE, POLICIES, assert_same, optimizer, set_grads, train

import torch_ext

WARM_UP = 3


def static_grads(opt: torch_ext.AdamW) -> list[torch.Tensor]:
    """Sets gradients and returns them; the graph will read them in this memory."""
    set_grads(opt, 0)
    return [p.grad for p in opt.param_groups[0]["params"]]


def fill(opt: torch_ext.AdamW, grads: list[torch.Tensor], i: int) -> None:
    """Copies step i's gradients into the memory that the graph reads."""
    set_grads(opt, i)
    for p, grad in zip(opt.param_groups[0]["params"], grads, strict=True):
        grad.copy_(p.grad)
        p.grad = grad


def clip_and_step(opt: torch_ext.AdamW) -> torch.Tensor:
    norm = torch_ext.clip_grad_norm_(opt, 1.0)
    opt.step()
    return norm


def warmed_up(policy: str, **options: object) -> tuple[torch_ext.AdamW, list[torch.Tensor]]:
    """Returns an optimizer after WARM_UP steps on a side stream, and its static gradients."""
    opt = optimizer(policy, DEVICE, **options)
    grads = static_grads(opt)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(WARM_UP):
            fill(opt, grads, i)
            clip_and_step(opt)
    torch.cuda.current_stream().wait_stream(side)
    return opt, grads


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replayed_step_has_the_cpus_bits(policy: str) -> None:
    """The lr changes between replays, and one step is skipped on the device."""
    lr = torch.tensor(1e-2, dtype=torch.float64, device=DEVICE)
    here, (there, grads) = optimizer(policy, "cpu"), warmed_up(policy, lr=lr, capturable=True)
    train(here, WARM_UP)
    graph = torch.cuda.CUDAGraph()
    fill(there, grads, WARM_UP)
    with torch.cuda.graph(graph):
        norm = clip_and_step(there)
    for i in range(WARM_UP, WARM_UP + 4):
        here.param_groups[0]["lr"] = 1e-2 / i
        lr.fill_(1e-2 / i)
        fill(there, grads, i)
        set_grads(here, i)
        if i == WARM_UP + 1:
            for opt in (here, there):
                opt.param_groups[0]["params"][2].grad[5] = float("inf")
        graph.replay()
        expected = torch_ext.clip_grad_norm_(here, 1.0)
        here.step()
        here.zero_grad()
        assert torch.equal(norm.cpu(), expected) or i == WARM_UP + 1
    assert here.skipped_steps() == there.skipped_steps() == 1
    assert_same(here, there)


def test_a_capture_with_an_lr_of_the_host_is_refused_with_what_to_pass() -> None:
    opt, grads = warmed_up("bf16")
    before = [p.detach().clone() for p in opt.param_groups[0]["params"]]
    fill(opt, grads, WARM_UP)
    with (
        pytest.raises(RuntimeError, match="group 0 has as lr: 0.01, a number; a tensor on cuda"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        opt.step()
    torch.cuda.synchronize()
    assert all(map(torch.equal, before, opt.param_groups[0]["params"]))


def test_a_capture_that_looks_for_writes_by_waiting_is_refused() -> None:
    lr = torch.tensor(1e-2, device=DEVICE)
    opt, grads = warmed_up("bf16_remainder", lr=lr, capturable=True, on_external_write="error")
    fill(opt, grads, WARM_UP)
    with pytest.raises(RuntimeError, match="on_external_write='error' waits"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()


FIRST_IN_A_CAPTURE = """
import torch, torch_ext
main, grad = torch.ones(5000, device="cuda"), torch.full((5000,), 2.0, dtype=torch.bfloat16, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.ops.torch_ext.bucket_accumulate_([main], [grad])
graph.replay()
assert bool((main == 3).all()), main
"""


def test_a_kernel_may_first_be_loaded_within_a_capture() -> None:
    status, text = other_process.run(FIRST_IN_A_CAPTURE)
    assert status == 0, text
