"""Hyper-parameters in a policy: the optimizer starts from values that were set explicitly, and from torch's defaults
otherwise. Also the policy's optimizer name and clip_grad."""

import copy
import inspect
import itertools
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn
from training import bits, everything, params_of, set_grads

import torch_ext

# policy key -> its value in a group
KEYS: dict[str, Any] = {
    "lr": lambda group: group["lr"],
    "weight_decay": lambda group: group["weight_decay"],
    "adam_beta1": lambda group: group["betas"][0],
    "adam_beta2": lambda group: group["betas"][1],
    "adam_eps": lambda group: group["eps"],
}
EXPLICIT = {"lr": 1e-5, "weight_decay": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.85, "adam_eps": 1e-4}
CLASSES = {"AdamW": (torch_ext.AdamW, torch.optim.AdamW), "Adam": (torch_ext.Adam, torch.optim.Adam)}
# Ways to set a value explicitly.
WAYS = {
    "config": lambda **values: torch_ext.load_policy(torch.float32, optimizer_config=values),
    "override": lambda **values: torch_ext.load_policy(torch.float32, override_optimizer_config=values),
    "hook": lambda **values: torch_ext.load_policy(torch.float32, override_optimizer_config=lambda policy: values),
}


def one() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def found(group: dict[str, Any]) -> dict[str, float]:
    return {key: of(group) for key, of in KEYS.items()}


def torchs(kind: str) -> dict[str, float]:
    return found(CLASSES[kind][1]([one()]).param_groups[0])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("way", WAYS)
def test_explicit_values_are_what_the_optimizer_starts_from(way: str, kind: str) -> None:
    policy = WAYS[way](**EXPLICIT)
    ours, theirs = CLASSES[kind]
    optimizer = ours([one()], policy=policy)
    assert found(optimizer.param_groups[0]) == found(optimizer.defaults) == EXPLICIT
    lines = {line.split()[0]: line.split() for line in str(optimizer.policy).splitlines()}
    assert {key: lines[key][2] for key in KEYS} == dict.fromkeys(KEYS, way), "where it came from is printed"
    other = theirs([one()], lr=1e-5, weight_decay=0.5, betas=(0.8, 0.85), eps=1e-4)
    for step in range(3):
        for each in (optimizer, other):
            set_grads(each.param_groups[0]["params"], step)
            each.step()
    assert torch.allclose(optimizer.param_groups[0]["params"][0], other.param_groups[0]["params"][0], rtol=0, atol=1e-7)


# case -> Muon's arguments, the group's keys, and the equivalent arguments of AdamW
OF_MUONS_ADAMW: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {}),
    "lr": ({"lr": 0.02}, {}, {"lr": 0.02}),
    "adamw's betas": ({"adamw": {"betas": (0.5, 0.6)}}, {}, {"betas": (0.5, 0.6)}),
    "adamw's eps": ({"adamw": {"eps": 1e-3}}, {}, {"eps": 1e-3}),
    "torch's betas, given": ({"adamw": {"betas": (0.9, 0.999)}}, {}, {"betas": (0.9, 0.999)}),
    "a group": ({}, {"betas": (0.7, 0.9), "algorithm": "adamw"}, {"betas": (0.7, 0.9)}),
    "a group without": ({}, {"algorithm": "adamw"}, {}),
}


@pytest.mark.parametrize("case", OF_MUONS_ADAMW)
@pytest.mark.parametrize("key", ["adam_beta1", "adam_beta2", "adam_eps", "lr", "weight_decay"])
def test_what_muon_has_adamw_step_starts_from_the_policy(key: str, case: str) -> None:
    options, group, told = OF_MUONS_ADAMW[case]
    set_to = {"weight_decay": 0.1} | {key: EXPLICIT[key]}  # Muon and AdamW have different defaults for it
    policy = torch_ext.load_policy(torch.float32, override_optimizer_config=set_to)
    both = (
        torch_ext.Muon([{"params": [one()]} | group], policy=policy, **options),
        torch_ext.AdamW([one()], policy=policy, **told),
    )
    for step in range(3):
        for optimizer in both:
            set_grads(optimizer.param_groups[0]["params"], step)
            optimizer.step()
    weights = [optimizer.param_groups[0]["params"][0] for optimizer in both]
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("policy", [None, torch.float32, torch.bfloat16], ids=["none", "fp32", "bf16"])
def test_defaults_of_a_policy_leave_torchs(policy: Any, kind: str) -> None:
    made = None if policy is None else torch_ext.load_policy(policy, optimizer_config={"min_lr": 0.5, "lr": None})
    assert found(CLASSES[kind][0]([one()], policy=made).param_groups[0]) == torchs(kind)


@pytest.mark.parametrize("seed", range(30))
def test_argument_before_policy_before_default_and_a_group_before_all(seed: int) -> None:
    """Each key gets its value from a random place, independently of the others."""
    rng = random.Random(seed)
    kind = rng.choice(list(CLASSES))
    explicit, given, of_group = ({key: rng.uniform(0.1, 0.9) for key in KEYS if rng.random() < 0.5} for _ in range(3))

    def as_options(values: dict[str, float], below: dict[str, float]) -> dict[str, Any]:
        names = {"lr": "lr", "weight_decay": "weight_decay", "adam_eps": "eps"}
        options: dict[str, Any] = {names[key]: value for key, value in values.items() if key in names}
        if {"adam_beta1", "adam_beta2"} & set(values):  # betas sets both
            options["betas"] = tuple((below | values)[key] for key in ("adam_beta1", "adam_beta2"))
        return options

    below = torchs(kind) | explicit
    options = as_options(given, below)
    expected = below | given
    group = as_options(of_group, expected)
    optimizer = CLASSES[kind][0](
        [{"params": [one()]}, {"params": [one()]} | group], policy=WAYS[rng.choice(list(WAYS))](**explicit), **options
    )
    optimizer.add_param_group({"params": [one()]} | group)
    assert found(optimizer.param_groups[0]) == expected
    assert found(optimizer.param_groups[1]) == found(optimizer.param_groups[2]) == expected | of_group


@pytest.mark.parametrize("kind", CLASSES)
def test_an_argument_that_is_torchs_default_is_an_argument(kind: str) -> None:
    defaults = inspect.signature(CLASSES[kind][1]).parameters
    options = {key: defaults[key].default for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = CLASSES[kind][0]([one()], policy=WAYS["config"](**EXPLICIT), **options)
    assert found(optimizer.param_groups[0]) == torchs(kind)


@pytest.mark.parametrize("kind", CLASSES)
def test_what_another_optimizer_starts_from_is_an_argument(kind: str) -> None:
    """Values that are copied from another optimizer's group count as arguments, although they equal the defaults."""
    other = CLASSES[kind][0]([one()])
    options = {key: other.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = CLASSES[kind][0]([one()], policy=WAYS["config"](**EXPLICIT), **options)
    assert found(optimizer.param_groups[0]) == torchs(kind)


def test_zero_is_a_value() -> None:
    policy = WAYS["override"](lr=0.0, weight_decay=0, adam_beta1=0.0, adam_eps=0.0)
    expected = torchs("AdamW") | {"lr": 0.0, "weight_decay": 0.0, "adam_beta1": 0.0, "adam_eps": 0.0}
    assert found(torch_ext.AdamW([one()], policy=policy).param_groups[0]) == expected


def test_every_layer_may_set_it_and_the_strongest_counts() -> None:
    policy = torch_ext.load_policy(
        torch.float32,
        optimizer_config={"lr": 0.1, "weight_decay": 0.1, "adam_eps": 0.1},
        override_optimizer_config={"lr": 0.2, "weight_decay": 0.2},
    )
    assert found(torch_ext.AdamW([one()], policy=policy).param_groups[0]) == torchs("AdamW") | {
        "lr": 0.2,
        "weight_decay": 0.2,
        "adam_eps": 0.1,
    }


def test_schedulers_start_from_it() -> None:
    policy = torch_ext.load_policy(torch.float32, optimizer_config={"lr": 0.1, "min_lr": 0.01})
    optimizer = torch_ext.AdamW([one()], policy=policy)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2, eta_min=policy.min_lr)
    assert schedule.base_lrs == [0.1]
    set_grads(optimizer.param_groups[0]["params"], 0)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_values_in_groups_are_plain_numbers() -> None:
    """Values are floats wherever they come from, also in the signature, so that pickles, saved states and introspection
    are as torch's."""
    for kind, key in itertools.product(CLASSES, ("lr", "eps", "weight_decay")):
        assert type(inspect.signature(CLASSES[kind][0]).parameters[key].default) is float
    for policy in (None, WAYS["config"](**EXPLICIT), WAYS["config"](lr=0.5)):
        optimizer = torch_ext.AdamW([one()], policy=policy)
        group = optimizer.param_groups[0]
        assert {type(value) for value in (*found(group).values(), *found(optimizer.defaults).values())} == {float}


# -- the optimizer's name -----------------------------------------------------------------------------------------

FITS = {"AdamW": ["adam", "adamw", "AdamW", "Adam", " ADAMW "], "Adam": ["adam", "Adam"]}
FITS_NOT = {"AdamW": ["sgd", "lion", "muon", "adam8bit"], "Adam": ["adamw", "sgd", "AdamW"]}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in FITS for name in FITS[kind]])
def test_the_policys_optimizer_is_this_one(kind: str, name: str) -> None:
    optimizer = CLASSES[kind][0]([one()], policy=WAYS["config"](optimizer=name))
    assert optimizer.param_groups[0]["decoupled_weight_decay"] == (kind == "AdamW"), "each has its own formula"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, name", [(kind, name) for kind in FITS_NOT for name in FITS_NOT[kind]])
def test_another_optimizer_is_an_error_that_names_both(kind: str, name: str, way: str) -> None:
    with pytest.raises(ValueError, match=f"the policy's optimizer is '{name}', and this is {kind}: 'adam'.* is legal"):
        CLASSES[kind][0]([one()], policy=WAYS[way](optimizer=name))


def test_a_name_that_nobody_set_fits_every_class() -> None:
    assert torch_ext.load_policy(torch.float32).optimizer == "adamw"
    torch_ext.Adam([one()], policy=torch_ext.load_policy(torch.float32))
    torch_ext.Adam([one()], policy=WAYS["config"](optimizer="adamw"), decoupled_weight_decay=True)


# -- arguments that are one per optimizer -------------------------------------------------------------------------

ONE_PER_OPTIMIZER = {
    "policy": torch_ext.load_policy(torch.float32),
    "skip_nonfinite": True,
    "on_external_write": "error",
    "offload_fraction": 0.5,
    "step_in_backward": True,
    "ema_decay": 0.9,
    "ema_dtype": torch.float32,
    "ema_every": 2,
    "states": "8bit",
    "min_8bit_size": 16,
}


class Wrapper(torch.optim.Optimizer):
    """Like implementations of SAM: its groups contain every argument of the wrapped optimizer."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)


@pytest.mark.parametrize("key", ONE_PER_OPTIMIZER)
def test_what_the_constructor_was_given_may_stand_in_groups_of_a_wrapper(key: str) -> None:
    options = {"lr": 0.1, key: ONE_PER_OPTIMIZER[key]} | ({"ema_decay": 0.9} if key.startswith("ema") else {})
    Wrapper([one()], torch_ext.AdamW, **options)


@pytest.mark.parametrize("added", [False, True], ids=["constructor", "add_param_group"])
@pytest.mark.parametrize("key", ONE_PER_OPTIMIZER)
def test_an_argument_of_the_optimizer_in_a_group_is_refused_by_name(key: str, added: bool) -> None:
    group = {"params": [one()], key: ONE_PER_OPTIMIZER[key]}
    message = f"group 1: '{key}' is one per optimizer, not per group: pass {key}= to the constructor"
    if not added:
        with pytest.raises(ValueError, match=message):
            torch_ext.AdamW([{"params": [one()]}, group])
        return
    optimizer = torch_ext.AdamW([one()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


# -- clip_grad ----------------------------------------------------------------------------------------------------

LIMIT = 0.25


def clipping(**options: Any) -> torch_ext.AdamW:
    policy = torch_ext.load_policy(torch.float32, optimizer_config={"clip_grad": LIMIT})
    return torch_ext.AdamW(params_of("fp32"), lr=1e-2, eps=1e-2, policy=policy, **options)


def plain() -> torch_ext.AdamW:
    return torch_ext.AdamW(params_of("fp32"), lr=1e-2, eps=1e-2)


def params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return optimizer.param_groups[0]["params"]


def by_the_policy(steps: int = 3) -> list[dict[str, bytes]]:
    """Returns what an optimizer should reach whose policy clips, computed with explicit clips."""
    optimizer = plain()
    for step in range(steps):
        set_grads(params(optimizer), step)
        assert torch_ext.clip_grad_norm_(optimizer, LIMIT) > 2 * LIMIT
        optimizer.step()
    return everything(optimizer)


def test_the_policys_clip_grad_is_applied_in_the_step() -> None:
    optimizer = clipping()
    for step in range(3):
        set_grads(params(optimizer), step)
        optimizer.step()
        optimizer.zero_grad()
    assert everything(optimizer) == by_the_policy()


def test_without_clip_grad_nothing_is_clipped() -> None:
    for config in ({}, {"clip_grad": 0.0}, {"clip_grad": 1e9}):
        policy = torch_ext.load_policy(torch.float32, optimizer_config=config)
        one_of_them, other = torch_ext.AdamW(params_of("fp32"), lr=1e-2, eps=1e-2, policy=policy), plain()
        for each in (one_of_them, other):
            set_grads(params(each), 0)
            each.step()
        assert everything(one_of_them) == everything(other)


imported = torch.nn.utils.clip_grad_norm_


def total_norm(ps: list[Any]) -> None:
    torch.nn.utils.clip_grads_with_norm_(ps, 1.0, torch.nn.utils.get_total_norm([p.grad for p in ps]))


# Ways in which users clip: with a limit of their own that differs from the policy's and lets larger norms pass.
CLIPS: dict[str, Any] = {
    "ours, by the optimizer": lambda o: torch_ext.clip_grad_norm_(o, 1.0),
    "ours, in place": lambda o: torch_ext.clip_grad_norm_(params(o), 1.0),
    "torch's": lambda o: torch.nn.utils.clip_grad_norm_(params(o), 1.0),
    "torch's, imported before": lambda o: imported(params(o), 1.0),
    "torch's, of an iterator": lambda o: torch.nn.utils.clip_grad_norm_(iter(params(o)), max_norm=1.0),
    "torch's, some parameters": lambda o: torch.nn.utils.clip_grad_norm_(params(o)[2:], 1.0, norm_type=1.0),
    "torch's, one parameter": lambda o: torch.nn.utils.clip_grad_norm_(params(o)[0], 1.0),
    "torch's, by value": lambda o: torch.nn.utils.clip_grad_value_(params(o), 0.01),
    "torch's, by a norm": lambda o: total_norm(params(o)),
}
# Calls that measure but do not clip.
MEASURES: dict[str, Any] = {
    "nothing": lambda o: None,
    "ours, by the optimizer": lambda o: torch_ext.clip_grad_norm_(o, float("inf")),
    "ours, in place": lambda o: torch_ext.clip_grad_norm_(params(o), float("inf")),
    "torch's": lambda o: torch.nn.utils.clip_grad_norm_(params(o), float("inf")),
    "torch's norm": lambda o: torch.nn.utils.get_total_norm([p.grad for p in params(o)]),
    "other parameters": lambda o: torch.nn.utils.clip_grad_norm_(params(plain()), 1.0),
}


@pytest.mark.parametrize("how", CLIPS)
def test_what_the_user_clipped_is_not_clipped_once_more(how: str) -> None:
    optimizers = clipping(), plain()
    for step in range(3):
        for optimizer in optimizers:
            set_grads(params(optimizer), step)
            CLIPS[how](optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert everything(optimizers[0]) == everything(optimizers[1])
    assert everything(optimizers[0]) != by_the_policy()


@pytest.mark.parametrize("how", MEASURES)
def test_what_the_user_measured_is_still_clipped(how: str) -> None:
    optimizer = clipping()
    for step in range(3):
        set_grads(params(optimizer), step)
        MEASURES[how](optimizer)
        optimizer.step()
    assert everything(optimizer) == by_the_policy()


# What ends the effect of a user's clip: the gradients after it are new.
ENDS: dict[str, Any] = {
    "a step": lambda o: o.step(),
    "zero_grad": lambda o: o.zero_grad(),
    "zero_grad to zeros": lambda o: o.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", [how for how in CLIPS if how != "ours, by the optimizer"])
@pytest.mark.parametrize("end", ENDS)
def test_a_clip_holds_for_its_gradients(end: str, how: str) -> None:
    optimizers = clipping(), plain()
    for optimizer in optimizers:
        set_grads(params(optimizer), 0)
        CLIPS[how](optimizer)
        ENDS[end](optimizer)
        set_grads(params(optimizer), 1)
    torch_ext.clip_grad_norm_(optimizers[1], LIMIT)
    for optimizer in optimizers:
        optimizer.step()
    assert everything(optimizers[0]) == everything(optimizers[1])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_clip_by_their_policy_and_see_clips(copied: Any) -> None:
    optimizer, other = copied(clipping()), plain()
    set_grads(params(optimizer), 0)
    optimizer.step()
    assert everything(optimizer) == by_the_policy(1)
    again = copied(clipping())
    for each in (again, other):
        set_grads(params(each), 0)
        torch.nn.utils.clip_grad_norm_(params(each), 1.0)
        each.step()
    assert everything(again) == everything(other)


def test_a_closure_is_clipped_after_it_ran() -> None:
    optimizer = clipping()
    for step in range(3):
        optimizer.step(lambda step=step: set_grads(params(optimizer), step))
    assert everything(optimizer) == by_the_policy()


def test_the_loss_scale_is_taken_out_before() -> None:
    """As GradScaler does with fused=True: gradients are still scaled, and the step knows the scale."""
    optimizer = clipping(fused=True)
    optimizer.grad_scale = torch.tensor(1024.0)
    set_grads(params(optimizer), 0)
    for p in params(optimizer):
        p.grad.mul_(1024)
    optimizer.step()
    assert everything(optimizer) == by_the_policy(1)


@pytest.mark.parametrize("measured", [False, True], ids=["not measured", "measured"])
def test_a_norm_that_is_not_finite_skips_the_step(measured: bool) -> None:
    optimizer = clipping()
    before = everything(optimizer)
    set_grads(params(optimizer), 0)
    params(optimizer)[1].grad[3] = float("nan")
    if measured:
        torch_ext.clip_grad_norm_(optimizer, float("inf"))
    with pytest.warns(RuntimeWarning, match="parameter 1 of group 0 is not finite"):
        optimizer.step()
    assert optimizer.skipped_steps() == 1
    assert [entry["param"] for entry in everything(optimizer)] == [entry["param"] for entry in before]


def test_optimizers_clip_their_own_parameters() -> None:
    """Two optimizers; the user clips the gradients of one, so the policy clips only the other's."""
    optimizers = [clipping(), clipping()]
    for optimizer in optimizers:
        set_grads(params(optimizer), 0)
    torch.nn.utils.clip_grad_norm_(params(optimizers[0]), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert bits(params(optimizers[0])[0]) != bits(params(optimizers[1])[0])
    assert everything(optimizers[1]) == by_the_policy(1)


def test_one_clip_of_a_model_is_for_all_its_optimizers() -> None:
    optimizers, alone = [clipping(), clipping()], plain()
    for optimizer in (*optimizers, alone):
        set_grads(params(optimizer), 0)
    all_params = list(itertools.chain.from_iterable(map(params, optimizers)))
    torch.nn.utils.clip_grad_norm_(all_params, 1.0)
    torch.nn.utils.clip_grad_norm_(params(alone), 1.0 / 2**0.5)
    for optimizer in (*optimizers, alone):
        optimizer.step()
    assert everything(optimizers[0]) == everything(optimizers[1])
    for p, q in zip(params(optimizers[0]), params(alone), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)
