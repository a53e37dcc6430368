"""Steps that call operators directly, past torch's dispatcher, must have the bits and the errors of steps that go
through it.

An active mode makes every call go through the dispatcher; test_operators_in_torch.py says which calls go past it
otherwise.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import torch_ext

SHAPES = [(3, 5), (7,), (1,), (), (2, 3, 4), (130,), (0,)]


def params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(opt: torch.optim.Optimizer, chance: random.Random) -> None:
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) if chance.random() < 0.9 else None


# -- events between steps. Each gets the optimizer, a random parameter that has a gradient, and the random numbers. ----


def moves(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.data = p.data.clone()


def writes(_opt: Any, p: Any, _chance: random.Random) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def writes_unnoticed(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.data.copy_(p.data * 0.75)


def transposes(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad = p.grad.transpose(0, -1).contiguous().transpose(0, -1)


def negates(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad = torch.complex(torch.zeros(p.shape), p.grad.float()).conj().imag.to(p.dtype)


def widens(_opt: Any, p: Any, _chance: random.Random) -> None:
    # A gradient of another dtype is only legal if there was none before.
    p.grad = None if p.dtype is torch.float32 else p.grad
    if p.grad is None:
        p.grad_dtype = None
        p.grad = torch.full(p.shape, 0.25, dtype=torch.bfloat16)


def is_of_no_dtype(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad_dtype = None
    p.grad = torch.ones(p.shape, dtype=torch.float64)


def is_sparse(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad = p.grad.to_sparse()


def converts(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad = None
    p.data = p.data.to(torch.float16 if p.dtype is torch.float32 else torch.float32)
    p.grad = torch.ones_like(p)


def freezes(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.requires_grad_(not p.requires_grad)


def schedules(opt: Any, _p: Any, chance: random.Random) -> None:
    opt.param_groups[0]["lr"] = 10 ** chance.uniform(-4, -1)


def clips(opt: Any, _p: Any, _chance: random.Random) -> None:
    torch_ext.clip_grad_norm_(opt, 0.5)


def reloads(opt: Any, _p: Any, _chance: random.Random) -> None:
    opt.load_state_dict(opt.state_dict())


def exposes(opt: Any, p: Any, _chance: random.Random) -> None:
    state = opt.state.get(p, {})
    if "exp_avg" in state:
        state["exp_avg"] = state["exp_avg"].clone()


def hands_a_subclass(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad = p.grad.as_subclass(Watched)


class Passes(TorchFunctionMode):
    """A mode that lets every function pass unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Watched(Tensor):
    """A tensor subclass that sees operators and lets them pass."""


EVENTS: list[Callable[[Any, Any, random.Random], None]] = [
    *(moves, writes, writes_unnoticed, transposes, negates, widens, is_of_no_dtype, is_sparse, converts, freezes),
    *(schedules, clips, reloads, exposes, hands_a_subclass),
]

SUITS: dict[Any, Callable[[Tensor], bool]] = {
    transposes: lambda p: p.dim() > 1,
    is_sparse: lambda p: p.dim() > 0,
    negates: lambda p: p.numel() == 1,  # with more elements it would not be contiguous
}


def played(seed: int, states: Any, dtype: torch.dtype) -> list[Any]:
    """Runs a random program; returns the message of each call that raised, and all bits at the end."""
    chance = random.Random(seed)
    opt = torch_ext.AdamW(params(dtype), lr=1e-2, states=states, weight_decay=0.1)
    seen: list[Any] = []
    for _ in range(30):
        gradients(opt, chance)
        have = [p for p in opt.param_groups[0]["params"] if p.grad is not None and p.numel()]
        for event in chance.sample(EVENTS, chance.choice([0, 1, 1, 2])):
            if suited := list(filter(SUITS.get(event, torch.is_tensor), have)):
                try:
                    event(opt, chance.choice(suited), chance)
                except (RuntimeError, TypeError, ValueError) as refusal:
                    seen.append(str(refusal))
        try:
            opt.step()
        except (RuntimeError, TypeError, ValueError) as refusal:
            seen.append(str(refusal))
        opt.zero_grad()
        for p in opt.param_groups[0]["params"]:
            p.data = p.data.to(dtype)
    for p in opt.param_groups[0]["params"]:
        tensors = [p.detach(), *(v for v in opt.state.get(p, {}).values() if isinstance(v, Tensor))]
        seen += [t.reshape(-1).view(torch.uint8).tolist() if t.numel() else [] for t in tensors]
    return seen


CONFIGURATIONS = [("fp32", torch.float32), ("bf16", torch.bfloat16), ("8bit", torch.bfloat16)]


@pytest.mark.parametrize("states, dtype", CONFIGURATIONS, ids=[name for name, _ in CONFIGURATIONS])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_end_in_the_same_bits_and_errors(seed: int, states: Any, dtype: torch.dtype) -> None:
    direct = played(seed, states, dtype)
    with Passes():
        assert direct == played(seed, states, dtype)


@pytest.mark.parametrize("numel", [3, 40_000])
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}, {"ema_decay": 0.9, "ema_dtype": torch.float32}])
@pytest.mark.parametrize("states, dtype", CONFIGURATIONS, ids=[name for name, _ in CONFIGURATIONS])
def test_a_step_notes_what_it_checked(states: Any, dtype: torch.dtype, options: dict[str, Any], numel: int) -> None:
    """There is room for it, whichever states there are, in memory of their own or in pools."""
    held = [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for _ in range(40)]
    opt = torch_ext.AdamW(held, lr=1e-2, states=states, **options)
    for p in held:
        p.grad = torch.ones_like(p)
    opt.step()
    (batch,) = opt._stepper.plan.device.batches  # type: ignore[union-attr]
    assert batch.notes.noted
    opt.step()
