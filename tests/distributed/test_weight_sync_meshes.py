"""Publishing FSDP2's weights: replicated shards, several meshes, tensor-parallel engines."""

from typing import Any

import pytest
import ranks
import torch
from gradients import FP32, Given, noise
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ext
from torch_ext import WeightSlice

SHAPES: list[Any] = [(30, 50), (7000,), (129,), (64, 130), (1,)]


def _model() -> Given:
    model = Given(SHAPES, FP32)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    return model


def _whole(model: nn.Module) -> dict[str, Any]:
    """Returns the whole weights as numpy arrays, since a tensor's memory would go with its process. Collective."""
    return {name: p.detach().full_tensor().numpy().copy() for name, p in model.named_parameters()}  # type: ignore[operator]


def _published(rank: int, world: int, mesh_shape: tuple[int, ...], sliceable: bool) -> Any:
    """Returns this rank's delta and the weights for three versions, and this rank's part of the full message."""
    model: Any = _model()
    names = ("replicate", "shard")[-len(mesh_shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-3)
    publisher = torch_ext.WeightPublisher(model, optimizer, sliceable=sliceable)
    found = []
    for version in range(3):
        for step in range(version):
            model(noise(10 * version + step, rank, SHAPES, FP32)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if version == 2:
            with torch.no_grad():
                model.p3.mul_(1.5)
        found.append((publisher.publish(), _whole(model)))
    return found, publisher.full()


def _weights(answers: list[Any], version: int) -> dict[str, Tensor]:
    """Returns the whole weights of a version."""
    return {name: torch.from_numpy(value) for name, value in answers[0][0][version][1].items()}


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


def test_replicated_shards_are_published_once() -> None:
    answers = ranks.run(4, _published, (2, 2), False)
    engine, late = ({name: p.detach().clone() for name, p in _model().named_parameters()} for _ in range(2))
    subscriber = torch_ext.WeightSubscriber(engine)
    for version in range(3):
        subscriber.apply([versions[version][0] for versions, _ in answers], "full")
        assert _equal(engine, _weights(answers, version))
    for t in late.values():
        t.zero_()
    fulls = [full for _, full in answers]
    torch_ext.WeightSubscriber(late).apply(fulls)
    assert _equal(late, engine)
    numel = sum(p.numel() for p in engine.values())
    assert sum(map(len, fulls)) < 4.2 * numel and max(map(len, fulls)) < 0.4 * sum(map(len, fulls))


def _halves(named: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Returns the tensors of a tensor-parallel rank of two: half of p0's columns, and half of p3's rows, transposed."""
    cut = {"p0": named["p0"].chunk(2, 1)[rank].contiguous(), "p3": named["p3"].chunk(2)[rank].t().contiguous()}
    return {name: t.clone() for name, t in named.items()} | cut


def test_tensor_parallel_engines_follow_sharded_trainers() -> None:
    answers = ranks.run(2, _published, (2,), True)
    start = {name: p.detach() for name, p in _model().named_parameters()}
    for rank in range(2):
        engine = _halves(start, rank)
        columns, rows = slice(25 * rank, 25 * (rank + 1)), slice(32 * rank, 32 * (rank + 1))
        mapping = {
            "p0": WeightSlice("p0", of=(slice(None), columns), shape=(30, 50)),
            "p3": WeightSlice("p3", of=rows, shape=(64, 130), transposed=True),
        }
        subscriber = torch_ext.WeightSubscriber(engine, mapping)
        for version in range(3):
            subscriber.apply([versions[version][0] for versions, _ in answers])
            assert _equal(engine, _halves(_weights(answers, version), rank))


def _two_dimensional(rank: int, world: int) -> list[str]:
    """Shards with FSDP2 over tensor parallelism, which cannot be published. Returns the errors."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    messages = []
    for style in (ColwiseParallel(), RowwiseParallel()):
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        parallelize_module(model, mesh["tensor"], {"0": style})
        fully_shard(model, mesh=mesh["shard"])
        with pytest.raises(ValueError) as raised:
            torch_ext.WeightPublisher(model, torch_ext.AdamW(model.named_parameters()))
        messages.append(str(raised.value))
    return messages


def test_weights_that_are_cut_in_two_dimensions_are_refused_by_name() -> None:
    legal = "; Shard(0), as fully_shard makes it, and Replicate() can be published"
    for messages in ranks.run(4, _two_dimensional):
        assert len(messages) == 2
        assert all(said.startswith("'0.weight' is sharded as (") and said.endswith(legal) for said in messages)
