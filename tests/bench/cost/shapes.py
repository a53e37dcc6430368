"""Models on the meta device, for their shapes: no memory is allocated, and they cannot run."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

_Shapes = Sequence[tuple[int, ...]]


class _Shaped(nn.Module):
    """A module with parameters of the given shapes."""

    def __init__(self, shapes: _Shapes) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))


class Transformer(nn.Module):
    """Embeddings, blocks, and the layers after them."""

    def __init__(self, before: _Shapes, block: _Shapes, n_blocks: int, after: _Shapes) -> None:
        super().__init__()
        self.before = _Shaped(before)
        self.blocks = nn.ModuleList(_Shaped(block) for _ in range(n_blocks))
        self.after = _Shaped(after)


def gpt2_small() -> Transformer:
    """GPT-2 small, 124 million parameters. Its head is tied to the embedding."""
    d = 768
    norm = [(d,), (d,)]
    attention = [(d, 3 * d), (3 * d,), (d, d), (d,)]
    mlp = [(d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return Transformer([(50257, d), (1024, d)], [*norm, *attention, *norm, *mlp], 12, norm)


def llama_7b() -> Transformer:
    """A Llama of 6.74 billion parameters."""
    d, inner, words = 4096, 11008, 32000
    block = [*[(d, d)] * 4, *[(inner, d)] * 2, (d, inner), (d,), (d,)]
    return Transformer([(words, d)], block, 32, [(d,), (words, d)])


MODELS: dict[str, Callable[[], Transformer]] = {"GPT-2 small": gpt2_small, "7 B": llama_7b}
