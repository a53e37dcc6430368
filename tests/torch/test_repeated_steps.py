"""A step that repeats the one before in one call of the library (torch_ext/optim/repeated_step.py) does what the usual
way does. An optimizer whose `state` was read takes the usual way from then on, since entries may be changed there. So
two optimizers live through the same random program, and the entries of one of them are read after each step."""

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_ext

SHAPES = [(3, 4), (1,), (0,), (9000,), (2, 2, 2)]  # of 9000 weights only samples are compared with masters
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "remainders": (torch.bfloat16, {"states": "bf16_remainder"}),
    "8bit": (torch.bfloat16, {"states": "8bit"}),
    "fp16": (torch.float16, {}),
    "ema": (torch.bfloat16, {"ema_decay": 0.9, "ema_every": 2}),
    "clipped": (torch.bfloat16, {"policy": {"clip_grad": 0.01}}),
    "mixed": (torch.bfloat16, {}),  # some parameters are fp32
}


def bytes_of(t: torch.Tensor) -> bytes:
    return t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Life:
    """A model's parameters with their optimizer, and what a program does to them."""

    def __init__(self, kind: str, groups: int, usual: bool) -> None:
        self.kind, self.groups, self.usual = kind, groups, usual
        self.dtype = KINDS[kind][0]
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape).to(self.dtype)) for shape in SHAPES]
        if kind == "mixed":
            self.params[0].data = self.params[0].data.float()
        self.opt = self.new_optimizer(self.params)

    def new_optimizer(self, params: list[torch.nn.Parameter]) -> torch_ext.AdamW:
        parts = [params[i :: self.groups] for i in range(self.groups)]
        return torch_ext.AdamW([{"params": part} for part in parts], lr=0.1, **KINDS[self.kind][1])

    def backward(self, seed: int) -> None:
        torch.manual_seed(seed)
        for p in self.params:
            p.requires_grad_(True)
            p.grad = torch.randn(p.shape).to(p.dtype)

    def step(self) -> Any:
        result = self.opt.step()
        if self.usual:
            list(self.opt.state.values())
        return result

    def weights(self) -> list[Any]:
        """Returns weights with their version counters, and the optimizer's counts."""
        counts = self.opt.skipped_steps(), self.opt.external_writes()
        return [[(bytes_of(p), p._version) for p in self.params], counts]

    def states(self) -> list[Any]:
        """Returns all states. Steps after this take the usual way."""
        return [[(key, bytes_of(value)) for key, value in sorted(e.items())] for e in self.opt.state.values()]


Act = Callable[[Life, random.Random], Any]


def one(life: Life, chance: random.Random) -> torch.nn.Parameter:
    return life.params[chance.randrange(len(life.params))]


@torch.no_grad()
def write(life: Life, chance: random.Random) -> None:
    life.params[3][chance.randrange(9000)].mul_(chance.choice([0.5, 1.0]))


def replace_data(life: Life, chance: random.Random) -> None:
    p = one(life, chance)
    p.data = p.data.clone() * chance.choice([0.5, 1.0])


def write_without_trace(life: Life, chance: random.Random) -> None:
    life.params[chance.choice([0, 3])].data.mul_(0.5)


def transpose(life: Life, chance: random.Random) -> None:
    p = life.params[0]
    p.data = p.data.t().contiguous().t()


def swap(life: Life, chance: random.Random) -> None:
    """Exchanges a parameter for another object."""
    i = chance.randrange(len(life.params))
    new = torch.nn.Parameter(life.params[i].detach().clone())
    for group in life.opt.param_groups:
        group["params"] = [new if p is life.params[i] else p for p in group["params"]]
    life.params[i] = new


def reorder(life: Life, chance: random.Random) -> None:
    life.opt.param_groups[0]["params"].reverse()


def add_group(life: Life, chance: random.Random) -> None:
    p = torch.nn.Parameter(torch.ones(5, dtype=life.dtype))
    life.params.append(p)
    life.opt.add_param_group({"params": [p], "lr": 0.01})


def load(life: Life, chance: random.Random) -> None:
    """Loads what another optimizer has saved after a step."""
    params = [torch.nn.Parameter(torch.ones(shape, dtype=life.dtype)) for shape in SHAPES]
    other = life.new_optimizer(params)
    for p in params:
        p.grad = torch.ones_like(p)
    other.step()
    life.opt.load_state_dict(other.state_dict())


def scale(life: Life, chance: random.Random) -> None:
    """As torch.amp.GradScaler does for a step."""
    for name, value in (("grad_scale", 2.0), ("found_inf", 1.0)):
        if chance.random() < 0.6:
            setattr(life.opt, name, torch.tensor(value))
    try:
        life.opt.step()
    finally:
        vars(life.opt).pop("grad_scale", None)
        vars(life.opt).pop("found_inf", None)


def masters(life: Life, chance: random.Random) -> None:
    with life.opt.master_weights():
        for p in life.params:
            p.mul_(0.5)


def measure(life: Life, chance: random.Random) -> Any:
    life.opt.measure_health()
    life.opt.step()
    return str(life.opt.health().params)  # NaN is not equal to itself


def infinite(life: Life, chance: random.Random) -> None:
    p = one(life, chance)
    if p.grad is not None:
        p.grad.fill_(float("inf"))


def offload(life: Life, chance: random.Random) -> Any:
    """Steps while something is offloaded."""
    model = torch.nn.ParameterList(life.params)
    torch_ext.offload(model, life.opt)
    try:
        return outcome(life.opt.step)
    finally:
        torch_ext.onload(model, life.opt)


def edit_state(life: Life, chance: random.Random) -> None:
    entry = life.opt.state[life.params[0]]
    key = chance.choice(sorted(entry))
    if chance.random() < 0.5:
        entry[key] = entry[key].clone()
    entry[key].mul_(2)


def set_grad(make: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> Act:
    def act(life: Life, chance: random.Random) -> None:
        p = one(life, chance)
        p.grad = make(p)

    return act


def strided(p: torch.nn.Parameter) -> torch.Tensor:
    return torch.ones(*p.shape, 2, dtype=p.dtype)[..., 0]


def set_attribute(name: str, *values: Any) -> Act:
    return lambda life, chance: setattr(life.opt, name, chance.choice(values))


ACTS: dict[str, Act] = {
    "write": write,
    "replace_data": replace_data,
    "write_without_trace": write_without_trace,
    "transpose": transpose,
    "swap": swap,
    "reorder": reorder,
    "add_group": add_group,
    "load": load,
    "scale": scale,
    "masters": masters,
    "resync": lambda life, chance: life.opt.resync_masters(),
    "clip": lambda life, chance: torch_ext.clip_grad_norm_(life.opt, chance.choice([0.01, 1.0, float("inf")])),
    "clip_params": lambda life, chance: torch_ext.clip_grad_norm_(life.params, 0.01),
    "offload": offload,
    "edit_state": edit_state,
    "clip_torch": lambda life, chance: torch.nn.utils.clip_grad_norm_(life.params, 0.01).item(),
    "zero": lambda life, chance: life.opt.zero_grad(chance.random() < 0.5),
    "freeze": lambda life, chance: one(life, chance).requires_grad_(chance.random() < 0.5),
    "lr": lambda life, chance: life.opt.param_groups[0].update(lr=chance.random() / 10),
    "decay": lambda life, chance: life.opt.param_groups[-1].update(weight_decay=chance.random()),
    "illegal": lambda life, chance: life.opt.param_groups[0].update(lr=chance.choice([-1.0, 0.1, 0.1])),
    "seed": lambda life, chance: [group.update(seed=5) for group in life.opt.param_groups],
    "mode": set_attribute("on_external_write", "resync", "error", "ignore", "resync"),
    "skip": set_attribute("skip_nonfinite", True, False, False),
    "infinite": infinite,
    "no_grad": set_grad(lambda p: None),
    "strided": set_grad(strided),
    "meta_grad": set_grad(lambda p: None if p.numel() else torch.zeros(0, dtype=p.dtype)),
    "measure": measure,
    "version": lambda life, chance: torch.autograd.graph.increment_version(one(life, chance)),
    "closure": lambda life, chance: life.opt.step(lambda: 3.0),
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        result = call()
        return float(result) if isinstance(result, torch.Tensor) else result
    except (RuntimeError, TypeError, ValueError) as refusal:
        return type(refusal).__name__, str(refusal)
    except KeyError:
        return "a parameter that was replaced has a state"  # torch's state_dict() names its address


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_program_ends_as_the_usual_way(kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    groups = chance.choice([1, 1, 2])
    lives = [Life(kind, groups, usual) for usual in (False, True)]
    done = list[str]()
    acts = chance.sample(sorted(ACTS), 4)  # with all of them, hardly a step would repeat the one before
    for _ in range(60):
        act = chance.choice([*[""] * 5, *acts])
        own, backward, step = chance.random(), chance.randrange(1 << 30), chance.random() < 0.9
        done.append(act)
        outcomes = []
        for life in lives:
            life.backward(backward)
            outcomes.append([outcome(lambda: ACTS[act](life, random.Random(own)))] if act else [])  # noqa: B023
            if step:
                outcomes[-1].append(outcome(life.step))
            outcomes[-1].append(life.weights())
        assert outcomes[0] == outcomes[1], done
    assert lives[0].states() == lives[1].states(), done


def calls_of(step: Callable[[], Any]) -> int:
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no exchange API")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", sorted({*KINDS} - {"clipped", "mixed"}))
def test_the_fifth_step_is_a_repetition(kind: str, groups: int) -> None:
    """Otherwise the test above compares the usual way with itself."""
    counts = []
    for usual in (False, True):
        life = Life(kind, groups, usual)
        for seed in range(4):
            life.backward(seed)
            life.step()
        life.backward(4)
        counts.append(calls_of(life.opt.step))
    assert counts[0] < 0.8 * counts[1], counts
