"""Runs of memory as boxes, the form in which torch.distributed.checkpoint stores shards. Boxes cover a run's elements
once, in memory order, in as few boxes as possible; and a state that is saved in boxes of one size loads in boxes of
another."""

import random
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from training import everything, params_of, policy_of, train

import torch_ext
from torch_ext.optim.state import chunked_tensor
from torch_ext.optim.state.boxes import Run, order_of

NO_LIMIT = 1 << 60
# case -> shape, dimensions in memory order, the run's first and end element, and the expected boxes (offsets, sizes)
CASES = {
    "a vector": ((10,), (0,), (2, 7), [((2,), (5,))]),
    "inside of a row": ((4, 10), (0, 1), (12, 17), [((1, 2), (1, 5))]),
    "two rows, both in part": ((4, 10), (0, 1), (15, 23), [((1, 5), (1, 5)), ((2, 0), (1, 3))]),
    "head, rows and tail": ((4, 10), (0, 1), (5, 32), [((0, 5), (1, 5)), ((1, 0), (2, 10)), ((3, 0), (1, 2))]),
    "by columns": ((4, 10), (1, 0), (2, 9), [((2, 0), (2, 1)), ((0, 1), (4, 1)), ((0, 2), (1, 1))]),
    "a scalar": ((), (), (0, 1), [((), ())]),
    "a scalar, elsewhere": ((), (), (0, 0), []),
    "nothing of it": ((4, 10), (0, 1), (40, 40), []),
    "a tensor without elements": ((0, 3), (0, 1), (0, 0), [((0, 0), (0, 3))]),
}


@pytest.mark.parametrize("case", CASES)
def test_boxes_of_a_run(case: str) -> None:
    shape, order, (start, stop), boxes = CASES[case]
    assert Run(shape, order, start, stop).boxes(NO_LIMIT) == boxes


@pytest.mark.parametrize("limit", [NO_LIMIT, 1, 2, 7, 20])
def test_every_element_once_in_memory_order_and_at_most_2k_minus_1_boxes(limit: int) -> None:
    draw = random.Random(limit)
    for _ in range(1500):
        dims = draw.randint(0, 4)
        shape = tuple(draw.randint(1, 5) for _ in range(dims))
        order = tuple(draw.sample(range(dims), dims))
        start = draw.randint(0, prod(shape) - 1)
        run = Run(shape, order, start, draw.randint(start, prod(shape)))
        boxes = run.boxes(limit)
        if limit == NO_LIMIT:
            assert len(boxes) <= max(2 * dims - 1, 1)
        memory = torch.arange(prod(shape)).as_strided(shape, run.strides())
        found = []
        for box in boxes:
            part = memory[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
            assert part.shape == box.sizes and 0 < part.numel() <= limit
            found += part.permute(order).reshape(-1).tolist()
        assert found == list(range(run.start, run.stop))


def test_order_of_dense_tensors() -> None:
    image = torch.empty(2, 3, 4, 5)
    for t in (
        image,
        image.to(memory_format=torch.channels_last),
        image.permute(3, 1, 0, 2),
        image[:1],
        torch.empty(()),
    ):
        dense = torch.empty_like(t, memory_format=torch.preserve_format)
        run = Run(tuple(t.shape), order_of(t.shape, dense.stride()), 0, t.numel())
        strides = zip(t.shape, run.strides(), dense.stride(), strict=True)
        assert all(a == b for size, a, b in strides if size > 1)


def made(name: str) -> tuple[nn.Module, torch_ext.AdamW]:
    """Returns a model and its optimizer before the first step."""
    model = nn.ParameterList(params_of(name, [(3, 5), (700,), (129,), (16, 130), (1,), (7, 3, 4, 5)]))
    model[5].data = model[5].data.to(memory_format=torch.channels_last)
    return model, torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=policy_of(name))


@pytest.mark.parametrize("name", ["fp32", "bf16_remainder", "8bit", "fp16 moments"])
@pytest.mark.parametrize(("of_the_save", "of_the_load"), [(300, 64), (64, 300), (64, 5000)])
def test_boxes_may_be_of_another_size_than_when_it_was_saved(
    name: str, of_the_save: int, of_the_load: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, loaded = made(name), made(name)
    train(saved[1], range(2))
    train(loaded[1], range(1))
    for size, act, of in ((of_the_save, dcp.save, saved), (of_the_load, dcp.load, loaded)):
        monkeypatch.setattr(chunked_tensor, "CHUNK_NUMEL", size)
        act({"model": of[0], "optimizer": of[1]}, checkpoint_id=tmp_path / "saved")  # type: ignore[operator]
    boxes = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    largest = max(chunk.sizes.numel() for key, has in boxes.items() if "exp_avg" in key for chunk in has.chunks)  # type: ignore[union-attr]
    assert largest <= of_the_save
    assert everything(loaded[1]) == everything(saved[1])
