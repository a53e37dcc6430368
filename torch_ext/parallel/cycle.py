"""The gradient cycle of the C library (csrc/torch_ext_cycle.h) and its driver: what happened goes in, what to do comes
out. No decision about gradients between and during backwards is made in Python."""

import ctypes
import enum
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torch_ext.native import dtypes, library, structs

NO_SHARD, OPTIM, OPTIM_GRADS, UNITS, DDP_HOOK = range(5)
"""tx_cycle_kind."""

GRAD_NONE, GRAD_IN_PLACE, GRAD_OTHER = range(3)
"""tx_cycle_grad: what lies in `.grad`."""

IDLE, ACCUMULATING, REDUCING, CLOSING, RECOVERING = range(5)
"""tx_cycle_phase."""

STEP_WHEN_REDUCED = DISCARD = 1
IF_SENT = 2
"""Flags of SEND and of WAIT."""


class Prepare(enum.IntFlag):
    """tx_cycle_prepare: what is done with a gradient before it counts in the next sum, in this order."""

    COPY = 1
    MULTIPLY = 2
    ZERO = 4
    SET_ASIDE = 8
    FORGET = 16
    TAKE = 32


DO = ("", "check", "send", "inspect", "order", "report", "wait", "read", "install", "raise", "recovered", "weights")
"""tx_cycle_do: the names of the driver's methods (`CycleDriver`)."""
_RAISE = DO.index("raise")

_Pointer, _Int64, _Int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_Int64s = ctypes.POINTER(_Int64)
_ByteRows = ctypes.POINTER(_Pointer)


@structs.mirror("tx_cycle_args")
class _Args(library.Struct):
    """What is decided before the first gradient."""


@structs.mirror("tx_cycle_action")
class Action(library.Struct):
    """What to do now."""

    first: int
    end: int
    message: int
    text: bytes
    kind: int
    flags: int


class Options(NamedTuple):
    """Of tx_cycle_args, what does not depend on the plan."""

    kind: int
    rank: int
    world: int
    slots: int
    check_for_nan: bool = False
    find_unused: bool = False
    scales_sums: bool = False


def _call(name: str, *argtypes: Any, restype: Any = _Int32) -> Callable[..., Any]:
    """A function of the machine: it takes a microsecond, and its pointer first."""
    return library.function(f"tx_cycle_{name}", _Pointer, *argtypes, restype=restype, brief=True)


def _made(args: _Args, replaces: "Cycle | None") -> tuple[Any, int]:
    """A machine: its memory, and its address."""
    arguments, found = ctypes.POINTER(_Args), _Pointer()
    size = library.function("tx_cycle_bytes", arguments, restype=_Int64)(ctypes.byref(args))
    memory = (_Int64 * (size // 8 + 1))()
    given = memory, ctypes.sizeof(memory), ctypes.byref(args)
    if replaces is None:
        init = library.function("tx_cycle_init", _Pointer, _Int64, arguments, ctypes.POINTER(_Pointer))
        init(*given, ctypes.byref(found))
    else:
        rebuild = library.function("tx_cycle_rebuild", _Pointer, _Int64, arguments, _Pointer, ctypes.POINTER(_Pointer))
        rebuild(*given, replaces.pointer, ctypes.byref(found))
    assert found.value is not None
    return memory, found.value


class CycleState:
    """What a machine knows."""

    pointer: int
    n: int
    _n_buckets: int
    _phase: Callable[[int], int]

    @property
    def phase(self) -> int:
        return int(self._phase(self.pointer))

    @property
    def number(self) -> int:
        """Of the cycle that is under way, or comes next."""
        return int(_call("number", restype=_Int64)(self.pointer))

    @property
    def failure(self) -> str | None:
        """Why nothing can be reduced any more."""
        return self._text("failure") or None

    @property
    def partly_stepped(self) -> bool:
        """Whether a backward raised when some of its buckets had been stepped."""
        return bool(_call("partly_stepped")(self.pointer))

    @property
    def order(self) -> list[int]:
        """The parameters, as their gradients were ready in the first cycle that reduced."""
        at = _call("order", restype=_Pointer)(self.pointer)
        return list((_Int64 * self.n).from_address(at)) if self.n else []

    @property
    def completed_by(self) -> list[int]:
        """The parameters whose gradients completed buckets, when that happened last."""
        at = _call("completed_by", restype=_Pointer)(self.pointer)
        known = (_Int64 * self._n_buckets).from_address(at) if at else ()
        return [i for i in known if i >= 0]

    def anywhere(self) -> list[bool]:
        """Whether a rank has a gradient, after a cycle; by parameter."""
        return list(map(bool, bytes(self._bytes("anywhere"))))

    def left(self) -> list[bool]:
        """Whether every rank has what an earlier reduction left, and got no gradient since."""
        return list(map(bool, bytes(self._bytes("left"))))

    def nonfinite(self) -> list[int]:
        """Parameters that the check for NaN named, until zero_grad."""
        return [i for i, named in enumerate(self._bytes("nonfinite")) if named]

    def is_finite(self, i: int) -> None:
        """It was looked at again."""
        self._bytes("nonfinite")[i] = 0

    def _bytes(self, name: str) -> Any:
        at = _call(name, restype=_Pointer)(self.pointer)
        return (ctypes.c_uint8 * self.n).from_address(at)

    def _text(self, name: str) -> str:
        return (_call(name, restype=ctypes.c_char_p)(self.pointer) or b"").decode("utf-8", "replace")


class Cycle(CycleState):
    """A machine in memory of this object. Positions i are those of `names`."""

    def __init__(
        self,
        options: Options,
        names: Sequence[str],
        *,
        bucket_of: Sequence[int] = (),
        buffer_of: Sequence[int] = (),
        units: Sequence[str] = (),
        n_buckets: int = 0,
        reorder: bool = False,
        cycle: int = 0,
        replaces: "Cycle | None" = None,
    ) -> None:
        """bucket_of, buffer_of: of buckets that are planned; units: names of FSDP2's; n_buckets: of DDP's. reorder: the
        first cycle that reduces shows the order. replaces: waits for ORDER to be done."""
        self.options, self.names, self.n = options, names, len(names)
        self._n_buckets = len(buffer_of) or len(units) or n_buckets
        self._kept = (
            (_Int64 * max(1, len(bucket_of)))(*bucket_of),
            (_Int64 * max(1, len(buffer_of)))(*buffer_of),
            (ctypes.c_char_p * max(1, self.n))(*map(dtypes.c_text, names)),
            (ctypes.c_char_p * max(1, len(units)))(*map(dtypes.c_text, units)),
        )
        args = _Args(
            size=ctypes.sizeof(_Args),
            n_params=self.n,
            n_buckets=self._n_buckets,
            bucket_of=ctypes.cast(self._kept[0], _Int64s),
            buffer_of=ctypes.cast(self._kept[1], _Int64s),
            names=ctypes.addressof(self._kept[2]),
            units=ctypes.addressof(self._kept[3]),
            cycle=cycle,
            reorder=reorder,
            **options._asdict(),
        )
        self._memory, self.pointer = _made(args, replaces)
        self.action = Action()
        self._action_at = ctypes.addressof(self.action)
        # Of the calls that there are most of, bound once.
        self._ready_several, self._next = _call("ready_several", _Pointer, _Int64), _call("next", _Pointer)
        self._done, self._phase = _call("done", _Int32, restype=None), _call("phase_of")

    # -- what happened

    def _answer(self, answer: int) -> bool:
        if answer < 0:
            raise RuntimeError(self._text("refusal"))
        return answer > 0

    def begin(self, *, sync: bool = True, steps: bool = False) -> None:
        """A backward begins. RuntimeError where nothing can be reduced any more."""
        self._answer(_call("begin", _Int32, _Int32)(self.pointer, sync, steps))

    def refuse_failed(self) -> None:
        """RuntimeError where nothing can be reduced any more."""
        if (failure := self.failure) is not None:
            raise RuntimeError(f"gradients cannot be reduced any more: {failure}")

    def accumulate(self, i: int, grad: int) -> int:
        """Autograd is about to accumulate into `.grad`, which is `grad`: Prepare."""
        flags: int = _call("accumulate", _Int64, _Int32)(self.pointer, i, grad)
        return flags

    def ready(self, i: int) -> bool:
        """The gradient is ready; whether there is something to do."""
        return self._answer(_call("ready", _Int64)(self.pointer, i))

    def ready_several(self, positions: "array[int]") -> bool:
        """These gradients (int64) are ready, in this order; whether there is something to do."""
        at, n = positions.buffer_info()
        return self._answer(self._ready_several(self.pointer, at, n))

    def given(self, bucket: int, numel: int, *, message: bool = True, last: bool = False) -> None:
        """torch hands over the gradients of a unit or bucket."""
        self._answer(_call("given", _Int64, _Int64, _Int32, _Int32)(self.pointer, bucket, numel, message, last))

    def end(self) -> bool:
        """The backward has ended; whether there is something to do."""
        return self._answer(_call("end")(self.pointer))

    def missing(self, i: int, grad: int, requires_grad: bool) -> int:
        """The answer to `inspect`: Prepare."""
        flags: int = _call("missing", _Int64, _Int32, _Int32)(self.pointer, i, grad, requires_grad)
        return flags

    def died(self, modified: Iterable[int] = ()) -> None:
        """The backward raised. modified: whose gradients may have been modified since the last cycle."""
        _call("died", ctypes.c_char_p, restype=None)(self.pointer, self._flags(modified))

    def broken(self, positions: Iterable[int]) -> None:
        """Sums were added to their shards by a backward that raised."""
        _call("broken", ctypes.c_char_p, restype=None)(self.pointer, self._flags(positions))

    def zero(self, positions: Sequence[int]) -> None:
        """zero_grad()."""
        numbers = (_Int64 * max(1, len(positions)))(*positions)
        _call("zero", _Int64s, _Int64, restype=None)(self.pointer, numbers, len(positions))

    def fail(self, text: str) -> None:
        """The exchange has failed for good; the first text stays."""
        _call("fail", ctypes.c_char_p, restype=None)(self.pointer, dtypes.c_text(text))

    def check_step(self, grads: Iterable[int] = ()) -> None:
        """Before a step. grads: whose gradients are this rank's own if one was ready since the last reduction.
        RuntimeError where they must not be stepped."""
        self._answer(_call("check_step", ctypes.c_char_p)(self.pointer, self._flags(grads)))

    def stepping(self) -> None:
        """A step is about to write. One that raises before `stepped` is a failure for good, told by the next `begin` or
        `check_step`."""
        _call("stepping", restype=None)(self.pointer)

    def gathering(self) -> int:
        """The gather of a bucket's weights has begun; "weights" comes for each, in this order. Returns its message."""
        message: int = _call("gathering", restype=_Int64)(self.pointer)
        return message

    def stepped(self) -> None:
        """The step has written everything and begun all gathers, or was refused before it wrote."""
        _call("stepped", restype=None)(self.pointer)

    def set_messages(self, ends: Iterable[int]) -> None:
        """Which buckets are sent as one, from the next backward on: each message's end, exclusive."""
        flags = bytearray(self._n_buckets + 1)
        for end in ends:
            flags[end - 1] = 1
        _call("set_messages", ctypes.c_char_p, restype=None)(self.pointer, bytes(flags))

    # -- what to do

    def next(self) -> str:
        """What is to be done, of DO, with its details in `action`; "": nothing. RuntimeError: the verdict."""
        kind = self._next(self.pointer, self._action_at)
        if kind == _RAISE:
            raise RuntimeError(self.action.text.decode())
        return DO[kind]

    def done(self, answered: bool = False) -> None:
        """What `next` said is done."""
        self._done(self.pointer, answered)

    # -- reports

    def report(self, nonfinite: int, requires_grad: Sequence[bool]) -> torch.Tensor:
        """This rank's, uint8. nonfinite: a parameter, or -1."""
        payload = torch.empty(_call("report_bytes", restype=_Int64)(self.pointer), dtype=torch.uint8, device="cpu")
        write = _call("report", _Int64, ctypes.c_char_p, _Pointer, restype=None)
        write(self.pointer, nonfinite, bytes(requires_grad), payload.data_ptr())
        return payload

    def read(self, rows: Sequence[torch.Tensor], held_back: bool = False) -> None:
        """Every rank's, by rank."""
        pointers = (_Pointer * len(rows))(*(row.data_ptr() for row in rows))
        scratch = (_Pointer * len(rows))()
        _call("read", _ByteRows, _ByteRows, _Int32, restype=None)(self.pointer, pointers, scratch, held_back)

    def _flags(self, positions: Iterable[int]) -> bytes:
        flags = bytearray(self.n)
        for i in positions:
            flags[i] = 1
        return bytes(flags)


class CycleDriver:
    """Does what a cycle asks for: methods do_check(action), do_send and so on, by the names of DO."""

    cycle: Cycle

    def run(self) -> None:
        """Until nothing is left to do. RuntimeError: the verdict of the ranks' reports, the same on every rank."""
        while what := self.cycle.next():
            cycle = self.cycle
            answered = getattr(self, f"do_{what}")(cycle.action)
            if cycle is self.cycle:  # else it was replaced, which says so as well
                cycle.done(bool(answered))

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Returns call(); a RuntimeError is remembered: the ranks have lost step, and no later message could tell."""
        try:
            return call()
        except RuntimeError as error:
            self.cycle.fail(str(error))
            raise


class Exchange(CycleDriver):
    """Of a reducer's gradients."""

    @property
    def wire_bytes(self) -> int:
        """Sent in the last cycle that ended, and for the weights gathered since."""
        raise NotImplementedError
