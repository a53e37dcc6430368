"""Training loops with torch_ext.AdamW on the device must have the bits of the same loop on the CPU."""

import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import torch_ext

DEVICE = os.environ.get("TORCH_EXT_GPU_TESTS_DEVICE", "cuda:0")
NUMELS = (5, 300, 4097, 1, 70_000)
POLICIES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16_remainder": (torch.bfloat16, {"store_param_remainders": True}),
    "8bit": (torch.bfloat16, {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}),
    "fp16": (torch.float16, {}),
}


def optimizer(policy: str, device: str, **options: Any) -> torch_ext.AdamW:
    """Returns an optimizer with parameters of NUMELS. options: of AdamW."""
    dtype, overrides = POLICIES[policy]
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype).to(device)) for n in NUMELS]
    made = torch_ext.load_policy(dtype, override_optimizer_config=overrides)
    return torch_ext.AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, "policy": made, **options})


def set_grads(opt: torch_ext.AdamW, i: int) -> None:
    """Sets the gradients of step i, the same on every device."""
    generator = torch.Generator().manual_seed(1000 + i)
    for p in opt.param_groups[0]["params"]:
        p.grad = (torch.randn(p.shape, generator=generator) * 3).to(p.dtype).to(p.device)


def train(opt: torch_ext.AdamW, n: int = 6, begin: int = 0, clip: float | None = 1.0) -> list[Any]:
    """Takes steps begin .. begin + n - 1 and returns the norms."""
    norms = []
    for i in range(begin, begin + n):
        set_grads(opt, i)
        if clip is not None:
            norms.append(torch_ext.clip_grad_norm_(opt, clip))
        opt.step()
        opt.zero_grad()
    return [norm.item() for norm in norms]


def everything(opt: torch_ext.AdamW) -> list[torch.Tensor]:
    """Returns weights and states, on the CPU."""
    state = opt.state_dict()["state"]
    return [
        *(p.detach().cpu() for p in opt.param_groups[0]["params"]),
        *(value.cpu() for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)),
    ]


def assert_same(a: torch_ext.AdamW, b: torch_ext.AdamW) -> None:
    for x, y in zip(everything(a), everything(b), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@contextmanager
def host_never_waits() -> Iterator[None]:
    """Within the context, torch raises if one of its operations makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_has_the_cpus_bits(policy: str) -> None:
    here, there = optimizer(policy, "cpu"), optimizer(policy, DEVICE)
    assert train(here) == train(there)
    assert_same(here, there)


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "float_lr": lambda: {},
    "tensor_lr": lambda: {"lr": torch.tensor(1e-2, device=DEVICE), "capturable": True},
    "skip_nonfinite": lambda: {"skip_nonfinite": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_step_but_the_first_waits_for_the_device(policy: str, way: str) -> None:
    opt = optimizer(policy, DEVICE, **WAYS[way]())
    train(opt, 2)
    for i in range(3):
        set_grads(opt, i)
        with host_never_waits():
            torch_ext.clip_grad_norm_(opt, 1.0)
            opt.step()
            opt.zero_grad()


def test_a_schedule_in_a_tensor_has_the_cpus_bits() -> None:
    here, there = (
        optimizer("bf16", "cpu"),
        optimizer("bf16", DEVICE, lr=torch.tensor(1e-2, dtype=torch.float64, device=DEVICE)),
    )
    for i in range(4):
        here.param_groups[0]["lr"] = 1e-2 / (i + 1)
        there.param_groups[0]["lr"].fill_(1e-2 / (i + 1))
        train(here, 1, i)
        train(there, 1, i)
    assert_same(here, there)


def test_a_step_that_is_not_finite_is_skipped_and_counted_on_the_device() -> None:
    here, there = optimizer("bf16", "cpu", skip_nonfinite=True), optimizer("bf16", DEVICE, skip_nonfinite=True)
    for opt in (here, there):
        train(opt, 2, clip=None)
        set_grads(opt, 2)
        opt.param_groups[0]["params"][1].grad[7] = float("nan")
        opt.step()
        train(opt, 2, 3, clip=None)
    assert here.skipped_steps() == there.skipped_steps() == 1
    assert_same(here, there)


@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder"])
def test_a_write_by_somebody_else_is_noticed_as_on_the_cpu(policy: str) -> None:
    here, there = optimizer(policy, "cpu"), optimizer(policy, DEVICE)
    for opt in (here, there):
        train(opt, 2)
        for p in opt.param_groups[0]["params"]:
            p.data.mul_(1.5)
        train(opt, 2, 2)
    assert here.external_writes() == there.external_writes() > 0
    assert_same(here, there)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_goes_from_the_device_to_the_cpu_and_back(policy: str, tmp_path: pathlib.Path) -> None:
    first, second, third = optimizer(policy, DEVICE), optimizer(policy, "cpu"), optimizer(policy, DEVICE)
    train(first)
    for source, target in ((first, second), (second, third)):
        torch.save(source.state_dict(), tmp_path / "state.pt")
        with torch.no_grad():
            for p, q in zip(source.param_groups[0]["params"], target.param_groups[0]["params"], strict=True):
                q.copy_(p)
        target.load_state_dict(torch.load(tmp_path / "state.pt"))
    train(first, 2, 6)
    train(third, 2, 6)
    assert_same(first, third)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "8bit"])
def test_a_part_on_the_host_changes_no_bit(policy: str, fraction: float) -> None:
    here, there = optimizer(policy, "cpu"), optimizer(policy, DEVICE, offload_fraction=fraction)
    assert train(here) == train(there)
    assert_same(here, there)


def test_states_that_go_away_and_come_back_change_no_bit() -> None:
    class Model(torch.nn.Module):
        def __init__(self, params: list[torch.nn.Parameter]) -> None:
            super().__init__()
            self.params = torch.nn.ParameterList(params)

    here, there = optimizer("bf16", "cpu"), optimizer("bf16", DEVICE)
    model = Model(there.param_groups[0]["params"])
    train(here)
    train(there, 3)
    torch_ext.offload(model, there, params=False, grads=False, states=True)
    torch_ext.onload(model, there, params=False, grads=False, states=True)
    train(there, 3, 3)
    assert_same(here, there)


def test_an_ordinary_model_learns() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(DEVICE).bfloat16()
    opt = torch_ext.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 16, device=DEVICE, dtype=torch.bfloat16)
    y = x[:, :1] * 2 - 1
    losses = []
    for _ in range(200):
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        torch_ext.clip_grad_norm_(opt, 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20
