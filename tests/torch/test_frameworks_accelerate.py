"""Hugging Face Accelerate with this library's optimizer: prepare, clip, accumulate, save, and resume bit for bit."""

import math
import pathlib
from typing import Any

import frameworks
import pytest
import torch
from training import POLICIES, bits, everything

import torch_ext

accelerate = frameworks.module("accelerate")
pytestmark = frameworks.needs("accelerate")

STEPS, HALF, MAX_NORM = 6, 3, 0.05


def prepared(
    name: str, precision: str, scaler: Any = None, accumulate: int = 1, **options: Any
) -> tuple[Any, torch.nn.Module, Any, Any]:
    """Returns the accelerator, model, optimizer and schedule, as users get them from `prepare`."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate)
    if scaler is not None:
        accelerator.scaler = scaler
        accelerator.native_amp = True  # Accelerate sets it if it creates a scaler itself, which it does not do on a CPU
    dtype, config = POLICIES[name]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)).to(dtype)
    policy = torch_ext.load_policy(model, override_optimizer_config=config)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def run(made: Any, steps: range, ours: bool = False, bad: int | None = None, parts: int = 1) -> list[float]:
    """Trains and returns the gradient norms. ours: clip with torch_ext's function. bad: the step that gets a gradient
    of Inf."""
    accelerator, model, optimizer, schedule = made
    dtype = next(model.parameters()).dtype
    norms = []
    for step in range(steps.start * parts, steps.stop * parts):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        with accelerator.accumulate(model):
            loss = (model(x)[:, 0].float() - x.float().abs().sum(1)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if step == bad:
                    next(model.parameters()).grad[0, 0] = math.inf
                if ours:
                    accelerator.unscale_gradients()
                    norms.append(float(torch_ext.clip_grad_norm_(optimizer, MAX_NORM)))
                else:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return norms


def scaler_of(**settings: Any) -> torch_ext.GradScaler:
    chosen = {"initial_loss_scale": 64.0, "hysteresis": 1} | settings
    return torch_ext.load_policy(torch.float16, override_optimizer_config=chosen).grad_scaler()


# case -> policy, mixed_precision, whether our scaler is used
CASES = {
    "no, fp32": ("fp32", "no", False),
    "no, bf16 and masters": ("bf16", "no", False),
    "no, bf16 and remainders": ("bf16_remainder", "no", False),
    "no, 8-bit moments": ("8bit", "no", False),
    "bf16": ("fp32", "bf16", False),
    "fp16, which has no scaler on a CPU": ("fp32", "fp16", False),
    "fp16, our scaler": ("fp32", "fp16", True),
}


@pytest.mark.parametrize("accumulate", [1, 2], ids=["", "accumulation"])
@pytest.mark.parametrize("case", CASES)
def test_D4_state_of_accelerate_goes_on_bit_for_bit(tmp_path: pathlib.Path, case: str, accumulate: int) -> None:
    name, precision, scaled = CASES[case]

    def made() -> Any:
        return prepared(name, precision, scaler_of(loss_scale_window=2) if scaled else None, accumulate)

    whole = made()
    norms = run(whole, range(HALF), parts=accumulate)
    whole[0].save_state(str(tmp_path))
    norms += run(whole, range(HALF, STEPS), parts=accumulate)
    resumed = made()
    resumed[0].load_state(str(tmp_path))
    later = run(resumed, range(HALF, STEPS), parts=accumulate)
    assert norms[HALF:] == later and min(norms) > MAX_NORM, "every step is clipped"
    assert everything(whole[2].optimizer) == everything(resumed[2].optimizer)
    assert {float(state["step"]) for state in whole[2].state.values()} == {float(STEPS)}
    if scaled:
        assert whole[0].scaler.state_dict() == resumed[0].scaler.state_dict()
        assert whole[0].scaler.get_scale() == 64.0 * 2 ** (STEPS // 2)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_D4_part_of_the_optimizer_on_the_host_goes_on_bit_for_bit(tmp_path: pathlib.Path, fraction: float) -> None:
    """The bits are also those of an optimizer that is wholly on the device. State on the host is in checkpoints, not in
    `optimizer.state`."""

    def found(made: Any) -> list[bytes]:
        states = made[2].state_dict()["state"].values()
        return [bits(t) for t in (*made[1].parameters(), *(t for state in states for t in state.values()))]

    alone = prepared("bf16", "no")
    run(alone, range(STEPS))
    whole = prepared("bf16", "no", offload_fraction=fraction)
    run(whole, range(HALF))
    whole[0].save_state(str(tmp_path))
    run(whole, range(HALF, STEPS))
    resumed = prepared("bf16", "no", offload_fraction=fraction)
    resumed[0].load_state(str(tmp_path))
    run(resumed, range(HALF, STEPS))
    assert found(whole) == found(resumed) == found(alone)


def test_prepare_moves_no_weight_and_no_counter() -> None:
    """`prepare` loads what state_dict() has returned (E11)."""
    _, _, optimizer, _ = prepared("bf16_remainder", "no")
    assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
    _, plain, made, _ = prepared("bf16_remainder", "no")
    for p, q in zip(plain.parameters(), optimizer.optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)
    assert isinstance(made.optimizer, torch_ext.AdamW)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_clip_with_what_prepare_returned(scaled: bool) -> None:
    """torch_ext.clip_grad_norm_ accepts Accelerate's wrapper. The wrapped optimizer's step applies the coefficient,
    with the result of accelerator.clip_grad_norm_."""
    runs = []
    for ours in (False, True):
        made = prepared("fp32", "fp16" if scaled else "no", scaler_of() if scaled else None)
        runs.append((run(made, range(STEPS), ours), [p.detach().clone() for p in made[1].parameters()]))
    (theirs, weights), (own, of_ours) = runs
    assert own == pytest.approx(theirs, rel=1e-6)
    for a, b in zip(weights, of_ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert own[0] == pytest.approx(run(prepared("fp32", "no"), range(1))[0], rel=0.01), "of unscaled gradients"


@pytest.mark.parametrize("scaler", ["policy", "torch"])
def test_G3_skipped_step_is_one_for_accelerate_and_its_schedule(scaler: str) -> None:
    given: Any = scaler_of() if scaler == "policy" else torch.amp.GradScaler("cpu", init_scale=64.0)
    made = prepared("fp32", "fp16", given)
    accelerator, _, optimizer, schedule = made
    run(made, range(2))
    before, rate = everything(optimizer.optimizer), schedule.get_last_lr()
    run(made, range(2, 3), bad=2)
    assert accelerator.optimizer_step_was_skipped and optimizer.step_was_skipped
    assert everything(optimizer.optimizer) == before
    assert schedule.get_last_lr() == rate
    assert given.get_scale() == 32.0
    run(made, range(3, 4))
    assert not optimizer.step_was_skipped
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
