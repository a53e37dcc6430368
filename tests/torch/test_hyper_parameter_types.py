"""Hyper-parameters that are not numbers, as from configuration files and command lines: a TypeError names the key and
the value when the optimizer is created. Every kind of number is accepted with its exact value."""

import decimal
import fractions
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import everything, set_grads

import torch_ext

CLASSES = [torch_ext.AdamW, torch_ext.Adam]
FLAGS = ["maximize", "amsgrad", "differentiable", "foreach", "capturable", "fused", "skip_nonfinite"]


def one() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


class Text(str):
    """A str subclass, as configuration libraries use."""


# Not numbers, although float() accepts some of them.
NOT_NUMBERS: dict[str, Any] = {
    "text": "1e-3",
    "text that is no number": "fast",
    "no text": "",
    "a subclass of text": Text("0.5"),
    "bytes": b"1e-3",
    "numpy text": np.str_("1e-3"),
    "an array of text": np.array("1e-3"),
    "None": None,
    "complex": 0.5 + 0j,
    "numpy complex": np.complex64(0.5),
    "a list": [1e-3],
    "an array": np.array([1e-3, 1e-3]),
    "a function": lambda: 1e-3,
}
KEYS = {
    "lr": lambda value: {"lr": value},
    "eps": lambda value: {"eps": value},
    "weight_decay": lambda value: {"weight_decay": value},
    "betas[0]": lambda value: {"betas": (value, 0.999)},
    "betas[1]": lambda value: {"betas": [0.9, value]},
}
# Values that betas as a whole may not have.
BETAS: dict[str, Any] = {
    "text": "0.9,0.999",
    "text of two characters": "09",
    "None": None,
    "a number": 0.9,
    "a dict": {0: 0.9, 1: 0.999},
    "a set": {0.9, 0.999},
    "an iterator": iter((0.9, 0.999)),
}


def constructor(options: dict[str, Any]) -> None:
    torch_ext.AdamW([one()], **options)


def group(options: dict[str, Any]) -> None:
    torch_ext.AdamW([{"params": [one()], "lr": 0.1}, {"params": [one()]} | options])


def added(options: dict[str, Any]) -> None:
    """Adds a group. The optimizer must still work if that raises."""
    optimizer = torch_ext.AdamW([one()])
    try:
        optimizer.add_param_group({"params": [one()]} | options)
    finally:
        assert len(optimizer.param_groups) == 1
        set_grads(optimizer.param_groups[0]["params"], 0)
        optimizer.step()


def loaded(options: dict[str, Any]) -> None:
    """Loads a state with these values. The group must not change if that raises."""
    optimizer = torch_ext.AdamW([one()])
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= options
    before = dict(optimizer.param_groups[0])
    try:
        optimizer.load_state_dict(saved)
    finally:
        assert optimizer.param_groups[0] == before


def written(options: dict[str, Any]) -> None:
    """Writes into a group between two steps."""
    optimizer = torch_ext.AdamW([one()])
    params = optimizer.param_groups[0]["params"]
    set_grads(params, 0)
    optimizer.step()
    optimizer.param_groups[0] |= options
    before = everything(optimizer)
    try:
        optimizer.step()
    finally:
        assert everything(optimizer) == before


# where a value comes from -> how the message begins
PLACES = {
    constructor: "",
    group: "group 1: ",
    added: "group 1: ",
    loaded: "loaded state dict, group 0: ",
    written: "group 0: ",
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_what_is_no_number_is_refused_by_name_and_value(value: str, key: str, place: Any) -> None:
    given = NOT_NUMBERS[value]
    with pytest.raises(TypeError) as refusal:
        place(KEYS[key](given))
    message = str(refusal.value)
    assert message.startswith(f"{PLACES[place]}{key} is {given!r}")
    assert "is legal" in message


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("value", BETAS)
def test_betas_that_are_no_pair_are_refused_by_name_and_value(value: str, place: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        place({"betas": BETAS[value]})
    assert str(refusal.value).startswith(f"{PLACES[place]}betas is {BETAS[value]!r}")
    assert "two numbers in [0, 1) are legal" in str(refusal.value)


def test_text_that_would_be_a_number_is_told_so() -> None:
    with pytest.raises(TypeError, match=r"lr is '1e-5', text; .* 1e-05, not in quotes \(YAML"):
        torch_ext.AdamW([one()], lr="1e-5")


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay", "betas", "seed", *FLAGS])
def test_text_for_every_key_of_both_classes(kind: Any, key: str) -> None:
    with pytest.raises(TypeError, match=f"^{key} is '0', text"):
        kind([one()], **{key: "0"})


ILLEGAL = {
    "negative lr": (dict(lr=-1), r"lr is -1.0; a finite number >= 0 is legal"),
    "negative eps": (dict(eps=np.float32(-1)), r"eps is -1.0; a finite"),
    "NaN": (dict(weight_decay=math.nan), r"weight_decay is nan; a finite"),
    "a beta of 1": (dict(betas=(0.9, 1)), r"betas\[1\] is 1.0; a number in \[0, 1\)"),
    "a beta": (dict(betas=(0.9,)), "betas has 1 values; 2 are legal"),
    "three betas": (dict(betas=[0.9, 0.9, 0.9]), "betas has 3 values; 2 are legal"),
    "lr of two elements": (dict(lr=torch.ones(2)), "lr is a tensor of 2 elements"),
    "eps of two elements": (dict(eps=torch.ones(2)), "eps is a tensor of 2 elements"),
    "beta of two elements": (dict(betas=(torch.ones(2), 0.9)), r"betas\[0\] is a tensor of 2 elements"),
    "complex tensor": (
        dict(weight_decay=torch.ones((), dtype=torch.complex64)),
        "weight_decay is a tensor .*complex64",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_numbers_that_are_not_legal(case: str) -> None:
    options, message = ILLEGAL[case]
    with pytest.raises(ValueError, match=message):
        torch_ext.AdamW([one()], **options)


# Constructors of every kind of number that torch accepts, and a few more.
NUMBERS = {
    "float": float,
    "numpy float32": np.float32,
    "numpy float64": np.float64,
    "numpy float16": np.float16,
    "a numpy array of no dimension": np.array,
    "Fraction": fractions.Fraction,
    "Decimal": decimal.Decimal,
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_kind_of_number_is_that_number(kind: str) -> None:
    stepped = []
    for make in (float, NUMBERS[kind]):
        options = dict(lr=make(0.5), eps=make(0.25), weight_decay=make(0.125), betas=(make(0.5), make(0.75)))
        optimizer = torch_ext.AdamW([one()], **options)
        set_grads(optimizer.param_groups[0]["params"], 0)
        optimizer.step()
        stepped.append(everything(optimizer))
    assert stepped[0] == stepped[1]


WHOLE = {"int": int, "numpy int64": np.int64, "numpy uint8": np.uint8, "bool": bool, "numpy bool": np.bool_}


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_numbers_are_taken_as_torch_takes_them(kind: str) -> None:
    make, after = WHOLE[kind], []
    for optimizer_class in (torch_ext.AdamW, torch.optim.AdamW):
        p = one()
        optimizer = optimizer_class([p], lr=make(1), weight_decay=make(0), eps=make(1))
        set_grads([p], 0)
        optimizer.step()
        after.append(p.detach())
    assert torch.allclose(*after, rtol=0, atol=1e-6)


def test_whatever_torch_refuses_is_refused() -> None:
    """Random values of random kinds: if torch's constructor raises, ours must too, with a message that begins with the
    key."""
    rng = random.Random(0)
    good = [0.5, 0, 0.0, np.float32(0.25)]
    bad = [*NOT_NUMBERS.values(), -0.5, math.nan]
    refused = 0
    for key, _ in itertools.product(["lr", "eps", "weight_decay", "betas[0]", "betas[1]"], range(40)):
        value = rng.choice(good + bad)
        options = KEYS[key](value)
        try:
            torch.optim.AdamW([one()], foreach=False, **options)
        except Exception:
            refused += 1
            if isinstance(value, int | np.float32):  # torch requires both betas to be floats; ours does not
                continue
            with pytest.raises((TypeError, ValueError)) as refusal:
                torch_ext.AdamW([one()], **options)
            assert str(refusal.value).startswith(key)
    assert refused > 60
