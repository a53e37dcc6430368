"""Programs for the tests of interrupts (Ctrl-C): one call of the library raises KeyboardInterrupt at the n-th place in
its Python code where the interpreter may handle a signal. Tests compare what the call leaves with the state before and
after it."""

import copy
import io
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torch_ext

_ROOT = str(pathlib.Path(torch_ext.__file__).parent)
_GENERATOR = 0x20  # inspect.CO_GENERATOR: the interpreter raises no interrupt where a generator begins or yields
torch.set_num_threads(1)  # at these sizes more threads only cost time

SHAPES = [(40, 30), (30,), (2500,), (20, 64), (1,)]


class Interrupt:
    """Counts, in this context, the places where the interpreter may raise an interrupt: where a function of the library
    begins, and where a call returns. Raises at the place with number `at`; with 0 it only counts."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count, self.where = at, 0, ""

    def _event(self, frame: Any, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "c_call":  # no interrupt is raised between here and where the call returns
            return
        if not code.co_filename.startswith(_ROOT) or (code.co_flags & _GENERATOR and event in ("call", "return")):
            return
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            self.where = f"{code.co_filename[len(_ROOT) + 1 :]}:{frame.f_lineno} in {code.co_name} ({event})"
            self.handler()

    def handler(self) -> None:
        """The signal's handler; subclasses override it."""
        raise KeyboardInterrupt

    def __enter__(self) -> "Interrupt":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


class Kind(NamedTuple):
    """A configuration to interrupt."""

    dtype: torch.dtype
    options: dict[str, Any]
    publishes: bool = False
    muon: bool = False
    gaps: bool = False  # a weight is not contiguous, so it is stepped as a copy


BF16 = torch.bfloat16
KINDS = {
    "fp32": Kind(torch.float32, {}),
    "bf16": Kind(BF16, {}),
    "a weight with gaps": Kind(BF16, {}, gaps=True),
    "remainders": Kind(BF16, {"states": "bf16_remainder"}, publishes=True),
    "8 bits": Kind(BF16, {"states": "8bit"}),
    "partly on the host": Kind(BF16, {"offload_fraction": 0.5}),
    "an average": Kind(BF16, {"ema_decay": 0.9}, publishes=True),
    "external writes refused": Kind(BF16, {"on_external_write": "error"}),
    "Muon": Kind(BF16, {"ns_dtype": torch.float32, "ns_steps": 2}, muon=True),
}


def _with_gaps(t: Tensor) -> Tensor:
    """Returns an equal tensor whose elements are not adjacent in memory."""
    return torch.stack([t, t], -1)[..., 0]


def _bits(t: Tensor) -> bytes:
    return bytes(t.detach().clone().contiguous().view(-1).view(torch.uint8).tolist())


class Training:
    """A model and its optimizer after two steps, with a publisher and an engine for some kinds. Two of one kind are
    equal."""

    saved: Any = None
    late: Any = None

    def __init__(self, kind: str) -> None:
        dtype, options, publishes, muon, gaps = KINDS[kind]
        generator = torch.Generator().manual_seed(0)
        self.model: Any = nn.Module()
        for i, shape in enumerate(SHAPES):
            weight = torch.randn(shape, generator=generator).to(dtype)
            self.model.register_parameter(f"p{i}", nn.Parameter(_with_gaps(weight) if gaps and i == 3 else weight))
        make: Any = torch_ext.Muon if muon else torch_ext.AdamW
        self.optimizer: Any = make(self.model.named_parameters(), lr=0.01, **options)
        self.publisher: Any = None
        if publishes:
            self.publisher = torch_ext.WeightPublisher(self.model, self.optimizer)
            self.engine = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            self.subscriber = torch_ext.WeightSubscriber(self.engine)
        self.steps = 0
        self.train()

    def set_grads(self) -> None:
        generator = torch.Generator().manual_seed(1000 + self.steps)
        for p in self.model.parameters():
            p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype)

    def train(self) -> None:
        for _ in range(2):
            self.set_grads()
            torch_ext.clip_grad_norm_(self.optimizer, 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def found(self) -> dict[Any, Any]:
        """Returns everything that training depends on. Raises RuntimeError while something is offloaded."""
        state = self.optimizer.state_dict()
        weights = {name: (p.dtype, _bits(p)) for name, p in self.model.named_parameters()}
        grads = {("grad", n): None if p.grad is None else _bits(p.grad) for n, p in self.model.named_parameters()}
        entries = {(i, key): _bits(value) for i, entry in state["state"].items() for key, value in entry.items()}
        return weights | grads | entries | {"groups": str(state["param_groups"])}

    def go_on(self) -> dict[Any, Any]:
        """Continues training and returns what it reaches. Asserts that an engine, if there is one, follows it."""
        torch_ext.onload(self.model, self.optimizer)
        if self.publisher is not None and self.publisher.version > self.subscriber.version:
            self.subscriber.apply([self.publisher.full()])  # the interrupted delta never arrived
        self.optimizer.zero_grad()
        self.steps = 10
        self.train()
        if self.publisher is not None:
            self.subscriber.apply([self.publisher.publish()])
            weights = {name: _bits(p) for name, p in self.model.named_parameters()}
            assert {name: _bits(t) for name, t in self.engine.items()} == weights, "an engine has other weights"
        return self.found()


class Call(NamedTuple):
    """A call to interrupt: what is done before it, the call itself, and the kinds that it applies to."""

    before: Callable[[Training], Any]
    interrupted: Callable[[Training], Any]
    fits: Callable[[Kind], bool] = lambda _: True


def _ema(training: Training) -> None:
    with training.optimizer.ema_weights():
        pass


def _masters(training: Training) -> None:
    with training.optimizer.master_weights():
        pass


def _clamped(training: Training) -> None:
    with training.optimizer.master_weights():
        for p in training.model.parameters():
            p.clamp_(-0.5, 0.5)


def _written(training: Training) -> None:
    if training.optimizer.on_external_write != "error":
        with torch.no_grad():
            training.model.p0.mul_(0.5)


def _saved(training: Training) -> None:
    file = io.BytesIO()
    torch.save(training.optimizer.state_dict(), file)
    file.seek(0)
    training.saved = torch.load(file)
    training.train()


def _late(training: Training) -> None:
    training.late = nn.Parameter(torch.ones(7, dtype=training.model.p0.dtype))


def _offload(training: Training) -> None:
    torch_ext.offload(training.model, training.optimizer)


def _of(name: str, *args: Any, **options: Any) -> Callable[[Training], Any]:
    """Returns a function that calls the named method of a training's optimizer."""
    return lambda training: getattr(training.optimizer, name)(*args, **options)


CALLS = {
    "step": Call(Training.set_grads, _of("step")),
    "zero_grad": Call(Training.set_grads, _of("zero_grad")),
    "clip_grad_norm_": Call(Training.set_grads, lambda t: torch_ext.clip_grad_norm_(t.optimizer, 0.1)),
    "state_dict": Call(_written, _of("state_dict")),
    "load_state_dict": Call(
        _saved,
        lambda t: t.optimizer.load_state_dict(t.saved),
        # Only the optimizer is loaded: weights do not fit its masters.
        lambda kind: kind.options.get("on_external_write") != "error",
    ),
    "add_param_group": Call(_late, lambda t: t.optimizer.add_param_group({"params": [("late", t.late)]})),
    "a copy": Call(_written, lambda t: copy.deepcopy(t.optimizer)),
    "resync_masters": Call(_written, _of("resync_masters")),
    "resync_masters(force)": Call(_written, _of("resync_masters", force=True)),
    "master_weights": Call(_written, _masters),
    "master_weights, written": Call(_written, _clamped),
    "ema_weights": Call(_written, _ema, lambda kind: "ema_decay" in kind.options),
    "offload": Call(Training.set_grads, _offload),
    "onload": Call(_offload, lambda t: torch_ext.onload(t.model, t.optimizer)),
    "publish": Call(_written, lambda t: t.publisher.publish(), lambda kind: kind.publishes),
}
