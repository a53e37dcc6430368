"""Optimizer.measure_health() and health(): the numbers, the table and the warnings of one step; and that other steps
are not affected."""

import copy
import re
from typing import Any

import pytest
import torch

import torch_ext

BF16, F32 = torch.bfloat16, torch.float32


def trained(dtype: torch.dtype = BF16, **options: Any) -> tuple[torch.nn.Linear, torch_ext.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 70).to(dtype)
    return model, torch_ext.AdamW(model.named_parameters(), **({"lr": 1e-3} | options))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("dtype, states", [(BF16, "bf16"), (BF16, "8bit"), (F32, "fp32"), (torch.float16, "bf16")])
def test_numbers_are_those_of_masters_before_and_after(dtype: torch.dtype, states: Any, fraction: float) -> None:
    model, optimizer = trained(dtype, states=states, offload_fraction=fraction)
    step(model, optimizer)
    before = {key: value.double().clone() for key, value in optimizer.master_state_dict().items()}
    weights = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer.measure_health()
    step(model, optimizer)
    after = {key: value.double().clone() for key, value in optimizer.master_state_dict().items()}
    found = optimizer.health()
    assert found.step == 2 and [p.name for p in found.params] == ["weight", "bias"]
    for p in found.params:
        update, weight = after[p.name] - before[p.name], after[p.name]
        assert p.elements == weight.numel()
        assert p.update_ratio == pytest.approx(float(update.norm() / weight.norm()), rel=1e-5)
        assert p.largest_weight == float(weight.abs().max())
        moved = model.get_parameter(p.name).detach() != weights[p.name]
        assert p.moved == float(moved.double().mean())
        digits = {BF16: 8, torch.float16: 11, F32: 24}[dtype]
        exponent = torch.frexp(weight).exponent - 1
        below = update.abs() < torch.ldexp(torch.ones_like(weight), exponent.clamp(min=-14) - digits)
        if dtype != torch.float16 or float(weight.abs().min()) > 2**-14:
            below = update.abs() < torch.ldexp(torch.ones_like(weight), exponent - digits)
        assert p.below_half_ulp == float(below.double().mean())


def test_it_prints_a_table_and_gives_numbers_to_loggers() -> None:
    model, optimizer = trained()
    optimizer.measure_health()
    step(model, optimizer)
    found = optimizer.health()
    lines = str(found).splitlines()
    assert lines[0].split() == ["step", "1", "update/weight", "moved", "<", "ulp/2", "largest"]
    assert lines[1].startswith("weight") and lines[2].startswith("bias")
    logged = found.as_dict()
    assert set(logged) == {
        f"health/{key}/{name}"
        for key in ("update_ratio", "moved", "below_half_ulp", "largest_weight")
        for name in ("weight", "bias")
    }
    assert all(type(value) is float for value in logged.values())
    assert found.warnings == []


def test_only_the_next_step_measures_and_no_bit_is_another() -> None:
    """measure_health() affects one step, and not its result."""
    (a, measured), (b, plain) = trained(states="8bit"), trained(states="8bit")
    for i in range(4):
        if i == 1:
            measured.measure_health()
        step(a, measured)
        step(b, plain)
    assert measured.health().step == 2
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _warnings(model: torch.nn.Module, optimizer: torch_ext.AdamW, steps: int = 0) -> str:
    """Returns the warnings of a measured step, after `steps` others."""
    for _ in range(steps):
        step(model, optimizer)
    optimizer.measure_health()
    step(model, optimizer)
    health = optimizer.health()
    assert [f"! {text}" for text in health.warnings] == [t for t in str(health).splitlines() if t.startswith("! ")]
    return "\n".join(health.warnings)


def test_a_warning_of_updates_that_are_large() -> None:
    said = (
        r"weight: the update is [\d.]+% of the weights \(0.01 to 1 % is usual\): a smaller learning rate, or warm-up, "
    )
    assert re.search(said + "may be better", _warnings(*trained(lr=10.0)))


def test_a_warning_of_what_does_not_change() -> None:
    found = _warnings(*trained(lr=0.0), steps=1)
    assert "weight: nothing changed: its gradient or its learning rate is zero" in found.splitlines()


@pytest.mark.parametrize("rounding, warns", [("nearest", True), ("dithered", False)])
def test_a_warning_of_updates_that_are_lost(rounding: str, warns: bool) -> None:
    found = _warnings(*trained(lr=1e-5, policy={"main_params_dtype": None}, weight_rounding=rounding))
    said = r"weight: \d+% of the weights lose their updates, which are too small for their dtype: give it masters, or "
    assert bool(re.search(said + "weight_rounding='dithered'", found)) is warns


def test_a_warning_of_weights_that_are_not_finite() -> None:
    model, optimizer = trained(F32)
    with torch.no_grad():
        model.weight[0, 0] = 1e30
    assert "weight: a weight is not finite, or too large to be squared" in _warnings(model, optimizer).splitlines()


def test_a_warning_of_weights_near_the_end_of_float16() -> None:
    model, optimizer = trained(torch.float16)
    with torch.no_grad():
        model.bias[0] = 20_000
    assert re.fullmatch(
        r"bias: its largest weight is 2e\+04; the largest float16 is 65504", _warnings(model, optimizer)
    )


@pytest.mark.parametrize("first", ["load", "step"])
def test_a_load_forgets_neither_what_was_asked_nor_what_was_measured(first: str) -> None:
    """Loads a state between measure_health() and the step, or after the step."""
    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = torch_ext.AdamW(model.parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.measure_health()
    for action in sorted(("load", "step"), reverse=first == "step"):
        if action == "load":
            optimizer.load_state_dict(saved)
        else:
            model(torch.ones(2, 8).bfloat16()).sum().backward()
            optimizer.step()
    assert optimizer.health().step == 1


def test_steps_in_backward_measure_themselves() -> None:
    found = []
    for in_backward in (False, True):
        model, optimizer = trained(step_in_backward=in_backward)
        step(model, optimizer)
        optimizer.measure_health()
        step(model, optimizer)
        step(model, optimizer)
        found.append((optimizer.health().as_dict(), optimizer.health().step))
    assert found[0] == found[1] and found[0][1] == 2


def test_nothing_measured_is_an_error_that_says_what_to_do() -> None:
    model, optimizer = trained()
    with pytest.raises(RuntimeError, match=r"measure_health\(\) was not called; call measure_health\(\)"):
        optimizer.health()
    optimizer.measure_health()
    with pytest.raises(RuntimeError, match=r"no step was taken since measure_health\(\)"):
        optimizer.health()


# -- together with other features --------------------------------------------------------------------------------------


def _elements(optimizer: torch_ext.AdamW) -> dict[str, int]:
    return {p.name: p.elements for p in optimizer.health().params}


@pytest.mark.parametrize("numel", [1, 5, 130, 1024, 1025, 3000])
@pytest.mark.parametrize("states", ["bf16", "bf16_remainder", "8bit"])
def test_what_others_wrote_is_no_update(states: Any, numel: int) -> None:
    """The remainders of a block that was written externally are dropped before the step, also in an incomplete last
    block; the write must not count as an update."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(numel).to(BF16))
    optimizer = torch_ext.AdamW([("p", p)], lr=1e-5, states=states)
    for measured in (False, True):
        if measured:
            p.data.mul_(1.25)
            before = p.detach().double()
            optimizer.measure_health()
        p.grad = torch.randn(numel).to(BF16)
        optimizer.step()
    update = optimizer.master_state_dict()["p"].double() - before
    assert optimizer.health().params[0].update_rms == pytest.approx(float(update.square().mean().sqrt()), rel=1e-3)


def test_a_backward_that_stepped_and_whose_gradients_are_dropped_is_measured_once() -> None:
    model, optimizer = trained(step_in_backward=True)
    step(model, optimizer)
    optimizer.measure_health()
    model(torch.randn(8, 300).to(BF16)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"measure_health\(\) after a backward that stepped some weights already"):
        optimizer.measure_health()
    optimizer.zero_grad()
    assert _elements(optimizer) == {"weight": 21000, "bias": 70} and optimizer.health().step == 2
    step(model, optimizer)
    assert optimizer.health().step == 2


@pytest.mark.filterwarnings("ignore:.*a step was skipped")
def test_a_step_that_is_left_out_says_so() -> None:
    model, optimizer = trained(skip_nonfinite=True)
    step(model, optimizer)
    optimizer.measure_health()
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    optimizer.step()
    said = "nothing was measured: the step was skipped, because a gradient was not finite"
    assert optimizer.health().params == () and optimizer.health().warnings == [said]


def test_what_is_frozen_after_the_step_was_measured() -> None:
    model, optimizer = trained()
    optimizer.measure_health()
    step(model, optimizer)
    model.weight.requires_grad_(False)
    assert _elements(optimizer) == {"weight": 21000, "bias": 70}


def test_a_state_that_is_loaded_forgets_no_question_and_no_answer() -> None:
    """Loads a state that has taken steps, between measure_health() and the step and again after the step."""
    model, optimizer = trained()
    step(model, optimizer)
    optimizer.measure_health()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    assert optimizer.health().step == 2
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert _elements(optimizer) == {"weight": 21000, "bias": 70}
