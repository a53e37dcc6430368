"""WeightPublisher and WeightSubscriber: an engine follows a trainer version by version, with equal bits, whatever was
stepped or written in between."""

import gc
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import weight_formats_rebuilt as theirs
from torch import Tensor, nn
from training import POLICIES, bits, policy_of
from weight_sync import Engine, Trainer, weights

import torch_ext

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_bits_are_equal_at_every_version(policy: str, exact: bool) -> None:
    trainer = Trainer(policy, exact=exact)
    engine = Engine(trainer.model)
    memory = {name: t.data_ptr() for name, t in engine.tensors.items()}
    for version, steps in enumerate((1, 4, 0, 16), 1):
        trainer.step(steps)
        assert engine.differs(trainer.model) or not steps
        engine.subscriber.apply(trainer.publisher.publish(), "full" if version % 2 else "touched")
        assert engine.differs(trainer.model) == []
        assert engine.subscriber.version == trainer.publisher.version == version
    assert memory == {name: t.data_ptr() for name, t in engine.tensors.items()}


@pytest.mark.parametrize("lr", [1e-6, 1e-3, 0.5])
def test_many_versions_at_other_learning_rates(lr: float) -> None:
    trainer = Trainer("bf16_remainder", lr=lr)
    engine = Engine(trainer.model)
    for _ in range(20):
        trainer.step()
        engine.subscriber.apply(trainer.publisher.publish(), "full")
        assert engine.differs(trainer.model) == []


def test_a_delta_is_small_and_before_a_step_it_is_empty() -> None:
    trainer = Trainer("bf16", lr=1e-6)
    engine = Engine(trainer.model)
    empty = trainer.publisher.publish()
    whole = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    engine.subscriber.apply(empty)
    trainer.step()
    delta = trainer.publisher.publish()
    again = trainer.publisher.publish()
    assert isinstance(delta, bytes)
    assert len(again) < len(delta) < whole / 3  # generous: the model is small, and the delta contains all names
    engine.subscriber.apply(delta)
    engine.subscriber.apply(again)
    assert engine.differs(trainer.model) == [] and engine.subscriber.version == 3


@pytest.mark.parametrize("frozen", ["", "left out", "in the optimizer"])
@pytest.mark.parametrize("exact", [False, True])
def test_what_a_publisher_keeps(exact: bool, frozen: str) -> None:
    """A publisher keeps 5/32 byte per trained element, with exact=True another half byte; incomplete blocks count as
    whole ones. For untrained weights it keeps only a checksum per 1024 elements."""
    model = nn.Sequential(nn.Linear(1024, 512, bias=False), nn.Linear(1024, 4096, bias=False)).to(BF16)
    trained, other = model[0].weight, model[1].weight
    if frozen:
        other.requires_grad_(False)
    else:
        del model[1]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or frozen == "in the optimizer"]
    optimizer = torch_ext.AdamW(named, policy=policy_of("bf16"))

    def step() -> None:
        trained.grad = torch.ones_like(trained)
        optimizer.step()

    def held() -> int:
        """Returns the bytes of all CPU tensors in this process."""
        gc.collect()
        found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu"]
        tensors = [t for t in found if t.layout is torch.strided]  # sparse tensors of other tests have no storage
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    step()
    before = held()
    publisher = torch_ext.WeightPublisher(model, optimizer, exact)
    step()
    publisher.publish()
    kept = held() - before
    most = (5 / 32 + exact / 2) * trained.numel()
    if frozen:
        most += other.numel() / 128 + (1 << 20) * 9 / 64
    assert 0.9 * most < kept <= most + 4096


@pytest.mark.parametrize("states", ["fp32", "bf16", "bf16_remainder", "8bit"])
def test_what_a_parameter_more_costs(states: Any) -> None:
    """publish() makes at most 40 Python calls per additional parameter (it used to be 80), if nothing has moved since
    the last version."""

    def calls(layers: int) -> int:
        """Returns how many Python calls publish() makes for a model of so many layers."""
        model = nn.ModuleList(nn.Linear(3, 5) for _ in range(layers)).to(torch.float32 if states == "fp32" else BF16)
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, states=states)
        publisher, engine, found = torch_ext.WeightPublisher(model, optimizer), Engine(model), 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal found
            found += event == "call"

        for version in range(5):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            if version == 2:
                model[7].weight.data = model[7].weight.data.clone()
            found = 0
            sys.setprofile(count)
            delta = publisher.publish()
            sys.setprofile(None)
            engine.subscriber.apply(delta, "full")
            assert engine.differs(model) == []
        return found

    assert calls(60) - calls(20) <= 20 * 80


def test_frozen_weights_of_several_runs() -> None:
    """A large frozen weight is published in several runs. It is written, unfrozen and trained, and keeps its division
    into runs."""
    model = nn.Sequential(nn.Linear(64, 2), nn.Linear(1024, 1500, bias=False)).to(BF16)
    large = model[1].weight.requires_grad_(False)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-3)
    publisher, engine = torch_ext.WeightPublisher(model, optimizer), Engine(model)
    parts = []
    for version in range(4):
        if version == 1:
            large.data[1490, 3] = 7
        large.requires_grad_(version > 1)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
        parts.append(publisher.publish())
    engine.subscriber.apply(torch_ext.merge_deltas(parts[:3]), "full")
    engine.subscriber.apply(parts[3], "full")
    assert engine.differs(model) == []
    assert len(parts[1]) < len(parts[3]) < 2 * large.numel()


# -- external writes --------------------------------------------------------------------------------------------------


def _first(trainer: Trainer) -> nn.Parameter:
    return trainer.params[0]


def _through_data(trainer: Trainer) -> None:
    _first(trainer).data[3, 5] = 7


def _through_numpy(trainer: Trainer) -> None:
    _first(trainer).data.view(torch.int16 if _first(trainer).element_size() == 2 else torch.int32).numpy()[2, 1] += 1


def _in_place(trainer: Trainer) -> None:
    with torch.no_grad():
        _first(trainer).mul_(1.5)


def _frozen(trainer: Trainer) -> None:
    trainer.model.frozen.data[7] = 3


def _another_memory(trainer: Trainer) -> None:
    _first(trainer).data = _first(trainer).data * 2


def _loads(trainer: Trainer) -> None:
    trainer.model.load_state_dict({name: t * 1.25 for name, t in weights(trainer.model).items()})


def _loads_and_resyncs(trainer: Trainer) -> None:
    _loads(trainer)
    trainer.optimizer.resync_masters()


def _clamps_masters(trainer: Trainer) -> None:
    with trainer.optimizer.master_weights():
        _first(trainer).clamp_(-0.05, 0.05)


WRITES = [
    _through_data,
    _through_numpy,
    _in_place,
    _frozen,
    _another_memory,
    _loads,
    _loads_and_resyncs,
    _clamps_masters,
]
SILENT = {_through_data, _through_numpy}


@pytest.mark.parametrize("steps_after", [0, 1])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "fp16", "fp32", "no master"])
def test_writes_travel(policy: str, write: Callable[[Trainer], None], steps_before: int, steps_after: int) -> None:
    """A write is published whether or not steps changed other weights before or after it. (If there is no master to
    compare with, a silent write into a block that a step changed makes the engine raise.)"""
    trainer = Trainer(policy, lr=1e-3)
    engine = Engine(trainer.model)
    trainer.step(3)
    engine.subscriber.apply(trainer.publisher.publish())
    trainer.step(steps_before)
    write(trainer)
    trainer.step(steps_after)
    delta = trainer.publisher.publish()
    if policy in ("fp32", "no master") and write in SILENT and (steps_before or steps_after):
        try:
            engine.subscriber.apply(delta)
        except RuntimeError:
            engine.subscriber.apply(trainer.publisher.full())
    else:
        engine.subscriber.apply(delta)
    assert engine.differs(trainer.model) == []
    trainer.step()
    engine.subscriber.apply(trainer.publisher.publish(), "full")
    assert engine.differs(trainer.model) == []


def test_loading_an_optimizer_leaves_the_chain_as_it_is() -> None:
    """The publisher goes on after load_state_dict; engines need no full message."""
    trainer = Trainer("bf16")
    engine = Engine(trainer.model)
    trainer.step(2)
    saved = trainer.optimizer.state_dict()
    trainer.step(1)
    trainer.optimizer.load_state_dict(saved)
    trainer.step(2)
    engine.subscriber.apply(trainer.publisher.publish(), "full")
    assert engine.differs(trainer.model) == []


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "8bit"])
def test_states_on_the_host(policy: str, fraction: float) -> None:
    trainer = Trainer(policy, lr=1e-3, offload_fraction=fraction)
    engine = Engine(trainer.model)
    for write in (None, _through_data, _loads, None):
        trainer.step(2)
        if write is not None:
            write(trainer)
        engine.subscriber.apply(trainer.publisher.publish(), "full")
        assert engine.differs(trainer.model) == []


# -- chains ------------------------------------------------------------------------------------------------------------


def test_who_joins_late_takes_full() -> None:
    trainer = Trainer("bf16", lr=1e-3)
    engine, late = Engine(trainer.model), Engine(trainer.model)
    for t in late.tensors.values():
        t.zero_()
    for _ in range(3):
        trainer.step()
        engine.subscriber.apply(trainer.publisher.publish())
    late.subscriber.apply(trainer.publisher.full())
    assert late.differs(trainer.model) == [] and late.subscriber.version == 3
    trainer.step()
    delta = trainer.publisher.publish()
    for each in (engine, late):
        each.subscriber.apply(delta, "full")
        assert each.differs(trainer.model) == []


def test_versions_are_merged() -> None:
    trainer = Trainer("bf16", lr=1e-3)
    engine = Engine(trainer.model)
    deltas = []
    for _ in range(3):
        trainer.step()
        deltas.append(trainer.publisher.publish())
    merged = torch_ext.merge_deltas([deltas[2], torch_ext.merge_deltas(deltas[:2])])
    engine.subscriber.apply(merged, "full")
    assert engine.differs(trainer.model) == [] and engine.subscriber.version == 3
    with pytest.raises((ValueError, RuntimeError)):
        torch_ext.merge_deltas([deltas[0], deltas[2]])


def test_after_a_restart_a_new_chain_begins_and_engines_say_so() -> None:
    trainer = Trainer("bf16", lr=1e-3)
    engine = Engine(trainer.model)
    trainer.step()
    engine.subscriber.apply(trainer.publisher.publish())
    restarted = torch_ext.WeightPublisher(trainer.model, trainer.optimizer)
    assert restarted.version == 0
    with pytest.raises(RuntimeError, match="a newer WeightPublisher was made for this optimizer"):
        trainer.publisher.publish()
    trainer.step()
    delta = restarted.publish()
    before = {name: t.clone() for name, t in engine.tensors.items()}
    with pytest.raises(RuntimeError, match="chain"):
        engine.subscriber.apply(delta)
    assert all(bits(engine.tensors[name]) == bits(t) for name, t in before.items())
    engine.subscriber.apply(restarted.full())
    assert engine.differs(trainer.model) == [] and engine.subscriber.version == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda deltas: deltas[1],  # the first one was lost
        lambda deltas: deltas[0][:-1],
        lambda deltas: deltas[0][:20] + bytes([deltas[0][20] ^ 1]) + deltas[0][21:],
        lambda deltas: b"",
        lambda deltas: [],
        lambda deltas: [deltas[0], deltas[0]],
        lambda deltas: b"torch_ext" * 100,
    ],
)
def test_what_does_not_follow_is_an_error_and_nothing_is_written(damage: Callable[[list[bytes]], Any]) -> None:
    trainer = Trainer("bf16", lr=1e-3)
    engine = Engine(trainer.model)
    deltas = []
    for _ in range(2):
        trainer.step()
        deltas.append(trainer.publisher.publish())
    before = {name: t.clone() for name, t in engine.tensors.items()}
    with pytest.raises((ValueError, RuntimeError)) as raised:
        engine.subscriber.apply(damage(deltas))
    assert len(str(raised.value)) > 20
    assert all(bits(engine.tensors[name]) == bits(t) for name, t in before.items())
    assert engine.subscriber.version == 0
    for delta in deltas:
        engine.subscriber.apply(delta)
    assert engine.differs(trainer.model) == []
    with pytest.raises(RuntimeError):
        engine.subscriber.apply(deltas[1])  # a second time


def test_what_somebody_wrote_to_an_engine_is_found() -> None:
    trainer = Trainer("bf16", lr=1e-6)
    engine = Engine(trainer.model)
    trainer.step()
    engine.tensors["frozen"][0] += 1
    delta = trainer.publisher.publish()
    with pytest.raises(RuntimeError):
        engine.subscriber.apply(delta, "full")
    assert engine.subscriber.version == 0
    engine.subscriber.apply(delta)  # verify="touched" does not look at `frozen`
    assert engine.differs(trainer.model) == ["frozen"]


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda d: torch.frombuffer(bytearray(d), dtype=torch.uint8)])
def test_bytes_of_any_kind(kind: Callable[[bytes], Any]) -> None:
    trainer = Trainer("bf16", lr=1e-3)
    engine = Engine(trainer.model)
    trainer.step()
    engine.subscriber.apply(kind(trainer.publisher.publish()))
    assert engine.differs(trainer.model) == []


# -- other libraries' engines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "no master"])
def test_patches_bring_what_deltas_bring(policy: str) -> None:
    trainer = Trainer(policy, lr=1e-5)
    engine = weights(trainer.model)
    for write in (None, _through_data if policy != "no master" else _in_place, _loads, _frozen, None):
        trainer.step(1)
        if write is not None:
            write(trainer)
        patches = trainer.publisher.publish_patches()
        assert [p.name for p in patches] == [name for name, _ in trainer.model.named_parameters()]
        theirs.vllm_loads(engine, patches)
        assert all(bits(p) == bits(engine[name]) for name, p in trainer.model.named_parameters())
    assert sum(p.indices.numel() for p in trainer.publisher.publish_patches()) == 0
    assert trainer.publisher.version == 6


def test_patches_are_a_version_that_subscribers_miss() -> None:
    """publish_patches() counts as a version, so a delta that follows it does not fit an engine that did not get the
    patches."""
    trainer = Trainer("bf16", lr=1e-3)
    engine = Engine(trainer.model)
    trainer.step()
    trainer.publisher.publish_patches()
    trainer.step()
    delta = trainer.publisher.publish()
    with pytest.raises(RuntimeError):
        engine.subscriber.apply(delta)
    engine.subscriber.apply(trainer.publisher.full())
    assert engine.differs(trainer.model) == []


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_publishing_what_is_offloaded() -> None:
    trainer = Trainer("bf16", lr=1e-3)
    engine = Engine(trainer.model)
    trainer.step()
    torch_ext.offload(trainer.model, trainer.optimizer)
    with pytest.raises(RuntimeError, match="is offloaded; call torch_ext.onload"):
        trainer.publisher.publish()
    torch_ext.onload(trainer.model, trainer.optimizer)
    engine.subscriber.apply(trainer.publisher.publish(), "full")
    assert engine.differs(trainer.model) == []


def test_publishers_of_other_optimizers_and_models() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"torch.optim.adamw.AdamW; torch_ext.AdamW, Adam"):
        torch_ext.WeightPublisher(model, torch.optim.AdamW(model.parameters()))
    optimizer = torch_ext.AdamW(model.named_parameters())
    with pytest.raises(ValueError, match="'0.weight' is in torch.float64"):
        torch_ext.WeightPublisher(nn.Sequential(nn.Linear(3, 3).double()), optimizer)
    with pytest.raises(ValueError, match="no parameters"):
        torch_ext.WeightPublisher(nn.Sequential(), optimizer)
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="'weight' has strides"):
        torch_ext.WeightPublisher(conv, torch_ext.AdamW(conv.named_parameters()))


def _of_file(tmp_path: pathlib.Path) -> Tensor:
    """Returns a tensor in a file that is mapped read-only."""
    import numpy as np

    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_tensors_that_cannot_be_written_to(tmp_path: pathlib.Path) -> None:
    for tensor, message in [
        (_of_file(tmp_path), "memory that may only be read"),
        (torch.ones(3, dtype=torch.float64), "is torch.float64"),
        (torch.ones(3, device="meta"), "on meta"),
        (torch.ones(1).expand(3), "expanded tensor"),
        (torch.ones(3).to_sparse(), "sparse"),
        ([1.0], "is a list"),
    ]:
        with pytest.raises(ValueError, match=message):
            torch_ext.WeightSubscriber({"w": tensor})  # type: ignore[dict-item]


@pytest.mark.parametrize("other", ["dtype", "shape", "transposed", "name", "missing", "more"])
def test_engines_of_another_model(other: str) -> None:
    model = nn.Linear(6, 4, bias=False).to(BF16)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2)
    publisher = torch_ext.WeightPublisher(model, optimizer)
    weight = model.weight.detach().clone()
    tensors = {
        "dtype": {"weight": weight.half()},
        "shape": {"weight": weight[:3]},
        "transposed": {"weight": weight.t().contiguous()},
        "name": {"w": weight},
        "missing": {},
        "more": {"weight": weight, "bias": torch.zeros(4, dtype=BF16)},
    }[other]
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    before = {name: bits(t) for name, t in tensors.items()}
    with pytest.raises((ValueError, RuntimeError)) as raised:
        torch_ext.WeightSubscriber(tensors).apply(publisher.publish())
    assert "of another model" in str(raised.value) or "weight" in str(raised.value)
    assert before == {name: bits(t) for name, t in tensors.items()}


def test_an_engine_whose_tensors_moved() -> None:
    trainer = Trainer("bf16", lr=1e-3)
    engine = Engine(trainer.model)
    trainer.step()
    engine.tensors["p0"].data = engine.tensors["p0"].clone()
    with pytest.raises(RuntimeError, match="'p0' has another address than when this WeightSubscriber was made"):
        engine.subscriber.apply(trainer.publisher.publish())
    with pytest.raises(ValueError, match="verify is 'all'; 'touched' and 'full'"):
        engine.subscriber.apply(b"", "all")  # type: ignore[arg-type]
