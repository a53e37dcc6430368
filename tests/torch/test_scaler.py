"""The loss scale (semantics.md, G3): policy.grad_scaler(), which follows the rule of csrc/core/scale with
torch.amp.GradScaler's interface, and torch's own scaler."""

import copy
import json
import math
import pathlib
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from training import bits, everything, params_of, policy_of

import torch_ext

FP16 = {"loss_scale_window": 3, "hysteresis": 2, "initial_loss_scale": 1024.0}


def scaler_of(**overrides: object) -> torch_ext.GradScaler:
    return torch_ext.load_policy(torch.float16, override_optimizer_config=FP16 | overrides).grad_scaler()


def model_and_optimizer(dtype: torch.dtype = torch.float16, **options: object) -> tuple[nn.Module, torch_ext.AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(16, 4).to(dtype)
    return model, torch_ext.AdamW(model.named_parameters(), lr=1e-2, **options)


def backward(model: nn.Module, scaler: torch.amp.GradScaler, step: int, bad: float | None = None) -> None:
    """Runs a scaled backward; `bad` then overwrites one element of the weight's gradient."""
    weight = model.weight
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(weight.dtype)
    model.zero_grad()
    scaler.scale(model(x).float().square().mean()).backward()
    if bad is not None:
        weight.grad.view(-1)[3] = bad


def test_G3_fp16_policy_scales_from_32768_and_others_do_not() -> None:
    scaler = policy_of("fp16").grad_scaler()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 32768
    assert scaler.get_growth_interval() == 1000
    for name in ("fp32", "bf16"):
        disabled = policy_of(name).grad_scaler()
        assert not disabled.is_enabled()
        assert disabled.get_scale() == 1
        assert disabled.state_dict() == {}
        p = params_of("fp32")[0]
        optimizer = torch_ext.AdamW([p])
        disabled.scale(p.sum()).backward()
        disabled.unscale_(optimizer)
        assert (p.grad == 1).all()
        disabled.step(optimizer)
        disabled.update()
        assert float(optimizer.state[p]["step"]) == 1


# o: a clean step, x: an overflow -> scale after each; window 3, hysteresis 2, factors 2 and 1/2, minimum 256
SCALES = {
    "ooo": [1024, 1024, 2048],
    "xx": [1024, 512],
    "xxxxx": [1024, 512, 256, 256, 256],
    "xoox": [1024, 1024, 1024, 512],
    "xoooxx": [1024, 1024, 1024, 2048, 2048, 1024],
    "ooxooo": [1024, 1024, 1024, 1024, 1024, 2048],
}


@pytest.mark.parametrize("events", SCALES)
def test_G3_scale_grows_falls_waits_and_has_a_floor(events: str) -> None:
    scaler = scaler_of(min_loss_scale=256.0)
    model, optimizer = model_and_optimizer()
    scales = []
    for step, event in enumerate(events):
        backward(model, scaler, step, math.inf if event == "x" else None)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == SCALES[events]
    assert optimizer.skipped_steps() == events.count("x")
    assert [float(state["step"]) for state in optimizer.state.values()] == [float(events.count("o"))] * 2


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("with_unscale", [False, True], ids=["step", "unscale_ and step"])
def test_G3_skipped_step_changes_nothing(bad: float, with_unscale: bool) -> None:
    scaler = scaler_of()
    model, optimizer = model_and_optimizer()
    for step in range(3):
        before = everything(optimizer)
        backward(model, scaler, step, bad if step == 2 else None)
        if with_unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (everything(optimizer) == before) == (step == 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("way", ["plain", "ours", "ours, unscale_", "torch's"])
def test_G3_scaled_steps_equal_unscaled_ones(way: str, dtype: torch.dtype) -> None:
    """Scales are powers of two: unless something underflows or overflows, the bits are those without a scale."""
    model, optimizer = model_and_optimizer(dtype)
    plain_model, plain = model_and_optimizer(dtype)
    enabled = way != "plain"
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if way == "torch's" else scaler_of(initial_loss_scale=64.0)
    off = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(5):
        backward(model, scaler if enabled else off, step)
        backward(plain_model, off, step)
        for own, other in zip(model.parameters(), plain_model.parameters(), strict=True):
            if enabled:  # the unscaled run's gradients times the scale, since a scaled backward underflows less
                own.grad.copy_(other.grad * scaler.get_scale())
        if way == "ours, unscale_":
            scaler.unscale_(optimizer)
        (scaler if enabled else off).step(optimizer)
        plain.step()
        if enabled:
            scaler.update()
    assert everything(optimizer) == everything(plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_G3_clip_between_unscale_and_step_knows_the_scale(dtype: torch.dtype) -> None:
    model, optimizer = model_and_optimizer(dtype)
    plain_model, plain = model_and_optimizer(dtype)
    scaler, off = scaler_of(initial_loss_scale=64.0), torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        backward(model, scaler, step)
        backward(plain_model, off, step)
        for own, other in zip(model.parameters(), plain_model.parameters(), strict=True):
            own.grad.copy_(other.grad * scaler.get_scale())
        scaler.unscale_(optimizer)
        norms = [torch_ext.clip_grad_norm_(o, 0.1).item() for o in (optimizer, plain)]
        assert norms[0] == norms[1] > 0.1
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    assert everything(optimizer) == everything(plain)


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
@pytest.mark.parametrize("scaler", ["policy", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_G3_clip_of_gradients_that_are_still_scaled_is_refused(dtype: torch.dtype, scaler: str, kind: str) -> None:
    """The norm of scaled gradients is too large by the scale, and the step would divide by the scale once more."""
    model, _ = model_and_optimizer(dtype)
    optimizer: Any = getattr(torch_ext, kind)(model.named_parameters(), lr=0.1)
    # With fused=True torch's scaler leaves unscaling to the step.
    optimizer.defaults["fused"] = None if dtype == torch.float16 else True
    chosen = scaler_of(initial_loss_scale=64.0) if scaler == "policy" else torch.amp.GradScaler("cpu", 64.0)
    backward(model, chosen, 0)
    torch_ext.clip_grad_norm_(optimizer, 0.1)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"before scaler\.unscale_\(optimizer\).*policy\.grad_scaler\(\)"):
        chosen.step(optimizer)
    assert everything(optimizer) == before
    optimizer.zero_grad()
    chosen.update()
    backward(model, chosen, 1)
    torch_ext.clip_grad_norm_(optimizer, math.inf)  # max_norm=inf only measures, so scaled gradients are legal
    chosen.step(optimizer)
    assert float(optimizer.state[model.weight]["step"]) == 1


def test_G3_fp16_gradients_may_not_be_written_while_they_are_scaled() -> None:
    model, optimizer = model_and_optimizer()
    scaler = scaler_of()
    backward(model, scaler, 0)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"torch_ext\.clip_grad_norm_"):
        scaler.step(optimizer)
    scaler.update()
    assert not hasattr(optimizer, "grad_scale")


def test_G3_other_optimizers() -> None:
    """The scaler also works with torch's optimizers of fp32 models; fp16 models need one of ours."""
    model, _ = model_and_optimizer(torch.float32)
    reference, _ = model_and_optimizer(torch.float32)
    scaler = scaler_of()
    sgd, plain = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        backward(model, scaler, step, math.inf if step == 1 else None)
        backward(reference, torch.amp.GradScaler("cpu", enabled=False), step)
        scaler.step(sgd)
        scaler.update()
        if step != 1:
            plain.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)
    model, _ = model_and_optimizer(torch.float16)
    backward(model, scaler, 0)
    with pytest.raises(ValueError, match=r"optimizer of torch_ext"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


# case -> dtype, the optimizer's options, and the flag that Lightning and Accelerate read: if True, they refuse to clip
UNSCALES = {
    "fp32": (torch.float32, {}, False),
    "bf16": (torch.bfloat16, {}, False),
    "fp32, fused": (torch.float32, {"fused": True}, True),
    "fp16, which unscale_ refuses": (torch.float16, {}, True),
    "fp16, not fused": (torch.float16, {"fused": False}, False),
}


@pytest.mark.parametrize("case", UNSCALES)
def test_G3_step_supports_amp_scaling_where_torchs_does_and_where_unscale_cannot(case: str) -> None:
    """The flag is that of torch's optimizer with the same options. For fp16 gradients, which torch's unscale_ rejects,
    it is also set unless fused=False."""
    dtype, options, expected = UNSCALES[case]
    _, optimizer = model_and_optimizer(dtype, **options)
    torchs = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], **options)
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert one._step_supports_amp_scaling is expected
    if dtype != torch.float16:
        assert getattr(torchs, "_step_supports_amp_scaling", False) is expected


@pytest.mark.parametrize("case", [case for case in UNSCALES if case != "fp16, not fused"])
def test_G3_torchs_scaler_unscales_or_leaves_it_to_the_step(case: str) -> None:
    dtype, options, in_step = UNSCALES[case]
    model, optimizer = model_and_optimizer(dtype, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        before = everything(optimizer)
        backward(model, scaler, step, math.inf if step == 1 else None)
        if not in_step:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        assert (everything(optimizer) == before) == (step == 1)
    assert float(optimizer.state[model.weight]["step"]) == 2
    assert scaler.get_scale() == 32


def test_G3_skipped_step_is_none_for_hooks_averages_and_schedules() -> None:
    """Hooks of the step do not run, and frameworks that watch whether step() was called see no call."""
    scaler = scaler_of(hysteresis=1)
    model, optimizer = model_and_optimizer()
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # LR schedulers warn if no optimizer step precedes theirs
        backward(model, scaler, 0, math.inf)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    assert called == [] and optimizer.skipped_steps() == 1
    backward(model, scaler, 1)
    scaler.step(optimizer, None)  # Accelerate's call
    scaler.update()
    assert called == ["hook"] and optimizer.skipped_steps() == 1


@pytest.mark.parametrize("overflow", [(), (1,), (0, 1)], ids=["none", "second", "both"])
def test_G3_several_optimizers_with_one_scaler(overflow: tuple[int, ...]) -> None:
    """Each optimizer skips its own overflow; the scale changes once for all."""
    scaler = scaler_of(hysteresis=1)
    pairs = [model_and_optimizer() for _ in range(2)]
    losses = []
    for i, (model, _) in enumerate(pairs):
        losses.append(model(torch.ones(2, 16, dtype=torch.float16)).float().square().mean() * (i + 1))
    for scaled in scaler.scale(losses):
        scaled.backward()
    for i in overflow:
        pairs[i][0].weight.grad[0, 0] = math.inf
    for model, optimizer in pairs:
        scaler.unscale_(optimizer)
        torch_ext.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        assert float(optimizer.state[model.weight]["step"]) == float(pairs.index((model, optimizer)) not in overflow)
    scaler.update()
    assert scaler.get_scale() == (512 if overflow else 1024)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_G3_accumulation_with_a_clip_equals_the_unscaled_run(dtype: torch.dtype) -> None:
    runs = []
    for scale in (1.0, 64.0):
        model, optimizer = model_and_optimizer(dtype)
        scaler = scaler_of(initial_loss_scale=scale, loss_scale_window=1000)
        for step in range(3):
            for part in range(4):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + part)).to(dtype)
                scaler.scale(model(x).float().square().mean() / 4).backward()
            # A scaled backward underflows less: round as with scale 1, so that both runs have equal gradients.
            for p in model.parameters():
                p.grad.copy_((p.grad.float() / scale * 1024).round() / 1024 * scale)
            scaler.unscale_(optimizer)
            norm = torch_ext.clip_grad_norm_(optimizer, 0.1)
            assert norm > 0.1
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        runs.append(everything(optimizer))
    assert runs[0] == runs[1]


def test_a_process_group_of_which_this_rank_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: -1)
    with pytest.raises(ValueError, match="not a member"):
        policy_of("fp16").grad_scaler(process_group=object())


def test_G3_torchs_scaler_skips_our_step_too() -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        before = everything(optimizer)
        backward(model, scaler, step, math.nan if step == 2 else None)
        scaler.step(optimizer)
        scaler.update()
        assert (everything(optimizer) == before) == (step == 2)
    assert scaler.get_scale() == 32


def test_state_goes_on_where_it_was() -> None:
    scaler = scaler_of()
    model, optimizer = model_and_optimizer()
    for step, bad in enumerate((None, math.inf, None)):
        backward(model, scaler, step, bad)
        scaler.step(optimizer)
        scaler.update()
    saved = scaler.state_dict()
    assert saved["_growth_tracker"] == 1
    assert saved["_hysteresis_left"] == 1
    fresh = scaler_of()
    fresh.load_state_dict(saved)
    for other in (fresh, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == saved
        backward(model, other, 4, math.inf)
        other.step(optimizer)
        other.update()
        assert other.get_scale() == 512, "the second overflow"
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict({key: saved[key] for key in torchs.state_dict()})
    fresh.load_state_dict(torchs.state_dict())
    with pytest.raises(ValueError, match="min_scale"):
        fresh.load_state_dict(saved | {"min_scale": -1.0})
    with pytest.raises(ValueError, match="scael"):
        fresh.load_state_dict(saved | {"scael": 1.0})
    with pytest.raises(RuntimeError, match="empty"):
        fresh.load_state_dict({})


@pytest.mark.parametrize("scaler", ["policy", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_G3_part_of_the_optimizer_on_the_host_skips_and_unscales_too(dtype: torch.dtype, scaler: str) -> None:
    runs = []
    for fraction in (0.0, 0.5, 1.0):
        model, optimizer = model_and_optimizer(dtype, offload_fraction=fraction)
        ours = scaler == "policy"
        chosen = scaler_of(initial_loss_scale=64.0, hysteresis=1) if ours else torch.amp.GradScaler("cpu", 64.0)
        for step in range(4):
            backward(model, chosen, step, math.inf if step == 2 else None)
            if ours or dtype == torch.float32:
                chosen.unscale_(optimizer)
            if ours:
                torch_ext.clip_grad_norm_(optimizer, 0.1)
            chosen.step(optimizer)
            chosen.update()
        states = optimizer.state_dict()["state"].values()
        assert {float(state["step"]) for state in states} == {3.0}
        found = [bits(t) for t in (*model.parameters(), *(t for state in states for t in state.values()))]
        runs.append((found, chosen.get_scale()))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1] == 32.0


def by_torch_save(scaler: torch_ext.GradScaler, fresh: torch_ext.GradScaler, path: pathlib.Path) -> None:
    torch.save({"scaler": scaler.state_dict()}, path / "checkpoint.pt")
    fresh.load_state_dict(torch.load(path / "checkpoint.pt", weights_only=True)["scaler"])


def by_dcp(scaler: torch_ext.GradScaler, fresh: torch_ext.GradScaler, path: pathlib.Path) -> None:
    dcp.save({"scaler": scaler.state_dict()}, checkpoint_id=path / "dcp", no_dist=True)
    loaded = {"scaler": fresh.state_dict()}
    dcp.load(loaded, checkpoint_id=path / "dcp", no_dist=True)
    fresh.load_state_dict(loaded["scaler"])


def by_dcp_itself(scaler: torch_ext.GradScaler, fresh: torch_ext.GradScaler, path: pathlib.Path) -> None:
    """The scaler has state_dict and load_state_dict, which is all that torch.distributed.checkpoint requires of an
    object."""
    dcp.save({"scaler": scaler}, checkpoint_id=path / "dcp", no_dist=True)
    dcp.load({"scaler": fresh}, checkpoint_id=path / "dcp", no_dist=True)


def by_json(scaler: torch_ext.GradScaler, fresh: torch_ext.GradScaler, path: pathlib.Path) -> None:
    (path / "scaler.json").write_text(json.dumps(scaler.state_dict()))
    fresh.load_state_dict(json.loads((path / "scaler.json").read_text()))


@pytest.mark.parametrize("way", [by_torch_save, by_dcp, by_dcp_itself, by_json], ids=lambda way: way.__name__)
def test_G3_state_is_saved_and_restored(tmp_path: pathlib.Path, way: Any) -> None:
    """Scale, clean steps and what is left of the hysteresis: training continues as if it had not been interrupted."""
    events = "oxoooxxoo"

    def run(scaler: torch_ext.GradScaler, pair: Any, steps: range) -> list[float]:
        model, optimizer = pair
        scales = []
        for step in steps:
            backward(model, scaler, step, math.inf if events[step] == "x" else None)
            scaler.unscale_(optimizer)
            torch_ext.clip_grad_norm_(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    for cut in range(1, len(events)):
        whole, pair = scaler_of(min_loss_scale=1.0), model_and_optimizer()
        scales = run(whole, pair, range(cut))
        fresh, other = scaler_of(min_loss_scale=8.0, initial_loss_scale=16.0), model_and_optimizer()
        path = tmp_path / str(cut)
        path.mkdir()
        way(whole, fresh, path)
        other[0].load_state_dict(pair[0].state_dict())
        other[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))
        scales += run(whole, pair, range(cut, len(events)))
        assert run(fresh, other, range(cut, len(events))) == scales[cut:]
        assert everything(pair[1]) == everything(other[1])
        assert whole.state_dict() == fresh.state_dict()


def test_setters_and_new_scale() -> None:
    scaler = scaler_of()
    model, optimizer = model_and_optimizer()
    scaler.set_growth_factor(4.0)
    scaler.set_growth_interval(1)
    backward(model, scaler, 0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4096
    scaler.update(8.0)
    assert scaler.get_scale() == 8
    scaler.set_backoff_factor(0.25)
    for overflow in range(scaler.state_dict()["hysteresis"]):
        assert scaler.get_scale() == 8, overflow
        backward(model, scaler, 1)
        next(model.parameters()).grad[0] = float("inf")
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"before unscale_\(\) and step\(\), or after update"):
            copy.deepcopy(scaler)
        scaler.update()
    assert scaler.get_scale() == 2 and copy.deepcopy(scaler).state_dict()["backoff_factor"] == 0.25
    for call in (
        lambda: scaler.set_backoff_factor(1.5),
        lambda: scaler.set_growth_factor(0.5),
        lambda: scaler.update(-1.0),
    ):
        with pytest.raises(ValueError, match="loss scale"):
            call()
    assert scaler.state_dict()["growth_factor"] == 4


ORDER = {
    "step before scale": (lambda s, o: s.step(o), "scale"),
    "update before scale": (lambda s, o: s.update(), "update"),
    "step twice": (lambda s, o: (s.scale(torch.ones(1)), s.step(o), s.step(o)), "already"),
    "unscale_ twice": (lambda s, o: (s.scale(torch.ones(1)), s.unscale_(o), s.unscale_(o)), "already"),
    "unscale_ after step": (lambda s, o: (s.scale(torch.ones(1)), s.step(o), s.unscale_(o)), "step"),
    "closure": (lambda s, o: (s.scale(torch.ones(1)), s.step(o, closure=lambda: None)), "closure"),
}


@pytest.mark.parametrize("case", ORDER)
def test_calls_out_of_order(case: str) -> None:
    model, optimizer = model_and_optimizer()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    call, message = ORDER[case]
    with pytest.raises(RuntimeError, match=message):
        call(scaler_of(), optimizer)
