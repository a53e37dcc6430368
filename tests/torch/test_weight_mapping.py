"""WeightSubscriber's mapping: engines that have a trainer's parameters fused, sliced, transposed or under other
names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import bits

import torch_ext
from torch_ext import WeightSlice

BF16 = torch.bfloat16
HEADS, WIDTH, INNER = 12, 40, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * 4, bias=False)
        self.k = nn.Linear(WIDTH, HEADS, bias=False)
        self.v = nn.Linear(WIDTH, HEADS, bias=False)
        self.gate = nn.Linear(WIDTH, INNER)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(3))
        self.conv = nn.Conv2d(3, 5, (2, 3))


def _trainer() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Returns a model, its optimizer, and a function that takes a step."""
    torch.manual_seed(0)
    model = Block().to(BF16)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-4)

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.randn(p.shape).to(BF16)
        optimizer.step()

    return model, optimizer, step


def _fused(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns an engine's tensors: qkv and gate_up fused, down transposed, experts stacked, the rest unchanged."""
    rest = {name: named[name].clone() for name in ("down.bias", "conv.weight", "conv.bias")}
    return rest | {
        "qkv": torch.cat([named["q.weight"], named["k.weight"], named["v.weight"]]),
        "gate_up": torch.cat([named["gate.weight"], named["up.weight"]]),
        "gate_up.bias": torch.cat([named["gate.bias"], named["up.bias"]]),
        "down_t": named["down.weight"].t().contiguous(),
        "stack": torch.stack([named[f"experts.{i}.weight"].t() for i in range(3)]),
    }


def _fused_mapping() -> dict[str, Any]:
    """Returns the mapping of parameters to the tensors of `_fused`."""
    q, k = HEADS * 4, HEADS
    return {
        "q.weight": WeightSlice("qkv", at=slice(0, q)),
        "k.weight": WeightSlice("qkv", at=slice(q, q + k)),
        "v.weight": WeightSlice("qkv", at=slice(q + k, q + 2 * k)),
        "gate.weight": WeightSlice("gate_up", at=slice(0, INNER)),
        "up.weight": WeightSlice("gate_up", at=(slice(INNER, 2 * INNER), slice(None))),
        "gate.bias": WeightSlice("gate_up.bias", at=slice(0, INNER)),
        "up.bias": WeightSlice("gate_up.bias", at=slice(INNER, 2 * INNER)),
        "down.weight": WeightSlice("down_t", transposed=True),
    } | {f"experts.{i}.weight": WeightSlice("stack", at=i, transposed=True) for i in range(3)}


def _sliced(named: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Returns the tensors of one of two tensor-parallel ranks: rows of q, k, v, gate and up, columns of down, no
    experts, and one end of the convolution's kernel."""
    rows = {name: named[f"{name}.weight"].chunk(2)[rank] for name in ("q", "k", "v", "gate", "up")}
    return {
        "qkv": torch.cat([rows["q"], rows["k"], rows["v"]]),
        "gate_up": torch.cat([rows["gate"], rows["up"]]),
        "gate.bias": named["gate.bias"].chunk(2)[rank].clone(),
        "up.bias": named["up.bias"].chunk(2)[rank].clone(),
        "down.weight": named["down.weight"].chunk(2, 1)[rank].contiguous(),
        "down.bias": named["down.bias"].clone(),
        "conv": named["conv.weight"][1:4, :, :, rank : rank + 2].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "conv.bias": named["conv.bias"].clone(),
    }


def _sliced_mapping(rank: int) -> dict[str, Any]:
    """Returns the mapping of parameters to the tensors of `_sliced`."""

    def half(size: int) -> slice:
        return slice(rank * size // 2, (rank + 1) * size // 2)

    found: dict[str, Any] = {}
    for fused, names in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        at = 0
        for name in names:
            size = {"q": HEADS * 4, "k": HEADS, "v": HEADS}.get(name, INNER)
            there = slice(at, at + size // 2)
            found[f"{name}.weight"] = [WeightSlice(fused, at=there, of=half(size), shape=(size, WIDTH))]
            at += size // 2
    for name in ("gate", "up"):
        found[f"{name}.bias"] = WeightSlice(f"{name}.bias", of=half(INNER), shape=(INNER,))
    found["down.weight"] = WeightSlice("down.weight", of=(slice(None), half(INNER)), shape=(WIDTH, INNER))
    of = (slice(1, 4), slice(None), slice(None), slice(rank, rank + 2))
    found["conv.weight"] = WeightSlice("conv", of=of, shape=(5, 3, 2, 3))
    for i in range(3):
        found[f"experts.{i}.weight"] = torch.empty(INNER, WIDTH, dtype=BF16, device="meta")
    return found


LAYOUTS = {
    "fused": (_fused, _fused_mapping()),
    "rank 0": (lambda named: _sliced(named, 0), _sliced_mapping(0)),
    "rank 1": (lambda named: _sliced(named, 1), _sliced_mapping(1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_with_other_tensors_follow(layout: str) -> None:
    laid_out, mapping = LAYOUTS[layout]
    model, optimizer, step = _trainer()
    publisher = torch_ext.WeightPublisher(model, optimizer, sliceable=layout != "fused")
    tensors = laid_out({name: p.detach() for name, p in model.named_parameters()})
    subscriber = torch_ext.WeightSubscriber(tensors, mapping)
    for version in (1, 2, 3):
        if version == 2:
            with torch.no_grad():
                next(model.parameters()).mul_(2)  # changes whole blocks
        step()
        subscriber.apply(publisher.publish())
        expected = laid_out({name: p.detach() for name, p in model.named_parameters()})
        assert {name: bits(t) for name, t in tensors.items()} == {name: bits(t) for name, t in expected.items()}
    for t in tensors.values():
        t.zero_()
    late = torch_ext.WeightSubscriber(tensors, mapping)
    late.apply(publisher.full())
    assert {name: bits(t) for name, t in tensors.items()} == {name: bits(t) for name, t in expected.items()}
    assert late.version == 3


W = torch.zeros(6, 4, dtype=BF16)
BAD_MAPPINGS: list[tuple[dict[str, Any], str]] = [
    ({"a": WeightSlice("none")}, r"mapping\['a'\] is in 'none', which is not among tensors"),
    ({"a": WeightSlice("w", at=slice(0, 4))}, "8 of 24 elements of 'w' belong to no parameter"),
    ({"a": WeightSlice("w", at=7)}, "has no part 7"),
    ({"a": WeightSlice("w", of=slice(0, 6))}, "pass shape= too"),
    ({"a": WeightSlice("w", of=slice(0, 5), shape=(12, 4))}, r"has shape \(5, 4\), and 'w' has \(6, 4\)"),
    ({"a": WeightSlice("w", of=slice(0, 12, 2), shape=(12, 4))}, "slices of step 1"),
    ({"a": WeightSlice("w", at=(0, 0), transposed=True)}, "transposed needs 2"),
    ({"a": []}, "a name, a WeightSlice, several of them, or a meta tensor"),
    ({"a": 3}, "a name, a WeightSlice"),
    ({"a": W}, "a tensor: pass the name"),
    (
        {
            "a": [
                WeightSlice("w", at=slice(0, 3), of=slice(0, 3), shape=(5, 4)),
                WeightSlice("w", at=slice(3, 6), of=slice(2, 5), shape=(5, 4)),
            ]
        },
        "overlap; each element may be in one slice",
    ),
    ({"a": "w", "b": "w"}, "."),  # the same memory twice
    ({"a": [WeightSlice("w"), WeightSlice("f", shape=(6, 4))]}, "one dtype is legal"),
]


@pytest.mark.parametrize(("mapping", "message"), BAD_MAPPINGS)
def test_mappings_that_are_none(mapping: dict[str, Any], message: str) -> None:
    tensors = {"w": W.clone()} | ({"f": torch.zeros(6, 4)} if "one dtype" in message else {})
    with pytest.raises(ValueError, match=message):
        torch_ext.WeightSubscriber(tensors, mapping)
