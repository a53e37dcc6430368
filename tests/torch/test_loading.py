"""load_state_dict: what survives under another policy, and foreign states, which raise and change nothing."""

import copy
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import POLICIES, bits, everything, params_of, policy_of, train

import torch_ext

NAMES = [f"layer{i}.weight" for i in range(8)]


def optimizer_of(name: str, params: Any = None) -> torch_ext.AdamW:
    params = params_of(name) if params is None else params
    return torch_ext.AdamW(zip(NAMES, params, strict=True), lr=1e-2, policy=policy_of(name))


def of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the optimizer's parameters."""
    return optimizer.param_groups[0]["params"]


def trained(name: str) -> torch_ext.AdamW:
    optimizer = optimizer_of(name)
    train(optimizer, range(5))
    return optimizer


def into(name: str, source: torch_ext.AdamW) -> torch_ext.AdamW:
    """Returns an optimizer with another policy for the same weights, rounded to that policy's dtype."""
    dtype = POLICIES[name][0]
    return optimizer_of(name, [nn.Parameter(p.detach().to(dtype)) for p in of(source)])


def logical(optimizer: torch_ext.AdamW) -> list[dict[str, torch.Tensor]]:
    return [{k: v.clone() for k, v in e.items()} for e in optimizer.state_dict()["state"].values()]


# -- a state that was saved under one policy, loaded under another

# Pairs of policies (saved under, loaded under). LOSSLESS: all bits survive. LOSSY: with the expected warning.
LOSSLESS: list[tuple[str, str]] = [
    *((name, name) for name in POLICIES),
    ("bf16", "fp32 moments"),
    ("bf16_remainder", "fp32 moments"),
    ("bf16_remainder", "bf16"),
    ("bf16", "bf16_remainder"),
    ("8bit", "fp32 moments"),
    ("fp16 moments", "fp16"),
]
LOSSY: list[tuple[str, str, str]] = [
    ("fp32 moments", "bf16", r"exp_avg of 'layer0.weight'.* and \d more was saved in more bits .*exp_avg_sq of"),
    ("fp32 moments", "8bit", r"exp_avg of .*exp_avg_sq of"),
    ("bf16", "8bit", r"exp_avg of .*exp_avg_sq of"),
    ("bf16", "no master", r"master_param of 'layer0.weight'.* is dropped: the policy keeps the weight only"),
    ("bf16_remainder", "no master", r"master_param of 'layer0.weight'.* is dropped"),
    ("no master", "bf16", r"there is no master_param of 'layer0.weight'.*: the weight is its master from now on"),
    ("no master", "bf16_remainder", r"there is no master_param of"),
    ("fp32 moments", "no master", r"exp_avg of .*; exp_avg_sq of .*; master_param of .* is dropped"),
]


@pytest.mark.parametrize(("source", "target"), LOSSLESS, ids=[f"{a} into {b}" for a, b in LOSSLESS])
def test_G5_what_the_policy_can_keep_is_kept_bit_for_bit_and_nothing_is_said(source: str, target: str) -> None:
    first = trained(source)
    second = into(target, first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    for there, here in zip(logical(first), logical(second), strict=True):
        assert set(here) == set(there)
        for key in here:
            assert bits(here[key].float()) == bits(there[key].float()), key


@pytest.mark.parametrize(("source", "target", "said"), LOSSY, ids=[f"{a} into {b}" for a, b, _ in LOSSY])
def test_G5_what_the_policy_cannot_keep_is_said_once(source: str, target: str, said: str) -> None:
    first = trained(source)
    second = into(target, first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    (warning,) = [w for w in caught if "torch_ext" in str(w.message)]
    assert re.search(said, str(warning.message)), str(warning.message)
    for p, there, here in zip(of(second), logical(first), logical(second), strict=True):
        assert here["step"] == 5
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(
                here[key].float(), there[key].float(), rtol=0.3, atol=there[key].abs().max() / 50 if p.numel() else 0
            )
        if "master_param" in here:
            assert bits(here["master_param"]) == bits(there.get("master_param", p.detach().float()))
    train(second, range(5, 7))


def test_D5_a_master_that_is_only_what_the_weight_holds_is_dropped_in_silence() -> None:
    """A policy without masters warns when it drops one, unless the master equals its weight."""
    first = trained("bf16")
    saved = copy.deepcopy(first.state_dict())
    for p, entry in zip(of(first), saved["state"].values(), strict=True):
        entry["master_param"] = p.detach().float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        into("no master", first).load_state_dict(saved)


def test_torchs_adamw_takes_our_state_and_gives_it_back() -> None:
    first = trained("fp32")
    theirs = torch.optim.AdamW(copy.deepcopy(of(first)))
    theirs.load_state_dict(copy.deepcopy(first.state_dict()))
    second = optimizer_of("fp32", copy.deepcopy(of(first)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(theirs.state_dict())
    assert everything(second) == everything(first)


# -- what is refused


def _rename(saved: Any, names: list[str]) -> None:
    saved["param_groups"][0]["param_names"] = names


def _another_architecture(saved: Any) -> None:
    _rename(saved, [*NAMES[:6], "head.weight", "head.bias"])


def _a_layer_less(saved: Any) -> None:
    _rename(saved, NAMES[:7])
    saved["param_groups"][0]["params"] = saved["param_groups"][0]["params"][:7]
    del saved["state"][7]


def _a_layer_more(saved: Any) -> None:
    _rename(saved, [*NAMES, "extra.weight"])
    saved["param_groups"][0]["params"] = [*saved["param_groups"][0]["params"], 8]


def _another_order(saved: Any) -> None:
    _rename(saved, [NAMES[1], NAMES[0], *NAMES[2:]])


def _names_as_keys(saved: Any) -> None:
    """The form that get_optimizer_state_dict returns."""
    names = [*NAMES[:7], "head.weight"]
    saved["state"] = dict(zip(names, saved["state"].values(), strict=True))
    saved["param_groups"][0]["params"] = names


def _two_groups(saved: Any) -> None:
    group = saved["param_groups"][0]
    saved["param_groups"] = [
        {**group, "params": group["params"][:3], "param_names": NAMES[:3]},
        {**group, "params": group["params"][3:], "param_names": NAMES[3:]},
    ]


def _written(key: str, value: float) -> Callable[[Any], None]:
    def write(saved: Any) -> None:
        saved["state"][2][key][1, 3, 2] = value

    return write


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "another architecture": (
        _another_architecture,
        r"another architecture: it has nothing for 'layer6.weight', 'layer7.weight'; the optimizer does not have its "
        r"'head.weight', 'head.bias'",
    ),
    "a layer less": (_a_layer_less, r"it has nothing for 'layer7.weight'$"),
    "a layer more": (_a_layer_more, r"does not have its 'extra.weight'$"),
    "another order": (_another_order, r"another order: 'layer1.weight' where the optimizer has 'layer0.weight'"),
    "names as keys": (_names_as_keys, r"nothing for 'layer7.weight'; the optimizer does not have its 'head.weight'"),
    "another number of groups": (_two_groups, r"groups of \[3, 5\] parameters; the optimizer's, of \[8\], are legal"),
    "NaN in a master": (_written("master_param", float("nan")), r"'layer2.weight': master_param has nan \(element 58"),
    "Inf in a master": (_written("master_param", float("inf")), r"'layer2.weight': master_param has inf"),
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("name", ["bf16", "8bit"])
def test_a_foreign_state_is_refused_by_name_and_nothing_changes(how: str, name: str) -> None:
    optimizer = trained(name)
    before, saved = everything(optimizer), copy.deepcopy(optimizer.state_dict())
    damage, said = REFUSED[how]
    damage(saved)
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
    assert everything(optimizer) == before
    train(optimizer, range(5, 6))


def test_names_that_wrappers_changed_are_the_same_names() -> None:
    optimizer = trained("bf16")
    saved = copy.deepcopy(optimizer.state_dict())
    _rename(saved, [f"module._orig_mod.{name}" for name in NAMES])
    optimizer.load_state_dict(saved)


# -- state tensors, where one rank holds the whole state

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda t: t * 2 + 1,
    "a sum": lambda t: t.sum(),
    "a comparison": lambda t: torch.equal(t, t),
    "an index": lambda t: t[1:3, ::2],
    "another shape": lambda t: t.reshape(-1),
    "another dtype": lambda t: t.to(torch.float64),
    "a copy": lambda t: t.clone(),
    "channels last": lambda t: t[None].clone(memory_format=torch.channels_last),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "a list": lambda t: torch.tensor(t.tolist()),
    "torch.save": lambda t: _through_a_file(t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "zeros like it": lambda t: torch.zeros_like(t),
    "empty and filled": lambda t: torch.empty_like(t).fill_(2),
}


def _through_a_file(t: Any) -> Any:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("what", OPERATIONS)
def test_state_that_is_decoded_on_demand_is_a_tensor_like_any_other(what: str) -> None:
    optimizer = trained("8bit")
    for key in ("exp_avg", "exp_avg_sq", "master_param"):
        held = optimizer.state_dict()["state"][2][key]
        plain = held.clone()
        assert type(plain) is torch.Tensor and type(held) is not torch.Tensor
        found, expected = OPERATIONS[what](held), OPERATIONS[what](plain)
        if isinstance(expected, torch.Tensor):
            assert type(found) is torch.Tensor
            assert bits(found) == bits(expected)
        else:
            assert found == expected


WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda t: t.copy_(torch.arange(105.0).view(3, 5, 7)),
    "zero_": lambda t: t.zero_(),
    "mul_": lambda t: t.mul_(2),
    "an assignment": lambda t: t.__setitem__(slice(None), 3.0),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_to_it_is_the_optimizers_state(what: str) -> None:
    optimizer = trained("8bit")
    held = optimizer.state_dict()["state"][2]["exp_avg"]
    plain = held.clone()
    WRITES[what](held)
    WRITES[what](plain)
    now = optimizer.state_dict()["state"][2]["exp_avg"]
    scale = plain.abs().max()
    assert torch.allclose(now, plain, rtol=0.07, atol=float(scale) / 100)
    assert not torch.equal(now, trained("8bit").state_dict()["state"][2]["exp_avg"])
