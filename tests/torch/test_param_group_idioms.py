"""Parameters and groups as torch.optim accepts them: every idiom of its documentation, and random structures of groups,
must train what torch's own optimizer trains, with and without a policy."""

import collections
import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import set_grads

import torch_ext


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 9))
        self.classifier = nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.ones(()))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def no_decay(name: str) -> bool:
    return "bias" in name or "norm" in name


# idiom -> what the optimizer gets of a model; created for each optimizer, since iterators can be used only once
IDIOMS: dict[str, Callable[[Net], Any]] = {
    "parameters()": lambda m: m.parameters(),
    "named_parameters()": lambda m: m.named_parameters(),
    "a list": lambda m: [m.scale, m.classifier.weight],
    "a tuple": lambda m: (m.scale, m.classifier.weight),
    "a list of named_parameters()": lambda m: list(m.named_parameters()),
    "filter by requires_grad": lambda m: filter(lambda p: p.requires_grad, m.parameters()),
    "a generator expression": lambda m: (p for n, p in m.named_parameters() if "base" in n),
    "chained parameters()": lambda m: itertools.chain(m.base.parameters(), m.classifier.parameters()),
    "dict(named_parameters()).values()": lambda m: dict(m.named_parameters()).values(),
    "a ParameterList": lambda m: nn.ParameterList(m.parameters()),
    "groups of parameters()": lambda m: [
        {"params": m.base.parameters(), "lr": 1e-2},
        {"params": m.classifier.parameters()},
    ],
    "groups of named_parameters()": lambda m: [
        {"params": m.base.named_parameters(prefix="base"), "lr": 1e-2},
        {"params": m.classifier.named_parameters(prefix="classifier")},
    ],
    "groups of lists": lambda m: [
        {"params": [p for n, p in m.named_parameters() if no_decay(n)], "weight_decay": 0},
        {"params": [p for n, p in m.named_parameters() if not no_decay(n)]},
    ],
    "groups of generator expressions": lambda m: [
        {"params": (p for n, p in m.named_parameters() if no_decay(n)), "weight_decay": 0},
        {"params": (p for n, p in m.named_parameters() if not no_decay(n)), "betas": (0.8, 0.9)},
    ],
    "groups of filter and map": lambda m: [
        {"params": map(lambda named: named[1], filter(lambda named: no_decay(named[0]), m.named_parameters()))},
        {"params": filter(lambda p: p.ndim == 2, m.parameters()), "eps": 1e-5},
    ],
    "groups of chains": lambda m: [
        {"params": itertools.chain(m.base.parameters(), [m.scale])},
        {"params": iter(m.classifier.parameters()), "maximize": True},
    ],
    "groups of one tensor": lambda m: [{"params": m.scale}, {"params": m.classifier.weight, "lr": 0.1}],
    "a group of nothing": lambda m: [{"params": []}, {"params": m.parameters()}],
    "a tuple of groups": lambda m: ({"params": m.base.parameters()}, {"params": m.classifier.parameters()}),
    "groups from a generator": lambda m: ({"params": child.parameters()} for child in (m.base, m.classifier)),
    "groups from map": lambda m: map(lambda child: {"params": child.parameters(), "lr": 0.1}, m.base),
    "groups from an iterator": lambda m: iter([{"params": m.parameters(), "name": "all"}]),
    "layers with decaying lr": lambda m: [
        {"params": layer.parameters(), "lr": 1e-2 * 0.8**depth, "layer": depth} for depth, layer in enumerate(m.base)
    ],
    "one deque of deques": lambda m: collections.deque([{"params": collections.deque(m.parameters())}]),
}
WAYS: dict[str, dict[str, Any]] = {"no policy": {}, "a policy": {"policy": torch_ext.load_policy(torch.float32)}}
CLASSES = {"AdamW": (torch_ext.AdamW, torch.optim.AdamW), "Adam": (torch_ext.Adam, torch.optim.Adam)}
OPTIONS: dict[str, Any] = dict(lr=0.01, weight_decay=0.1)


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> list[Tensor]:
    for step in range(steps):
        set_grads(model.parameters(), step)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def settings(optimizer: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> list[Any]:
    """Returns, for each group, the values of the keys that torch's group has, and the number of parameters."""
    return [
        {key: len(g[key]) if key == "params" else g[key] for key in h}
        for g, h in zip(optimizer.param_groups, theirs.param_groups, strict=True)
    ]


def check(ours: torch.optim.Optimizer, own: nn.Module, theirs: torch.optim.Optimizer, other: nn.Module) -> None:
    """Asserts that both optimizers have equal groups and train their models to equal weights."""
    assert settings(ours, theirs) == settings(theirs, theirs)
    before = [p.detach().clone() for p in own.parameters()]
    for p, q, was in zip(trained(ours, own), trained(theirs, other), before, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-5)
        assert torch.equal(p, was) == torch.equal(q, was), "trained by one of them only"


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_idiom_trains_what_torch_trains(idiom: str, way: str, kind: str) -> None:
    ours, theirs = CLASSES[kind]
    own, other = net(), net()
    check(ours(IDIOMS[idiom](own), **OPTIONS, **WAYS[way]), own, theirs(IDIOMS[idiom](other), **OPTIONS), other)


@pytest.mark.parametrize(
    "added",
    [
        lambda m: {"params": m.classifier.parameters(), "lr": 0.1},
        lambda m: {"params": (p for p in m.classifier.parameters())},
        lambda m: {"params": m.scale},
    ],
    ids=["parameters()", "a generator expression", "one tensor"],
)
def test_add_param_group_trains_what_torch_trains(added: Any) -> None:
    own, other = net(), net()
    ours, theirs = (
        torch_ext.AdamW(own.base.parameters(), **OPTIONS),
        torch.optim.AdamW(other.base.parameters(), **OPTIONS),
    )
    ours.add_param_group(added(own))
    theirs.add_param_group(added(other))
    check(ours, own, theirs, other)


def test_groups_are_the_dicts_that_were_given() -> None:
    """As with torch, code that keeps the dict can change the group through it."""
    model, group = net(), dict[str, Any](lr=0.1)
    group["params"] = model.parameters()
    optimizer = torch_ext.AdamW([group])
    assert optimizer.param_groups[0] is group
    assert len(group["params"]) == len(list(model.parameters()))


def test_the_policy_is_that_of_what_iterators_give() -> None:
    """An iterator is consumed once, so the dtype must be found without using it up."""
    model = net()
    model.base.bfloat16()
    for params in (
        [{"params": model.base.parameters()}, {"params": [model.scale]}],
        [{"params": (named for named in model.named_parameters())}],
        (group for group in [{"params": model.parameters()}]),
    ):
        optimizer = torch_ext.AdamW(params)
        assert optimizer.policy.param_dtype == torch.bfloat16
        set_grads(model.parameters(), 0)
        optimizer.step()
        assert optimizer.state[model.base[0].weight]["exp_avg"].dtype == torch.bfloat16


# What torch rejects, ours rejects with the same class of exception.
REFUSED: dict[str, Callable[[Net], Any]] = {
    "nothing": lambda m: [],
    "an iterator of nothing": lambda m: iter([]),
    "a tensor": lambda m: m.scale,
    "a set in a group": lambda m: [{"params": {m.scale}}],
    "a dict of parameters": lambda m: dict(m.named_parameters()),
    "a group alone": lambda m: {"params": m.parameters()},
    "a group without params": lambda m: [{"lr": 0.1}],
    "params that are None": lambda m: [{"params": None}],
    "params that are a number": lambda m: [{"params": 3}],
    "params that are text": lambda m: [{"params": "weight"}],
    "modules": lambda m: m.children(),
    "some names": lambda m: [{"params": iter([("scale", m.scale), m.classifier.weight])}],
    "names in one group": lambda m: [{"params": m.base.named_parameters()}, {"params": m.classifier.parameters()}],
    "one parameter in two groups": lambda m: [{"params": m.parameters()}, {"params": iter([m.scale])}],
    "a group after a parameter": lambda m: [m.scale, {"params": m.base.parameters()}],
    "a result": lambda m: [{"params": iter([m.scale * 2])}],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused(case: str, way: str) -> None:
    with pytest.raises(Exception) as theirs:
        torch.optim.AdamW(REFUSED[case](net()))
    with pytest.raises(type(theirs.value)):
        torch_ext.AdamW(REFUSED[case](net()), **WAYS[way])


# -- the documentation's idioms other than parameters ------------------------------------------------------------------


def adapt_state_dict_ids(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The hook of torch.optim's documentation, "How to utilize named parameters to load optimizer state dict"."""
    adapted = copy.deepcopy(optimizer.state_dict())
    for k, v in state_dict["param_groups"][0].items():
        if k not in ["params", "param_names"]:
            adapted["param_groups"][0][k] = v
    lookup = dict(zip(adapted["param_groups"][0]["param_names"], adapted["param_groups"][0]["params"], strict=True))
    for name, i in zip(
        state_dict["param_groups"][0]["param_names"], state_dict["param_groups"][0]["params"], strict=True
    ):
        if name in lookup:
            adapted["state"][lookup[name]] = copy.deepcopy(state_dict["state"][i])
    return adapted


def test_load_hook_of_the_documentation() -> None:
    """States are matched by name, into an optimizer with more parameters in another order."""
    after = []
    for kind in CLASSES["AdamW"]:
        model = net()
        first = kind(model.classifier.named_parameters(prefix="classifier"), lr=0.1)
        trained(first, model)
        second = kind(list(model.named_parameters())[::-1], lr=0.01)
        second.register_load_state_dict_pre_hook(adapt_state_dict_ids)
        second.load_state_dict(first.state_dict())
        assert second.param_groups[0]["lr"] == 0.1
        assert float(second.state[model.classifier.weight]["step"]) == 3
        after.append(trained(second, model))
    for p, q in zip(*after, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-5)


def test_closure_and_chained_schedulers() -> None:
    after = []
    for kind in CLASSES["AdamW"]:
        model = net()
        optimizer = kind([{"params": model.base.parameters(), "lr": 0.02}, {"params": model.classifier.parameters()}])
        one = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        two = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))

        def closure(optimizer: Any = optimizer, model: Any = model, x: Any = x) -> Tensor:
            optimizer.zero_grad()
            loss = model.classifier(model.base(x)).square().sum()
            loss.backward()
            return loss

        losses = []
        for _ in range(4):
            losses.append(optimizer.step(closure))
            one.step()
            two.step()
        after.append([torch.stack(losses), *(p.detach() for p in model.parameters())])
    for p, q in zip(*after, strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)


# -- random structures --------------------------------------------------------------------------------------------

HOLDERS: list[Callable[[list[Any]], Any]] = [
    list,
    tuple,
    iter,
    collections.deque,
    lambda items: (item for item in items),
    lambda items: filter(lambda item: True, items),
    lambda items: map(lambda item: item, items),
    lambda items: itertools.chain(items[:1], items[1:]),
    lambda items: itertools.islice(items, len(items)),
    lambda items: dict(enumerate(items)).values(),
]
VALUES: dict[str, list[Any]] = {
    "lr": [0.0, 1e-3, 0.03, torch.tensor(0.02)],
    "betas": [(0.9, 0.95), [0.5, 0.6], (0.0, 0.0)],
    "eps": [1e-8, 1e-4],
    "weight_decay": [0, 0.3],
    "maximize": [True, False],
    "name": ["a name", None],
}


def structure(seed: int, named: list[tuple[str, Tensor]]) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """Returns what an optimizer gets, the groups that are added later, and its options. Equal seeds give equal
    structures."""
    rng = random.Random(seed)
    with_names = rng.random() < 0.4
    items: list[Any] = list(named) if with_names else [p for _, p in named]
    rng.shuffle(items)

    def some(share: float) -> dict[str, Any]:
        return {key: rng.choice(values) for key, values in VALUES.items() if rng.random() < share}

    options = {key: value for key, value in some(0.4).items() if key != "name"}
    count = rng.randint(0, 4)
    if count == 0:
        return rng.choice(HOLDERS)(items), [], options
    groups = []
    for part in [items[i::count] for i in range(count)]:
        single = len(part) == 1 and not with_names and rng.random() < 0.5
        groups.append({"params": part[0] if single else rng.choice(HOLDERS)(part)} | some(0.3))
    later = [groups.pop() for _ in range(rng.randint(0, count - 1))]
    return rng.choice(HOLDERS)(groups), later, options


@pytest.mark.parametrize("seed", range(40))
def test_random_groups_train_what_torch_trains(seed: int) -> None:
    models, optimizers = (net(), net()), []
    for kind, model in zip(CLASSES["AdamW"], models, strict=True):
        params, later, options = structure(seed, list(model.named_parameters()))
        optimizer = kind(params, foreach=False, **options)
        for group in later:
            optimizer.add_param_group(group)
        optimizers.append(optimizer)
    check(optimizers[0], models[0], optimizers[1], models[1])


def test_random_groups_are_of_many_kinds() -> None:
    """Checks the generator: it makes enough different structures."""
    kinds = collections.Counter[str]()
    for seed in range(40):
        params, later, _ = structure(seed, list(net().named_parameters()))
        kinds[f"whole: {type(params).__name__}"] += 1
        held: Iterator[Any] = itertools.chain(params, later)
        kinds.update(f"group: {type(g['params']).__name__}" for g in held if isinstance(g, dict))
    assert len(kinds) >= 16, kinds


def stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(3):
        for p in params:
            p.grad = torch.linspace(-1.0, 2.0, p.numel()) * (step + 1)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("way", ["as it was made", "copied", "loaded into itself", "loaded from Adam"])
def test_a_group_of_adamw_may_have_adams_weight_decay(way: str) -> None:
    """As in torch.optim. Loading a state does not change a group's kind of weight decay, not even a state of Adam."""
    found = {}
    for kind, adam in ((torch.optim.AdamW, torch.optim.Adam), (torch_ext.AdamW, torch_ext.Adam)):
        both = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))]
        groups = [{"params": both[:1], "decoupled_weight_decay": False}, {"params": both[1:]}]
        optimizer = kind(groups, lr=0.1, weight_decay=0.5)
        if way == "copied" and kind is torch_ext.AdamW:  # torch's copy loses it
            optimizer = copy.deepcopy(optimizer)
        if way.startswith("loaded") and kind is torch_ext.AdamW:
            other = adam([{"params": [p]} for p in both], lr=0.1, weight_decay=0.5)
            optimizer.load_state_dict((other if way.endswith("Adam") else optimizer).state_dict())
        assert [g["decoupled_weight_decay"] for g in optimizer.param_groups] == [False, True]
        found[kind] = stepped(optimizer)
    for ours, theirs in zip(found[torch_ext.AdamW], found[torch.optim.AdamW], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="decoupled_weight_decay is False in a group: Muon decouples it"):
        torch_ext.Muon([{"params": [torch.nn.Parameter(torch.ones(5, 5))], "decoupled_weight_decay": False}])
