"""Optimizer state: creating it has no effect (docs/specification.md, E11), and it is saved and loaded in torch's
format, to the bit (G5, D4)."""

import copy
import io
from pathlib import Path
from typing import Any

import frameworks
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from training import POLICIES, WITH_MASTER, bits, everything, params_of, policy_of, set_grads, train

import torch_ext


def optimizer_of(name: str, params: list[nn.Parameter] | None = None, **options: object) -> torch_ext.AdamW:
    return torch_ext.AdamW(params or params_of(name), lr=1e-2, policy=policy_of(name), **options)


# -- E11 ----------------------------------------------------------------------------------------------------------


def test_E11_constructor_makes_nothing_but_the_step() -> None:
    optimizer = optimizer_of("8bit")
    assert [sorted(state) for state in optimizer.state.values()] == [["step"]] * len(optimizer.state)
    steps = [state["step"] for state in optimizer.state.values()]
    assert all(step.dtype == torch.float32 and step.numel() == 1 and step == 0 for step in steps)
    assert len({step.untyped_storage().data_ptr() for step in steps}) == 1, "views of one tensor"


def dcp_initialises(optimizer: torch.optim.Optimizer) -> None:
    """Does what torch.distributed.checkpoint does to make an optimizer create its state if there is none."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step(closure=None)
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)


def under_inference_mode(method: Any) -> Any:
    with torch.inference_mode():
        return method()


INERT = {
    "saving": lambda o: o.state_dict(),
    "saving twice": lambda o: (o.state_dict(), o.state_dict()),
    "loading its own": lambda o: o.load_state_dict(o.state_dict()),
    "loading a copy": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "DCP's step": dcp_initialises,
    "pickling": lambda o: copy.deepcopy(o).state_dict(),
    "resync": lambda o: o.resync_masters(),
    "saving under inference_mode": lambda o: under_inference_mode(o.state_dict),
    "loading under inference_mode": lambda o: under_inference_mode(
        lambda: o.load_state_dict(copy.deepcopy(o.state_dict()))
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("what", INERT)
def test_E11_making_saving_and_loading_state_is_inert(what: str, name: str) -> None:
    """Before the first step and between steps, no weight and no step count changes, and training continues as if
    nothing had happened."""
    undisturbed, disturbed = optimizer_of(name), optimizer_of(name)
    for step in range(4):
        if step in (0, 2) and not (step == 2 and what == "DCP's step"):
            before = [bits(p) for p in disturbed.param_groups[0]["params"]]
            INERT[what](disturbed)
            assert [bits(p) for p in disturbed.param_groups[0]["params"]] == before
            assert [float(state["step"]) for state in disturbed.state.values()] == [float(step)] * len(before)
        for optimizer in (undisturbed, disturbed):
            train(optimizer, [step])
    assert everything(disturbed) == everything(undisturbed)


def test_E11_first_real_update_is_step_1() -> None:
    """If it counted as step 2, the update would be 1.344 times too small at betas of 0.9 and 0.999."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch_ext.AdamW([p], lr=1e-2)
    dcp_initialises(optimizer)
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == pytest.approx(-1e-2, rel=1e-5)


def test_a_warm_up_from_lr_0_counts() -> None:
    """A step with lr 0 and a gradient that is not zero is a real step."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch_ext.AdamW([p], lr=0.0)
    p.grad = torch.ones(1)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1


# -- what state contains -----------------------------------------------------------------------------------------------

AT_REST = {
    "fp32": {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "bf16": {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "master_param": torch.float32,
        "checksum": torch.int64,
    },
    "bf16_remainder": {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "master_remainder": torch.int16,
        "checksum": torch.int64,
    },
    "8bit": {
        "step": torch.float32,
        "exp_avg": torch.uint8,
        "exp_avg_sq": torch.uint8,
        "scales": torch.uint8,
        "master_remainder": torch.int16,
        "checksum": torch.int64,
    },
    "no master": {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
}


@pytest.mark.parametrize("name", AT_REST)
def test_stored_state_and_its_bytes(name: str) -> None:
    shape = (130, 37)
    optimizer = optimizer_of(name, params_of(name, [shape]))
    train(optimizer, range(1))
    (state,) = optimizer.state.values()
    assert {key: value.dtype for key, value in state.items()} == AT_REST[name]
    assert all(value.shape == shape for key, value in state.items() if key not in ("step", "scales", "checksum"))
    per_param = {"fp32": 8, "bf16": 8, "bf16_remainder": 6, "8bit": 4, "no master": 4}[name]
    scales = 2 * -(-130 * 37 // 128) if name == "8bit" else 0
    checksums = (
        8
        * -(-130 * 37 // {"bf16": 4096, "bf16_remainder": 1024, "8bit": 1024}.get(name, 1 << 62))
        * ("checksum" in state)
    )
    held = sum(value.numel() * value.element_size() for key, value in state.items() if key != "step")
    assert held == per_param * 130 * 37 + scales + checksums


@pytest.mark.parametrize("name", POLICIES)
def test_G5_saved_state_is_logical(name: str) -> None:
    optimizer = optimizer_of(name)
    train(optimizer, range(3))
    saved = optimizer.state_dict()
    assert list(saved) == ["state", "param_groups"]
    params = optimizer.param_groups[0]["params"]
    for p, entry in zip(params, saved["state"].values(), strict=True):
        expected = {"step", "exp_avg", "exp_avg_sq"}
        has_master = p.dtype != torch.float32 and name != "no master"
        assert set(entry) == (expected | {"master_param"} if has_master else expected)
        assert entry["step"] == 3
        assert all(entry[key].shape == p.shape and entry[key].is_floating_point() for key in set(entry) - {"step"})
        if has_master:
            assert entry["master_param"].dtype == torch.float32
            assert bits(entry["master_param"].to(p.dtype)) == bits(p)


# -- round trips --------------------------------------------------------------------------------------------------


def through_a_file(state_dict: dict[str, object]) -> dict[str, object]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file], ids=["copy", "file"])
def test_D4_round_trip_changes_no_bit(name: str, way: object) -> None:
    """Includes 8-bit codes, scales and remainders. The resumed run takes the same steps as the original."""
    first = optimizer_of(name, seed=7)
    train(first, range(5))
    resumed = optimizer_of(name, copy.deepcopy(first.param_groups[0]["params"]))
    resumed.load_state_dict(way(first.state_dict()))
    assert everything(resumed) == everything(first)
    for optimizer in (first, resumed):
        train(optimizer, range(5, 8))
    assert everything(resumed) == everything(first)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_D4_model_and_optimizer_load_in_any_order(name: str, order: str) -> None:
    first = optimizer_of(name)
    train(first, range(5))
    saved = copy.deepcopy(first.state_dict())
    weights = [p.detach().clone() for p in first.param_groups[0]["params"]]
    resumed = optimizer_of(name, params_of(name, seed=9))
    train(resumed, range(20, 22))

    def load_model() -> None:
        with torch.no_grad():
            for p, weight in zip(resumed.param_groups[0]["params"], weights, strict=True):
                p.copy_(weight)

    loads = [load_model, lambda: resumed.load_state_dict(saved)]
    for load in loads if order == "model first" else reversed(loads):
        load()
    for optimizer in (first, resumed):
        train(optimizer, range(5, 7))
    assert everything(resumed) == everything(first)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("name", WITH_MASTER)
def test_E11_state_loaded_in_place_moves_no_weight(name: str, fraction: float, tmp_path: Path) -> None:
    """torch.distributed.checkpoint writes into the tensors that state_dict() returned. The effect must be that of
    load_state_dict."""
    first = optimizer_of(name, params_of(name, seed=9), weight_decay=0.0)
    train(first, range(2))
    dcp.save(first.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    found = []
    for way in ("in place", "load_state_dict"):
        resumed = optimizer_of(name, weight_decay=0.0, offload_fraction=fraction)
        train(resumed, range(20, 22))
        params = resumed.param_groups[0]["params"]
        before = [bits(p) for p in params]
        saved = resumed.state_dict()
        dcp.load(saved, checkpoint_id=tmp_path, no_dist=True)
        if way == "load_state_dict":
            resumed.load_state_dict(saved)
        for p, state in zip(params, resumed.state_dict()["state"].values(), strict=True):
            state["exp_avg"].zero_()
            p.grad = torch.zeros_like(p)
        resumed.step()
        assert [bits(p) for p in params] == before, way
        assert resumed.external_writes() > 0
        train(resumed, range(22, 24))
        found.append(everything(resumed))
    assert found[0] == found[1]


def test_named_parameters_travel_and_decide_the_thresholds() -> None:
    names = [f"layer.{i}" for i in range(len(params_of("bf16")))]
    first = torch_ext.AdamW(zip(names, params_of("bf16"), strict=True), lr=1e-2)
    train(first, range(3))
    nameless = optimizer_of("bf16", copy.deepcopy(first.param_groups[0]["params"]))
    nameless.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer in (first, nameless):
        train(optimizer, range(3, 5))
    assert everything(nameless) == everything(first)


def test_thresholds_by_names_that_got_lost_say_so() -> None:
    named = torch_ext.AdamW([("w", p) for p in params_of("bf16", [(3,)])])
    train(named, range(1))
    saved = copy.deepcopy(named.state_dict())
    del saved["param_groups"][0]["param_names"]
    nameless = optimizer_of("bf16", params_of("bf16", [(3,)]))
    with pytest.warns(UserWarning, match="named_parameters"):
        nameless.load_state_dict(saved)
    train(nameless, range(1))


def test_per_parameter_step_counters_survive() -> None:
    """Parameters that had no gradient in some steps keep their own counts."""
    first = optimizer_of("bf16")
    for step in range(4):
        params = first.param_groups[0]["params"]
        set_grads(params, step)
        for p in params[: 2 * step]:
            p.grad = None
        first.step()
    saved = first.state_dict()
    steps = [float(entry["step"]) for entry in saved["state"].values()]
    assert steps == [1, 1, 2, 2, 3, 3, 4, 4]
    second = optimizer_of("bf16")
    second.load_state_dict(saved)
    assert [float(state["step"]) for state in second.state.values()] == steps


# -- torch.optim.AdamW's checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["plain", "fused", "foreach"])
def test_G5_torch_checkpoint_loads_into_ours(options: dict[str, bool]) -> None:
    theirs, ours = params_of("fp32"), params_of("fp32")
    a = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.2, **options)
    train(a, range(5))
    b = torch_ext.AdamW(ours, lr=1.0)
    b.load_state_dict(through_a_file(a.state_dict()))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    assert (b.param_groups[0]["lr"], b.param_groups[0]["weight_decay"]) == (1e-2, 0.2)
    for p, q in zip(ours, theirs, strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert bits(b.state[p][key]) == bits(a.state[q][key])
    for optimizer in (a, b):
        train(optimizer, range(5, 8))
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["bf16", "bf16_remainder", "8bit"])
def test_G5_torch_checkpoint_of_an_fp32_run_seeds_masters_from_the_weights(name: str) -> None:
    theirs = params_of("fp32")
    a = torch.optim.AdamW(theirs, lr=1e-2)
    train(a, range(5))
    ours = [nn.Parameter(p.detach().bfloat16()) for p in theirs]
    b = optimizer_of(name, ours)
    b.load_state_dict(a.state_dict())
    for p, q, entry in zip(ours, theirs, b.state_dict()["state"].values(), strict=True):
        assert bits(entry["master_param"]) == bits(p.float())
        assert torch.allclose(entry["exp_avg"].float(), a.state[q]["exp_avg"], rtol=0.1)


@pytest.mark.parametrize("name", POLICIES)
def test_G5_our_checkpoint_loads_into_torchs(name: str) -> None:
    first = optimizer_of(name)
    train(first, range(5))
    saved = through_a_file(first.state_dict())
    theirs = copy.deepcopy(first.param_groups[0]["params"])
    torchs = torch.optim.AdamW(theirs, lr=1.0)
    torchs.load_state_dict(saved)
    train(torchs, range(5, 7))
    for i, p in enumerate(theirs):
        assert torchs.state[p]["step"] == 7
        assert set(torchs.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert torchs.state[p]["exp_avg"].dtype == p.dtype
        assert saved["state"][i]["exp_avg"].shape == p.shape
    assert torchs.param_groups[0]["lr"] == 1e-2


def test_loaded_tensors_are_copies_and_handed_out_ones_are_not() -> None:
    first, second = optimizer_of("bf16"), optimizer_of("bf16")
    train(first, range(2))
    saved = first.state_dict()
    second.load_state_dict(saved)
    before = everything(second)
    train(first, range(2, 4))
    assert everything(second) == before
    p = first.param_groups[0]["params"][0]
    held = first.state[p]["exp_avg"]
    handed_out = first.state_dict()["state"][0]["exp_avg"]
    assert handed_out is not held and handed_out.data_ptr() == held.data_ptr()
    first.load_state_dict(first.state_dict())
    assert first.state[p]["exp_avg"] is held, "loading what was handed out takes no second copy"


def test_hooks_of_others_see_logical_state() -> None:
    optimizer = optimizer_of("8bit")
    train(optimizer, range(2))
    seen: list[torch.dtype] = []
    optimizer.register_state_dict_post_hook(lambda o, sd: seen.append(sd["state"][0]["exp_avg"].dtype))
    optimizer.register_load_state_dict_pre_hook(lambda o, sd: seen.append(sd["state"][0]["exp_avg"].dtype))
    loaded: list[torch.Tensor] = []
    optimizer.register_load_state_dict_post_hook(
        lambda o: loaded.append(o.state[o.param_groups[0]["params"][0]]["step"])
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.float32] * 2
    assert float(loaded[0]) == 2


# -- what is refused, with nothing changed ------------------------------------------------------------------------


def damaged(saved: dict[str, object], how: str) -> dict[str, object]:
    """Returns a copy of the state dict with one damage."""
    saved = copy.deepcopy(saved)
    entry, group = saved["state"][2], saved["param_groups"][0]
    if how == "no state":
        return {"param_groups": saved["param_groups"]}
    if how == "another number of groups":
        saved["param_groups"].append({**group, "params": []})
    elif how == "another number of parameters":
        group["params"].pop()
        saved["state"].pop(7)
    elif how == "state of nobody":
        saved["state"][99] = entry
    elif how == "no exp_avg_sq":
        del entry["exp_avg_sq"]
    elif how == "a momentum buffer":
        entry["momentum_buffer"] = entry.pop("exp_avg")
    elif how == "amsgrad in a group":
        group["amsgrad"] = True
    elif how == "amsgrad in the state":
        entry["max_exp_avg_sq"] = entry["exp_avg_sq"]
    elif how == "another shape":
        entry["exp_avg"] = entry["exp_avg"].flatten()
    elif how == "codes":
        entry["exp_avg"] = entry["exp_avg"].to(torch.uint8)
    elif how == "half a step":
        entry["step"] = torch.tensor(1.5)
    elif how == "NaN lr":
        group["lr"] = float("nan")
    return saved


DAMAGE = {
    "no state": "'state'",
    "another number of groups": "groups",
    "another number of parameters": "groups",
    "state of nobody": "99",
    "no exp_avg_sq": "parameter 2 of group 0.*exp_avg_sq",
    "a momentum buffer": "exp_avg",
    "amsgrad in a group": "amsgrad",
    "amsgrad in the state": "amsgrad",
    "another shape": r"parameter 2 of group 0.*exp_avg.*\(105,\).*\(3, 5, 7\)",
    "codes": "uint8",
    "half a step": "1.5",
    "NaN lr": "lr is nan",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_checkpoint_is_refused_and_nothing_changes(how: str) -> None:
    optimizer = optimizer_of("8bit")
    train(optimizer, range(3))
    before, saved = everything(optimizer), optimizer.state_dict()
    with pytest.raises((ValueError, TypeError), match=DAMAGE[how]):
        optimizer.load_state_dict(damaged(saved, how))
    assert everything(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 1e-2
    train(optimizer, range(3, 4))


# -- other libraries' files --------------------------------------------------------------------------------------------


@frameworks.needs("safetensors")
@pytest.mark.parametrize("name", WITH_MASTER)
def test_masters_are_saved_by_safetensors_as_copies(name: str) -> None:
    """safetensors reads a tensor's memory directly, and a master that is decoded on demand has none."""
    safetensors = frameworks.module("safetensors.torch")
    optimizer = optimizer_of(name)
    train(optimizer, range(2))
    masters = {str(key): value for key, value in optimizer.master_state_dict().items()}
    saved = safetensors.load(safetensors.save({key: value.clone() for key, value in masters.items()}))
    assert {key: bits(value) for key, value in saved.items()} == {key: bits(m.clone()) for key, m in masters.items()}
    if name in ("bf16_remainder", "8bit"):
        with pytest.raises(RuntimeError, match=r"has no memory of its own.*clone\(\)"):
            safetensors.save(masters)


@pytest.mark.parametrize("name", ["bf16_remainder", "8bit"])
def test_memory_of_encoded_masters_is_a_copy_or_refused(name: str) -> None:
    """An encoded master has no memory of its own values: reading it directly crashed, or returned other values."""
    optimizer = optimizer_of(name)
    train(optimizer, range(2))
    for master in optimizer.master_state_dict().values():
        if master.numel():
            values = master.clone()
            assert torch.equal(torch.from_dlpack(master), values)
            assert torch.equal(torch.from_numpy(np.from_dlpack(master).copy()), values)
            assert not master.is_shared()
            with pytest.raises(RuntimeError, match=r"has no memory of its own.*clone\(\)"):
                master.share_memory_()
