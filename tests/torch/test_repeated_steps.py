"""A step that repeats the one before in one call of the library (torch_ext/optim/repeated_step.py) does what the usual
way does. Under a torch function mode, which has to see what the library reads, every step takes the usual way. So two
optimizers run the same random program, and one of them steps under such a mode."""

import contextlib
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


class Intercepted(torch.overrides.TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Training:
    """A model's parameters with their optimizer, and what a program does to them."""

    def __init__(self, kind: str, groups: int, usual: bool) -> None:
        self.kind, self.groups, self.usual = kind, groups, usual
        self.dtype = KINDS[kind][0]
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape).to(self.dtype)) for shape in SHAPES]
        if kind == "mixed":
            self.params[0].data = self.params[0].data.float()
        self.opt = self.new_optimizer(self.params)
        self.saved: dict[str, Any] = {"state": {}}

    def new_optimizer(self, params: list[torch.nn.Parameter]) -> torch_ext.AdamW:
        parts = [params[i :: self.groups] for i in range(self.groups)]
        return torch_ext.AdamW([{"params": part} for part in parts], lr=0.1, **KINDS[self.kind][1])

    def backward(self, seed: int) -> None:
        torch.manual_seed(seed)
        for p in self.params:
            p.requires_grad_(True)
            p.grad = torch.randn(p.shape).to(p.dtype)

    def step(self) -> Any:
        with Intercepted() if self.usual else contextlib.nullcontext():
            return self.opt.step()

    def weights(self) -> list[Any]:
        """Returns weights with their version counters, and the optimizer's counts."""
        counts = self.opt.skipped_steps(), self.opt.external_writes()
        return [[(bytes_of(p), p._version) for p in self.params], counts]

    def states(self) -> list[Any]:
        """Returns all states."""
        return [[(key, bytes_of(value)) for key, value in sorted(e.items())] for e in self.opt.state.values()]


Act = Callable[[Training, random.Random], Any]


def one(training: Training, chance: random.Random) -> torch.nn.Parameter:
    return training.params[chance.randrange(len(training.params))]


@torch.no_grad()
def write(training: Training, chance: random.Random) -> None:
    training.params[3][chance.randrange(9000)].mul_(chance.choice([0.5, 1.0]))


def replace_data(training: Training, chance: random.Random) -> None:
    p = one(training, chance)
    p.data = p.data.clone() * chance.choice([0.5, 1.0])


def write_without_trace(training: Training, chance: random.Random) -> None:
    training.params[chance.choice([0, 3])].data.mul_(0.5)


def transpose(training: Training, chance: random.Random) -> None:
    p = training.params[0]
    p.data = p.data.t().contiguous().t()


def swap(training: Training, chance: random.Random) -> None:
    """Exchanges a parameter for another object."""
    i = chance.randrange(len(training.params))
    new = torch.nn.Parameter(training.params[i].detach().clone())
    for group in training.opt.param_groups:
        group["params"] = [new if p is training.params[i] else p for p in group["params"]]
    training.params[i] = new


def reorder(training: Training, chance: random.Random) -> None:
    training.opt.param_groups[0]["params"].reverse()


def add_group(training: Training, chance: random.Random) -> None:
    p = torch.nn.Parameter(torch.ones(5, dtype=training.dtype))
    training.params.append(p)
    training.opt.add_param_group({"params": [p], "lr": 0.01})


def load(training: Training, chance: random.Random) -> None:
    """Loads what another optimizer has saved after a step."""
    params = [torch.nn.Parameter(torch.ones(shape, dtype=training.dtype)) for shape in SHAPES]
    other = training.new_optimizer(params)
    for p in params:
        p.grad = torch.ones_like(p)
    other.step()
    training.opt.load_state_dict(other.state_dict())


def scale(training: Training, chance: random.Random) -> None:
    """As torch.amp.GradScaler does for a step."""
    for name, value in (("grad_scale", 2.0), ("found_inf", 1.0)):
        if chance.random() < 0.6:
            setattr(training.opt, name, torch.tensor(value))
    try:
        training.opt.step()
    finally:
        vars(training.opt).pop("grad_scale", None)
        vars(training.opt).pop("found_inf", None)


def masters(training: Training, chance: random.Random) -> None:
    with training.opt.master_weights():
        for p in training.params:
            p.mul_(0.5)


def measure(training: Training, chance: random.Random) -> Any:
    training.opt.measure_health()
    training.opt.step()
    return str(training.opt.health().params)  # NaN is not equal to itself


def infinite(training: Training, chance: random.Random) -> None:
    p = one(training, chance)
    if p.grad is not None:
        p.grad.fill_(float("inf"))


def offload(training: Training, chance: random.Random) -> Any:
    """Steps while something is offloaded."""
    model = torch.nn.ParameterList(training.params)
    torch_ext.offload(model, training.opt)
    try:
        return outcome(training.opt.step)
    finally:
        torch_ext.onload(model, training.opt)


def edit_state(training: Training, chance: random.Random) -> None:
    entry = training.opt.state[training.params[0]]
    key = chance.choice(sorted(entry))
    if chance.random() < 0.5:
        entry[key] = entry[key].clone()
    entry[key].mul_(2)


def save(training: Training, chance: random.Random) -> None:
    training.saved = training.opt.state_dict()


@torch.no_grad()
def write_saved(training: Training, chance: random.Random) -> None:
    """Writes to a tensor of a state dict, as torch.distributed.checkpoint does to load, or gives it other memory."""
    if not training.saved["state"]:
        save(training, chance)
    index, key = chance.choice([(i, key) for i, entry in training.saved["state"].items() for key in sorted(entry)])
    value = training.saved["state"][index][key]
    if chance.random() < 0.5:
        value.copy_(value * 2)
    elif type(value).__name__ != "StateTensor":  # which is read from another form, and has no memory of its own
        value.data = torch.zeros(3)


def default_device(training: Training, chance: random.Random) -> None:
    with torch.device("cpu"):
        training.step()


def set_grad(make: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> Act:
    def act(training: Training, chance: random.Random) -> None:
        p = one(training, chance)
        p.grad = make(p)

    return act


def strided(p: torch.nn.Parameter) -> torch.Tensor:
    return torch.ones(*p.shape, 2, dtype=p.dtype)[..., 0]


def set_attribute(name: str, *values: Any) -> Act:
    return lambda training, chance: setattr(training.opt, name, chance.choice(values))


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
    "resync": lambda training, chance: training.opt.resync_masters(),
    "clip": lambda training, chance: torch_ext.clip_grad_norm_(training.opt, chance.choice([0.01, 1.0, float("inf")])),
    "clip_params": lambda training, chance: torch_ext.clip_grad_norm_(training.params, 0.01),
    "offload": offload,
    "edit_state": edit_state,
    "default_device": default_device,
    "read": lambda training, chance: len(list(training.opt.state.values())),
    "save": save,
    "write_saved": write_saved,
    "load_saved": lambda training, chance: training.opt.load_state_dict(training.saved) if chance.random() < 0.3 else 0,
    "clip_torch": lambda training, chance: torch.nn.utils.clip_grad_norm_(training.params, 0.01).item(),
    "zero": lambda training, chance: training.opt.zero_grad(chance.random() < 0.5),
    "freeze": lambda training, chance: one(training, chance).requires_grad_(chance.random() < 0.5),
    "lr": lambda training, chance: training.opt.param_groups[0].update(lr=chance.random() / 10),
    "decay": lambda training, chance: training.opt.param_groups[-1].update(weight_decay=chance.random()),
    "illegal": lambda training, chance: training.opt.param_groups[0].update(lr=chance.choice([-1.0, 0.1, 0.1])),
    "seed": lambda training, chance: [group.update(seed=5) for group in training.opt.param_groups],
    "mode": set_attribute("on_external_write", "resync", "error", "ignore", "resync"),
    "skip": set_attribute("skip_nonfinite", True, False, False),
    "infinite": infinite,
    "no_grad": set_grad(lambda p: None),
    "strided": set_grad(strided),
    "empty_grad": set_grad(lambda p: None if p.numel() else torch.zeros(0, dtype=p.dtype)),
    "measure": measure,
    "version": lambda training, chance: torch.autograd.graph.increment_version(one(training, chance)),
    "closure": lambda training, chance: training.opt.step(lambda: 3.0),
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
    both = [Training(kind, groups, usual) for usual in (False, True)]
    done = list[str]()
    acts = chance.sample(sorted(ACTS), 4)  # with all of them, hardly a step would repeat the one before
    for _ in range(60):
        act = chance.choice([*[""] * 5, *acts])
        own, backward, step = chance.random(), chance.randrange(1 << 30), chance.random() < 0.9
        done.append(act)
        outcomes = []
        for training in both:
            training.backward(backward)
            outcomes.append([outcome(lambda: ACTS[act](training, random.Random(own)))] if act else [])  # noqa: B023
            if step:
                outcomes[-1].append(outcome(training.step))
            outcomes[-1].append(training.weights())
        assert outcomes[0] == outcomes[1], done
    assert both[0].states() == both[1].states(), done


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


BEFORE: dict[str, Callable[[Training], Any]] = {
    "": lambda training: None,
    "save": lambda training: training.opt.state_dict(),
    "load_own": lambda training: training.opt.load_state_dict(training.opt.state_dict()),
    "read": lambda training: list(training.opt.state.values()),
    "clip": lambda training: torch_ext.clip_grad_norm_(training.opt, 0.01),
    "clip_params": lambda training: torch_ext.clip_grad_norm_(training.params, 0.01),
}


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no exchange API")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", sorted({*KINDS} - {"clipped", "mixed"}))
def test_the_fifth_step_is_a_repetition(kind: str, before: str, groups: int) -> None:
    """Otherwise the test above compares the usual way with itself. before: what is done before each step from the third
    on. (Accelerate loads an optimizer's own state_dict once.)"""
    counts = []
    for usual in (False, True):
        training = Training(kind, groups, usual)
        for seed in range(4):
            training.backward(seed)
            if seed > 1:
                BEFORE[before](training)
            training.step()
        training.backward(4)
        BEFORE[before](training)
        counts.append(calls_of(training.step))
    assert counts[0] < 0.8 * counts[1], counts
