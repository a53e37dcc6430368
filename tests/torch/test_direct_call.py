"""Operators past torch's dispatcher: the same bits and the same errors as through it, and who listens is asked."""

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ext
from torch_ext.native import direct_call, ops

SHAPES = [(3, 5), (7,), (1,), (), (2, 3, 4), (130,), (0,)]

pytestmark = pytest.mark.skipif(direct_call._caller() is None, reason="this torch shows C no tensors")


def params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(opt: torch.optim.Optimizer, chance: random.Random) -> None:
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) if chance.random() < 0.9 else None


# -- what happens between steps: each is given the optimizer, a parameter of it that has a gradient, and its chance --------


def moves(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.data = p.data.clone()


def writes(_opt: Any, p: Any, _chance: random.Random) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def writes_unnoticed(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.data.copy_(p.data * 0.75)


def transposes(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad = p.grad.t().contiguous().t() if p.dim() == 2 else p.grad


def negates(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad = torch.complex(torch.zeros(p.shape), p.grad.float()).conj().imag.to(p.dtype)


def widens(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad = None if p.dtype is torch.float32 else p.grad  # another dtype only without a gradient of this one
    if p.grad is None:
        p.grad_dtype = None
        p.grad = torch.full(p.shape, 0.25, dtype=torch.bfloat16)


def is_of_no_dtype(_opt: Any, p: Any, _chance: random.Random) -> None:
    p.grad_dtype = None
    p.grad = torch.ones(p.shape, dtype=torch.float64)


def is_sparse(_opt: Any, p: Any, _chance: random.Random) -> None:
    if p.dim():
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


class Watched(Tensor):
    """Asks to see operators, and lets them pass."""


EVENTS: list[Callable[[Any, Any, random.Random], None]] = [
    *(moves, writes, writes_unnoticed, transposes, negates, widens, is_of_no_dtype, is_sparse, converts, freezes),
    *(schedules, clips, reloads, exposes, hands_a_subclass),
]


def played(seed: int, states: Any, dtype: torch.dtype) -> list[Any]:
    """What a program did: the message of each step that was refused, and all bits at its end."""
    chance = random.Random(seed)
    opt = torch_ext.AdamW(params(dtype), lr=1e-2, states=states, weight_decay=0.1)
    seen: list[Any] = []
    for _ in range(12):
        gradients(opt, chance)
        have = [p for p in opt.param_groups[0]["params"] if p.grad is not None and p.numel()]
        for event in chance.sample(EVENTS, chance.choice([0, 0, 1, 2])):
            if have:
                try:
                    event(opt, chance.choice(have), chance)
                except (RuntimeError, TypeError, ValueError) as refusal:
                    seen.append(str(refusal))
        try:
            opt.step()
        except (RuntimeError, TypeError, ValueError) as refusal:
            seen.append(str(refusal))
        opt.zero_grad()
    for p in opt.param_groups[0]["params"]:
        tensors = [p.detach(), *(v for v in opt.state.get(p, {}).values() if isinstance(v, Tensor))]
        seen += [t.reshape(-1).view(torch.uint8).tolist() if t.numel() else [] for t in tensors]
    return seen


CONFIGURATIONS = [("fp32", torch.float32), ("bf16", torch.bfloat16), ("8bit", torch.bfloat16)]


@pytest.mark.parametrize("states, dtype", CONFIGURATIONS, ids=[name for name, _ in CONFIGURATIONS])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_end_in_the_same_bits_and_errors(
    seed: int, states: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = played(seed, states, dtype)
    monkeypatch.setattr(direct_call, "run", lambda *_: False)
    assert direct == played(seed, states, dtype)


# -- which calls are direct ------------------------------------------------------------------------------------------------


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call, whether it was."""
    calls: list[bool] = []
    run = direct_call.run

    def counted(*arguments: Any) -> bool:
        calls.append(run(*arguments))
        return calls[-1]

    monkeypatch.setattr(direct_call, "run", counted)
    return calls


def accumulate(grad: Tensor) -> Tensor:
    total = torch.zeros(grad.shape)
    ops.call("bucket_accumulate_", [total], [grad])
    return total


def test_a_step_is(direct: list[bool]) -> None:
    opt = torch_ext.AdamW(params(torch.bfloat16), lr=1e-2)
    for _ in range(2):
        gradients(opt, random.Random(0))
        direct.clear()
        opt.step()
    assert direct == [True]


class Sees(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Sees, SeesFunctions])
def test_modes_see_the_operator(kind: Any, direct: list[bool]) -> None:
    with kind() as mode:
        assert accumulate(torch.ones(3)).tolist() == [1, 1, 1]
    assert any("bucket_accumulate_" in name for name in mode.seen)
    assert direct == [False]


def test_the_profiler_sees_it(direct: list[bool]) -> None:
    with torch.profiler.profile() as profile:
        accumulate(torch.ones(3))
    assert "torch_ext::bucket_accumulate_" in {event.name for event in profile.events()}
    assert direct == [False]


class Logging(Tensor):
    seen: list[str] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))


def test_a_tensor_that_overrides_operators_sees_it(direct: list[bool]) -> None:
    assert accumulate(torch.ones(3).as_subclass(Logging)).tolist() == [1, 1, 1]
    assert "torch_ext.bucket_accumulate_.default" in Logging.seen
    assert direct == [False]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,)])
def test_a_negated_gradient_has_its_sign(shape: tuple[int, ...], direct: list[bool]) -> None:
    """As autograd leaves it where a parameter is the imaginary part of something conjugated."""
    negated = torch.complex(torch.zeros(shape), torch.full(shape, 2.0)).conj().imag
    assert negated.is_neg()
    total = torch.zeros(shape)
    if len(shape) == 1 and shape[0] > 1:  # not contiguous: refused by both
        with pytest.raises(RuntimeError, match=r"grads\[0\] is not contiguous"):
            accumulate(negated)
    else:
        total = accumulate(negated)
        assert total.flatten().tolist() == [-2.0] * total.numel()
    assert direct[-1:] in ([], [False])


def test_no_object_is_kept_or_lost(direct: list[bool]) -> None:
    grad, total = torch.ones(1), torch.zeros(1)
    objects = [Tensor, grad, total, True, False]
    before = [sys.getrefcount(o) for o in objects[:3]]
    for _ in range(1000):
        ops.call_unversioned("bucket_accumulate_", [total], [grad])
        with pytest.raises(RuntimeError):
            ops.call_unversioned("bucket_accumulate_", [total], [grad, grad])
    assert direct[0] is True
    assert all(abs(sys.getrefcount(o) - n) < 50 for o, n in zip(objects, before, strict=False))


def test_left_out_arguments_and_no_lists_are_torchs(direct: list[bool]) -> None:
    with pytest.raises(RuntimeError):
        ops.call_unversioned("bucket_accumulate_", [torch.ones(1)])
    with pytest.raises((RuntimeError, TypeError)):
        ops.call_unversioned("bucket_accumulate_", 3, [torch.ones(1)])
    assert direct == [False, False]
