"""What a Muon step produces besides weights and states: averages, health, and the record of changed weights that
publishers use."""

import copy
from typing import Any

import pytest
import torch
from offloaded import KINDS
from torch import Tensor, nn
from torch.optim import swa_utils
from weight_sync import Engine

import torch_ext

BF16, F32 = torch.bfloat16, torch.float32
STATES = [
    (BF16, "fp32"),
    (BF16, "bf16"),
    (BF16, "bf16_remainder"),
    (BF16, "8bit"),
    (F32, "fp32"),
    (torch.float16, "bf16"),
]
SHAPES = {"qkv": (90, 70), "experts": (2, 24, 50), "one": (1, 1100), "bias": (70,)}


def model_in(dtype: torch.dtype) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    made = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return nn.ParameterDict({name: nn.Parameter(value.to(dtype)) for name, value in made.items()})


def muon(model: nn.ParameterDict, states: Any = None, **options: Any) -> torch_ext.Muon:
    """Returns a Muon optimizer; one parameter holds several matrices, which begin inside blocks."""
    given: dict[str, Any] = {"lr": 1e-3, "ns_dtype": F32, "split": {"qkv": (31, 59)}} | options
    return torch_ext.Muon(model.named_parameters(), states=states, **given)


def step(model: nn.ParameterDict, optimizer: torch_ext.Muon, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.values():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()
    optimizer.zero_grad()


def clones(named: Any) -> dict[Any, Tensor]:
    return {key: value.detach().clone() for key, value in named.items()}


# -- averages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_fp32_averages_are_what_swa_utils_keeps(every: int) -> None:
    model = model_in(F32)
    optimizer = muon(model, ema_decay=0.97, ema_dtype=F32, ema_every=every)
    theirs = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.97))
    for i in range(12):
        step(model, optimizer, i)
        if (i + 1) % every == 0:
            theirs.update_parameters(model)
    wanted = dict(theirs.module.named_parameters())
    for name, average in optimizer.ema_state_dict().items():
        torch.testing.assert_close(average, wanted[str(name)].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype, states", STATES)
@pytest.mark.parametrize("ema_dtype, most", [(BF16, 0.02), ("24bit", 1e-4), (F32, 1e-6)])
def test_averages_are_of_masters(dtype: torch.dtype, states: str, ema_dtype: Any, most: float) -> None:
    model = model_in(dtype)
    optimizer = muon(model, states, ema_decay=0.9, ema_dtype=ema_dtype)
    wanted: dict[Any, Tensor] = {}
    for i in range(6):
        step(model, optimizer, i)
        for key, master in optimizer.master_state_dict().items():
            value = master.double().clone()
            wanted[key] = wanted[key] + 0.1 * (value - wanted[key]) if key in wanted else value
    for key, average in optimizer.ema_state_dict().items():
        assert float((average - wanted[key]).norm() / wanted[key].norm()) < most, key


@pytest.mark.parametrize("ema_dtype", [BF16, "24bit"])
def test_averages_are_swapped_in_and_resumed(ema_dtype: Any) -> None:
    model = model_in(BF16)
    optimizer = muon(model, "bf16_remainder", ema_decay=0.9, ema_dtype=ema_dtype)
    for i in range(3):
        step(model, optimizer, i)
    before, masters = clones(model), clones(optimizer.master_state_dict())
    averages = clones(optimizer.ema_state_dict())
    with optimizer.ema_weights():
        for name, average in averages.items():
            assert torch.equal(model[str(name)].detach(), average.to(BF16))
        with pytest.raises(RuntimeError, match="ema_weights"):
            optimizer.step()
    assert all(torch.equal(model[name].detach(), before[name]) for name in before)
    after = clones(optimizer.master_state_dict())
    assert all(torch.equal(after[name], masters[name]) for name in masters)
    twin = copy.deepcopy(model)
    other = muon(twin, "bf16_remainder", ema_decay=0.9, ema_dtype=ema_dtype)
    other.load_state_dict(optimizer.state_dict())
    for i in range(3, 5):
        step(model, optimizer, i)
        step(twin, other, i)
    ours, theirs = optimizer.ema_state_dict(), other.ema_state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_average_needs_more_than_16_bits() -> None:
    with pytest.raises(ValueError, match="ema_decay: 'bias' is in torch.bfloat16 without a master"):
        muon(model_in(BF16), policy={"main_params_dtype": None}, ema_decay=0.9)
    with pytest.raises(ValueError, match=r"ema_decay is 1.0; a number in \[0, 1\)"):
        muon(model_in(BF16), ema_decay=1.0)


# -- health -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, states", STATES)
def test_health_is_of_every_parameter(dtype: torch.dtype, states: str) -> None:
    model = model_in(dtype)
    optimizer = muon(model, states)
    step(model, optimizer, 0)
    before = {key: value.double().clone() for key, value in optimizer.master_state_dict().items()}
    weights = clones(model)
    optimizer.measure_health()
    step(model, optimizer, 1)
    after = {key: value.double().clone() for key, value in optimizer.master_state_dict().items()}
    found = optimizer.health()
    assert found.step == 2 and [p.name for p in found.params] == list(model)
    for p in found.params:
        update, weight = after[p.name] - before[p.name], after[p.name]
        assert p.elements == weight.numel()
        assert p.update_ratio == pytest.approx(float(update.norm() / weight.norm()), rel=1e-5)
        assert p.largest_weight == float(weight.abs().max())
        assert p.moved == float((model[p.name].detach() != weights[p.name]).double().mean())


def test_asking_for_more_changes_no_weight() -> None:
    plain, asked = model_in(BF16), model_in(BF16)
    of_plain, of_asked = muon(plain, "8bit"), muon(asked, "8bit", ema_decay=0.9)
    publisher = torch_ext.WeightPublisher(asked, of_asked)
    for i in range(4):
        of_asked.measure_health()
        step(plain, of_plain, i)
        step(asked, of_asked, i)
    assert publisher.publish()
    assert all(torch.equal(plain[name], asked[name]) for name in plain)


# -- weights that are published ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype, states", STATES)
def test_engines_have_the_bits_at_every_version(dtype: torch.dtype, states: str, exact: bool) -> None:
    model = model_in(dtype)
    optimizer = muon(model, states)
    publisher = torch_ext.WeightPublisher(model, optimizer, exact)
    engine = Engine(model)
    seed = 0
    for steps in (1, 3, 0, 2):
        for _ in range(steps):
            step(model, optimizer, seed)
            seed += 1
        assert engine.differs(model) or not steps
        engine.subscriber.apply(publisher.publish(), "full")
        assert engine.differs(model) == []
        with torch.no_grad():  # an external write
            model["qkv"][3, 5] += 1.0


# -- offload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_after_offload_has_the_bits_of_one_without(kind: str) -> None:
    left, stayed = nn.Linear(40, 24).bfloat16(), nn.Linear(40, 24).bfloat16()
    stayed.load_state_dict(left.state_dict())
    optimizers = [torch_ext.Muon(m, ns_dtype=F32, states="bf16_remainder") for m in (left, stayed)]
    for i in range(4):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(i)).bfloat16()
        for m, optimizer in zip((left, stayed), optimizers, strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch_ext.offload(left, optimizers[0], **{k: k == kind for k in KINDS})
        if kind == "states":
            with pytest.raises(RuntimeError, match=r"torch_ext\.onload"):
                optimizers[0].state_dict()
        torch_ext.onload(left, optimizers[0])
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), stayed.parameters(), strict=True))


@pytest.mark.parametrize("name", ["offload_fraction", "step_in_backward"])
def test_what_muon_has_not_is_named(name: str) -> None:
    options: Any = {name: 1}
    with pytest.raises(TypeError, match=rf"Muon\(\) has no argument '{name}'"):
        torch_ext.Muon([nn.Parameter(torch.ones(4, 4))], **options)
