"""What the benchmark steps: shapes, and parameters with gradients whose values resemble those of a training run."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Shapes = Sequence[tuple[int, ...]]

_CHUNK = 1 << 18  # random elements that are drawn once and reused, each time with another magnitude


def gpt2(width: int = 768, vocabulary: int = 50257, context: int = 1024, layers: int = 12) -> Shapes:
    """Returns the shapes of GPT-2 small's 148 tensors (the head is tied to wte), 124.4 million parameters."""
    block: list[tuple[int, ...]] = [
        *[(width,), (width,)],  # ln_1
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],  # attention
        *[(width,), (width,)],  # ln_2
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],  # mlp
    ]
    return [(vocabulary, width), (context, width), *(block * layers), (width,), (width,)]


def numel(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def make(shapes: Shapes, dtype: torch.dtype, seed: int, device: str = "cpu") -> list[nn.Parameter]:
    """Returns parameters of magnitude about 0.02 with gradients of the same dtype, every element written.

    Gradients are normally distributed. Their magnitude varies between 1e-5 and 1e-2 along a tensor and from tensor to
    tensor. No gradient is subnormal, nor is the square of one.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(_CHUNK, generator=generator)
    values[values.abs() < 1e-6] = 1.0
    values = values.to(device)
    params = []
    for shape in shapes:
        p = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        p.grad = torch.empty(shape, dtype=dtype, device=device)
        _fill(p, values, [0.02], generator)
        _fill(p.grad, values, [1e-2, 1e-3, 1e-4, 1e-5], generator)
        params.append(p)
    return params


def grads(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


@torch.no_grad()
def _fill(t: Tensor, values: Tensor, magnitudes: list[float], generator: torch.Generator) -> None:
    """Fills a tensor chunk by chunk, so that it needs no second copy. The chunks begin at random places of `values`."""
    flat = t.view(-1)
    for begin in range(0, t.numel(), _CHUNK // 2):
        part = flat[begin : begin + _CHUNK // 2]
        first, which = (int(torch.randint(n, (1,), generator=generator)) for n in (_CHUNK // 2, len(magnitudes)))
        part.copy_(values[first : first + part.numel()]).mul_(magnitudes[which])


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages; each storage counts once, as a whole."""
    storages = (t.untyped_storage() for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
