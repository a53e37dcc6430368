"""Muon's matrix products against float64 and torch's, for matrices so large that symmetric products are computed in
panels."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ext

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def uniform(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5).to(dtype)


@pytest.mark.parametrize("seed", range(24))
def test_mirrored(seed: int) -> None:
    """muon_mirror_ copies the panels below the diagonal to their transposed places above it."""
    r = random.Random(seed)
    n, dtype = r.choice([1, 2, 9, 63, 64, 65, 128, 257, r.randrange(300, 700)]), r.choice([F32, BF16, F16])
    panel = r.choice([1, 3, 64, 128, r.randrange(1, n + 1), n, n + 5])
    square = uniform((n, n), dtype, seed)
    want = square.clone()
    for begin in range(panel, n, panel):
        want[:begin, begin : begin + panel] = square[begin : begin + panel, :begin].T
    torch.ops.torch_ext.muon_mirror_(square, panel)
    assert torch.equal(square, want)


def orthogonalised(x: Tensor, make: Callable[..., torch.optim.Optimizer] = torch_ext.Muon, **options: Any) -> Tensor:
    """Returns the orthogonalised matrix, computed by one step of an optimizer."""
    weight = nn.Parameter(torch.zeros(x.shape))
    weight.grad = x.float()
    options = {"adjust_lr_fn": "match_rms_adamw"} | options
    make([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
    return -weight.detach().double() / (0.2 * max(x.shape) ** 0.5)


def exact(x: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5) -> Tensor:
    """Returns the orthogonalised matrix, computed in float64."""
    (a, b, c), o = coefficients, x.double() / x.double().norm()
    o = o.T if o.shape[0] > o.shape[1] else o
    for _ in range(steps):
        g = o @ o.T
        o = a * o + (b * g + c * g @ g) @ o
    return o.T if x.shape[0] > x.shape[1] else o


def distance(found: Tensor, want: Tensor) -> float:
    """Returns the norm of the difference, relative to `want`."""
    return float((found - want).norm() / want.norm())


@pytest.mark.parametrize("seed", range(20))
def test_programs_of_any_size(seed: int) -> None:
    """Shapes around the smallest size that is cut into panels: odd and even, tall and wide, with random steps and
    coefficients."""
    r = random.Random(seed)
    n = r.choice([1, 7, 64, 130, 639, 640, 641, r.randrange(640, 720), 704])
    k = max(n, int(n * r.choice([1, 1, 1.1, 1.3])))
    x = uniform(r.choice([(n, k), (k, n)]), BF16, seed)
    steps, kind = r.randrange(1, 3), r.choice(["standard", "gram", "auto"])
    coefficients = (r.uniform(0.5, 1.5), r.uniform(-0.5, 0.5), r.uniform(-0.2, 0.2))
    want = exact(x, coefficients, steps)
    for dtype, most in ((F32, 1e-5), (BF16, 0.02)):
        found = orthogonalised(x, ns=kind, ns_dtype=dtype, ns_steps=steps, ns_coefficients=coefficients)
        assert distance(found, want) < most, (x.shape, kind, steps, coefficients)


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """In this context torch fills the memory that it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(3).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(20, 33), (650, 900), (700, 641), (641, 641)])
def test_what_memory_held_is_no_matter(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    """Products must not read uninitialised memory. Two iterations have all kinds of products."""
    x = uniform(shape, BF16, 3)
    found = orthogonalised(x, ns=kind, ns_dtype=dtype, ns_steps=2)
    with memory_of_nan():
        assert torch.equal(found, orthogonalised(x, ns=kind, ns_dtype=dtype, ns_steps=2))
    assert distance(found, exact(x, steps=2)) < (1e-4 if dtype is F32 else 0.05)


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("shape", [(644, 1000), (700, 641)])
def test_standard_is_as_exact_as_torchs(shape: tuple[int, int], decays: bool) -> None:
    """In bf16, also for matrices whose singular values differ by orders of magnitude."""
    x = (uniform(shape, F32, 1) * (torch.logspace(-3, 0, shape[1]) if decays else 1.0)).to(BF16)
    want = exact(x)
    theirs = distance(orthogonalised(x, torch.optim.Muon), want)
    assert distance(orthogonalised(x, ns_dtype=BF16), want) < 1.1 * theirs


@pytest.mark.parametrize(("dtype", "most"), [(F32, 1e-4), (BF16, 0.02)])
@pytest.mark.parametrize("decays", [False, True])
def test_gram_of_oblong_matrices(decays: bool, dtype: torch.dtype, most: float) -> None:
    """Matrices for which "auto" chooses the Gram form; docs/muon.md states 1.4 % and 1.8 % in bf16."""
    x = (uniform((644, 2576), F32, 1) * (torch.logspace(-3, 0, 2576) if decays else 1.0)).to(BF16)
    assert distance(orthogonalised(x, ns="gram", ns_dtype=dtype), exact(x)) < most


@pytest.mark.parametrize("seed", range(16))
def test_bits_depend_on_no_other_matrix(seed: int) -> None:
    """On two threads, a matrix has the bits of a step in which it is the only one, whichever matrices are multiplied
    with it and on whichever thread."""
    r = random.Random(seed)
    shapes = [(r.randrange(1, 300), r.randrange(1, 300)) for _ in range(r.randrange(2, 10))]
    shapes += [(645, 650)] if seed % 8 == 0 else [(3, r.randrange(1, 40), 24)]
    options = {"ns_dtype": r.choice([BF16, BF16, F32]), "ns": r.choice(["standard", "gram", "auto"]), "ns_steps": 2}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    def stepped(numbers: list[int]) -> list[Tensor]:
        params = [nn.Parameter(uniform(shapes[i], F32, 100 + i)) for i in numbers]
        for i, p in zip(numbers, params, strict=True):
            p.grad = uniform(shapes[i], F32, 200 + i)
        torch_ext.Muon([(f"p{i}", p) for i, p in zip(numbers, params, strict=True)], lr=0.1, **options).step()
        return params

    try:
        together = stepped(list(range(len(shapes))))
        for i, p in enumerate(together):
            assert torch.equal(p, *stepped([i])), shapes[i]
    finally:
        torch.set_num_threads(threads)
