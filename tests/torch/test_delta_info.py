"""torch_ext.delta_info: what it says about a delta, and that damaged or foreign bytes raise."""

import random

import pytest
import torch
from torch import nn
from weight_sync import Trainer

import torch_ext


def _versions(n: int) -> tuple[Trainer, list[bytes]]:
    """Returns a trainer and the deltas of its first n versions."""
    trainer = Trainer("bf16", lr=1e-3)
    deltas = []
    for _ in range(n):
        trainer.step()
        deltas.append(trainer.publisher.publish())
    return trainer, deltas


def test_of_deltas_full_ones_and_merged_ones() -> None:
    trainer, deltas = _versions(3)
    full = trainer.publisher.full()
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in trainer.model.named_parameters()}
    first, second, _ = map(torch_ext.delta_info, deltas)
    assert (first.version, first.first_version, first.full, first.params) == (1, 1, False, shapes)
    assert (second.version, second.part, second.parts, second.n_parts, second.params) == (2, 0, 1, 1, {})
    assert 0 < second.changed <= sum(p.numel() for p in trainer.params) and second.bytes == len(deltas[1])
    whole = torch_ext.delta_info(torch.frombuffer(bytearray(full), dtype=torch.uint8))
    assert (whole.version, whole.full, whole.params) == (3, True, shapes)
    merged = torch_ext.delta_info(memoryview(torch_ext.merge_deltas(deltas[1:])))
    assert (merged.first_version, merged.version, merged.n_parts) == (2, 3, 2)
    assert {info.chain for info in (first, second, whole, merged)} == {first.chain} and len(first.chain) == 32
    assert first.model == whole.model == torch_ext.delta_info(_versions(1)[1][0]).model
    assert first.chain != torch_ext.delta_info(_versions(1)[1][0]).chain


def test_names_that_look_like_shapes() -> None:
    model = nn.Module()
    named = {"w[3]": (3,), "w[": (2, 2), "[]": (), "w[4, 5]": (5, 4), "w": (0,)}
    for name, shape in named.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    optimizer = torch_ext.AdamW(model.named_parameters())
    full = torch_ext.WeightPublisher(model, optimizer).full()
    assert torch_ext.delta_info(full).params == {name: (shape, torch.float32) for name, shape in named.items()}


def test_of_any_bytes() -> None:
    """Damaged, truncated and foreign bytes raise; delta_info never returns wrong facts."""
    trainer, deltas = _versions(1)
    draw = random.Random(3)
    for good in (deltas[0], trainer.publisher.full()):
        for _ in range(300):
            raw = bytearray(good)
            if draw.random() < 0.3:
                del raw[draw.randrange(len(raw)) :]
            else:
                raw[draw.randrange(12, len(raw))] ^= 1 << draw.randrange(8)
            with pytest.raises(ValueError, match="no part of a delta|cut off|damaged"):
                torch_ext.delta_info(raw)
    for other in (b"", b"\0" * 200, deltas[0] + b"\0"):
        with pytest.raises(ValueError, match="no part of a delta"):
            torch_ext.delta_info(other)
    with pytest.raises(ValueError, match="a delta is a str"):
        torch_ext.delta_info("delta")  # type: ignore[arg-type]
    later = bytearray(deltas[0])
    later[8] = 200
    with pytest.raises(RuntimeError, match="has format 200 at byte 0; this library reads format 1"):
        torch_ext.delta_info(later)
