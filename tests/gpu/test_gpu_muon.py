"""Whole steps of Muon on the device: momentum, step counts and everything of AdamW have the CPU's bits. Weights, whose
products torch multiplies, are near those of the CPU, and near Newton-Schulz iterations in float64."""

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ext

DEVICE = os.environ.get("TORCH_EXT_GPU_TESTS_DEVICE", "cuda:0")
WORDS: list[Any] = ["fp32", "bf16", "bf16_remainder", "8bit"]
F32, BF16 = torch.float32, torch.bfloat16
MOST = {F32: 2e-3, BF16: 0.03}
"""How far an update of several steps may be from the CPU's, relative to its norm; by the dtype of the products."""


def shapes_of(seed: int) -> list[tuple[int, ...]]:
    """Returns random shapes, most of them several times, so that their matrices are multiplied together."""
    r = random.Random(seed)
    sides = [r.choice([1, 8, 24, 64, 100, 256]), r.randrange(1, 200), r.randrange(1, 300)]
    found: list[tuple[int, ...]] = []
    for _ in range(r.randrange(1, 4)):
        shape = (r.choice(sides), r.choice(sides))
        found += [shape] * r.choice([1, 2, 5, 12])
    found += [(r.randrange(2, 5), *found[0])] * r.randrange(2)  # a stack of experts of the same shape
    found.append((r.randrange(1, 50),))
    r.shuffle(found)
    return found


def made(device: str, shapes: list[tuple[int, ...]], **options: Any) -> torch_ext.Muon:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator).to(BF16).to(device)) for s in shapes]
    return torch_ext.Muon([(f"p{i}", p) for i, p in enumerate(params)], lr=0.02, **options)


def trained(optimizer: torch_ext.Muon, steps: int = 3, clip: float | None = None) -> torch_ext.Muon:
    for step in range(steps):
        generator = torch.Generator().manual_seed(1 + step)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)
        if clip is not None:
            torch_ext.clip_grad_norm_(optimizer, clip)
        optimizer.step()
    return optimizer


def weights(optimizer: torch_ext.Muon) -> list[Tensor]:
    """Returns the weights in full precision."""
    return [one.detach().cpu().float() for one in optimizer.master_state_dict().values()]


def independent_of_products(optimizer: torch_ext.Muon) -> list[Tensor]:
    """Returns the states that no product changes."""
    state = optimizer.state_dict()["state"]
    keys = ("momentum_buffer", "exp_avg", "exp_avg_sq", "scales", "step")
    return [entry[key].cpu() for entry in state.values() for key in keys if key in entry]


@pytest.mark.parametrize("seed", range(12))
def test_random_models_are_near_the_cpus(seed: int) -> None:
    r, shapes = random.Random(seed), shapes_of(seed)
    dtype = r.choice([F32, BF16, BF16])
    options: dict[str, Any] = {
        "states": r.choice(WORDS),
        "ns": r.choice(["standard", "gram", "auto"]),
        "ns_dtype": dtype,
        "nesterov": r.random() < 0.7,
        "adjust_lr_fn": r.choice(["original", "match_rms_adamw"]),
    }
    clip = r.choice([None, 0.5])
    start = [p.detach().float() for p in made("cpu", shapes).param_groups[0]["params"]]
    here, there = (trained(made(device, shapes, **options), clip=clip) for device in ("cpu", DEVICE))
    for x, y in zip(independent_of_products(here), independent_of_products(there), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)
    for shape, x, y, begin in zip(shapes, weights(here), weights(there), start, strict=True):
        assert float((x - y).norm()) <= MOST[dtype] * float((x - begin).norm()), (shape, options)


def exact(x: Tensor) -> Tensor:
    """Returns the orthogonalised matrix, computed in float64."""
    (a, b, c), o = (3.4445, -4.7750, 2.0315), x.double() / x.double().norm()
    for _ in range(5):
        g = o @ o.T
        o = a * o + (b * g + c * g @ g) @ o
    return o


@pytest.mark.parametrize("kind", ["standard", "gram"])
@pytest.mark.parametrize(("shape", "copies"), [((300, 700), 1), ((300, 700), 4), ((768, 768), 30), ((2048, 2048), 5)])
def test_stacks_are_near_the_iteration_in_float64(shape: tuple[int, int], copies: int, kind: str) -> None:
    """30 matrices of 768 x 768 are two stacks."""
    params = [nn.Parameter(torch.zeros(shape, device=DEVICE)) for _ in range(copies)]
    generator = torch.Generator(DEVICE).manual_seed(0)
    for p in params:
        p.grad = torch.randn(shape, generator=generator, device=DEVICE).to(BF16).float()
    optimizer = torch_ext.Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, ns=kind, ns_dtype=BF16)
    optimizer.step()
    for p in (params[0], params[-1]):
        assert p.grad is not None
        want = exact(p.grad)
        assert float((p.detach().double() + want).norm() / want.norm()) < 0.03


def test_a_step_is_not_captured() -> None:
    if DEVICE == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    optimizer = trained(made(DEVICE, [(64, 32)] * 3, ns_dtype=BF16))
    before = weights(optimizer)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="step of Muon's matrices waits"), torch.cuda.graph(graph):
        optimizer.step()
    torch.cuda.synchronize()
    assert all(map(torch.equal, before, weights(optimizer)))
