"""Checks the float64 oracle: against torch's optimizers in float64, and against numbers worked out by hand."""

import math

import oracle
import pytest
import torch

CASES = {
    "AdamW": (torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.1), {}),
    "AdamW, maximize": (torch.optim.AdamW, dict(lr=1e-2, maximize=True), {}),
    "Adam, L2": (torch.optim.Adam, dict(lr=1e-2, weight_decay=0.1), dict(decoupled=False)),
    "betas and eps": (torch.optim.AdamW, dict(lr=1e-2, betas=(0.5, 0.9), eps=1e-3), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_G1_equals_torch_in_float64(case: str) -> None:
    torch_class, hyper, more = CASES[case]
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(100, dtype=torch.float64))
    exact = oracle.AdamW(p, **hyper, **more)
    theirs = torch_class([p], **hyper)
    for _ in range(50):
        p.grad = torch.randn_like(p)
        exact.step(p.grad * 512 / 0.25, clip_coef=0.25, grad_scale=512)
        theirs.step()
    torch.testing.assert_close(p.detach(), exact.p, rtol=1e-12, atol=1e-14)


def test_G2_norm_and_clip_coefficient() -> None:
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]], dtype=torch.bfloat16), torch.empty(0)]
    assert oracle.norm(grads) == 5.0
    assert oracle.clip_coefficient(5.0, 1.0) == 1.0 / (5.0 + 1e-6)
    assert oracle.clip_coefficient(0.5, 1.0) == 1.0
    assert oracle.clip_coefficient(0.5, math.inf) == 1.0


def test_ulps() -> None:
    exact = torch.tensor([1.0, -1.5, 2.0, 0.0, 1e-45], dtype=torch.float64)
    assert oracle.ulp(exact, torch.float32).tolist() == [2.0**-23, 2.0**-23, 2.0**-22, 2.0**-149, 2.0**-149]
    assert oracle.ulp(exact, torch.bfloat16).tolist()[:3] == [2.0**-7, 2.0**-7, 2.0**-6]
    values = torch.rand(1000, dtype=torch.float64) + 0.5
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert 0.4 < oracle.ulp_error(values.to(dtype), values) <= 0.5
