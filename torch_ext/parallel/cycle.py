"""The gradient cycle: a state machine in the C library (csrc/torch_ext_cycle.h), and the driver that runs its actions.

Python reports events (a gradient is ready, a backward ended) and executes the actions that the machine answers with
(send a bucket, wait for a message). The machine alone decides what happens to gradients during and between backwards.
"""

import ctypes
import enum
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torch_ext.native import dtypes, library, structs
from torch_ext.parallel.sent_bytes import SentBytes

NO_SHARD, OPTIM, OPTIM_GRADS, UNITS, DDP_HOOK = range(5)
"""tx_cycle_kind."""

GRAD_NONE, GRAD_IN_PLACE, GRAD_OTHER = range(3)
"""tx_cycle_grad: what `.grad` is."""

IDLE, ACCUMULATING, REDUCING, CLOSING, RECOVERING = range(5)
"""tx_cycle_phase."""

STEP_WHEN_REDUCED = DISCARD = 1
IF_SENT = 2
"""Flags of the actions "send" (STEP_WHEN_REDUCED) and "wait" (DISCARD, IF_SENT)."""


class Prepare(enum.IntFlag):
    """tx_cycle_prepare: what to do with a gradient before it is added to the next sum, in the order of these bits."""

    COPY = 1
    MULTIPLY = 2
    ZERO = 4
    SET_ASIDE = 8
    FORGET = 16
    TAKE = 32


DO = ("", "check", "send", "inspect", "order", "report", "wait", "read", "install", "raise", "recovered", "weights")
"""tx_cycle_do: the actions; the driver's method for "check" is `do_check` (`CycleDriver`)."""
_RAISE = DO.index("raise")

_Pointer, _Int64, _Int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_Int64s = ctypes.POINTER(_Int64)
_ByteRows = ctypes.POINTER(_Pointer)


@structs.mirror("tx_cycle_args")
class _Args(library.Struct):
    """The arguments with which a machine is created."""


@structs.mirror("tx_cycle_action")
class Action(library.Struct):
    """The action to run now."""

    first: int
    end: int
    message: int
    text: bytes
    kind: int
    flags: int


class Options(NamedTuple):
    """The fields of tx_cycle_args that do not depend on the plan."""

    kind: int
    rank: int
    world: int
    slots: int  # at most so many messages in flight (kinds OPTIM_GRADS and UNITS; the others have no limit)
    check_for_nan: bool = False
    find_unused: bool = False
    scales_sums: bool = False


def _call(name: str, *argtypes: Any, restype: Any = _Int32) -> Callable[..., Any]:
    """Returns a C function of the machine, which takes the machine's pointer first. It keeps the GIL."""
    return library.function(f"tx_cycle_{name}", _Pointer, *argtypes, restype=restype, keep_gil=True)


def _made(args: _Args, replaces: "Cycle | None") -> tuple[Any, int]:
    """Creates a machine, or one that replaces another. Returns its memory, which the caller keeps, and its address."""
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
    """Reads the state of a machine."""

    pointer: int
    n: int
    _n_buckets: int
    _phase: Callable[[int], int]

    @property
    def phase(self) -> int:
        return int(self._phase(self.pointer))

    @property
    def number(self) -> int:
        """The number of the cycle that is under way, or else of the next one."""
        return int(_call("number", restype=_Int64)(self.pointer))

    @property
    def failure(self) -> str | None:
        """Why nothing can be reduced any more; None while it can."""
        return self._text("failure") or None

    @property
    def partly_stepped(self) -> bool:
        """Whether a step, or a backward that steps buckets, raised when it may have stepped some parameters."""
        return bool(_call("partly_stepped")(self.pointer))

    @property
    def order(self) -> list[int]:
        """All parameters, in the order in which their gradients were ready in the first cycle that reduced; those
        without a gradient last, in reverse order."""
        at = _call("order", restype=_Pointer)(self.pointer)
        return list((_Int64 * self.n).from_address(at)) if self.n else []

    @property
    def completed_by(self) -> list[int]:
        """For each bucket, the parameter whose gradient completed it last time, or after a rebuild is expected to."""
        at = _call("completed_by", restype=_Pointer)(self.pointer)
        known = (_Int64 * self._n_buckets).from_address(at) if at else ()
        return [i for i in known if i >= 0]

    def anywhere(self) -> list[bool]:
        """By parameter: whether any rank has a gradient, after the last cycle."""
        return list(map(bool, bytes(self._bytes("anywhere"))))

    def left(self) -> list[bool]:
        """By parameter: whether all ranks still have an earlier reduction's result and got no gradient since."""
        return list(map(bool, bytes(self._bytes("left"))))

    def nonfinite(self) -> list[int]:
        """The parameters whose gradients the NaN check found not finite, until zero_grad."""
        return [i for i, named in enumerate(self._bytes("nonfinite")) if named]

    def is_finite(self, i: int) -> None:
        """Removes parameter i from `nonfinite`: its gradient was checked again."""
        self._bytes("nonfinite")[i] = 0

    def _bytes(self, name: str) -> Any:
        at = _call(name, restype=_Pointer)(self.pointer)
        return (ctypes.c_uint8 * self.n).from_address(at)

    def _text(self, name: str) -> str:
        return (_call(name, restype=ctypes.c_char_p)(self.pointer) or b"").decode("utf-8", "replace")


class Cycle(CycleState):
    """One gradient cycle machine, in memory of this object. `i` is a parameter's position in `names`."""

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
        """bucket_of, buffer_of: for planned buckets, each parameter's bucket and each bucket's buffer. units: the names
        of FSDP2's units. n_buckets: for DDP's buckets. reorder: the first cycle that reduces asks for the action
        "order" before it sends. cycle: the first cycle's number. replaces: a machine that waits in "order"."""
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
        # The most frequent calls are looked up once.
        self._ready_several, self._next = _call("ready_several", _Pointer, _Int64), _call("next", _Pointer)
        self._done, self._phase = _call("done", _Int32, restype=None), _call("phase_of")

    # -- events: what happened

    def _answer(self, answer: int) -> bool:
        if answer < 0:
            raise RuntimeError(self._text("refusal"))
        return answer > 0

    def begin(self, *, sync: bool = True, steps: bool = False) -> None:
        """Event: a backward begins. Raises RuntimeError if nothing can be reduced any more."""
        self._answer(_call("begin", _Int32, _Int32)(self.pointer, sync, steps))

    def refuse_failed(self) -> None:
        """Raises RuntimeError if nothing can be reduced any more."""
        if (failure := self.failure) is not None:
            raise RuntimeError(f"gradients cannot be reduced any more: {failure}")

    def accumulate(self, i: int, grad: int) -> int:
        """Event: autograd is about to accumulate into `.grad`, which is of kind `grad`. Returns Prepare flags."""
        flags: int = _call("accumulate", _Int64, _Int32)(self.pointer, i, grad)
        return flags

    def ready(self, i: int) -> bool:
        """Event: the gradient of parameter i is ready. Returns whether there is an action to run."""
        return self._answer(_call("ready", _Int64)(self.pointer, i))

    def ready_several(self, positions: "array[int]") -> bool:
        """Event: these parameters' gradients became ready, in this order (int64). Returns whether there is an action to
        run."""
        at, n = positions.buffer_info()
        return self._answer(self._ready_several(self.pointer, at, n))

    def given(self, bucket: int, numel: int, *, message: bool = True, last: bool = False) -> None:
        """Event: FSDP2 or DDP hands over the gradients of a unit or bucket. message: False if one rank has all of it,
        so that nothing is sent. last: whether it is the backward's last one."""
        self._answer(_call("given", _Int64, _Int64, _Int32, _Int32)(self.pointer, bucket, numel, message, last))

    def end(self) -> bool:
        """Event: the backward has ended. Returns whether there is an action to run."""
        return self._answer(_call("end")(self.pointer))

    def missing(self, i: int, grad: int, requires_grad: bool) -> int:
        """Answers the action "inspect": parameter i, which got no gradient, has a `.grad` of this kind. Returns Prepare
        flags."""
        flags: int = _call("missing", _Int64, _Int32, _Int32)(self.pointer, i, grad, requires_grad)
        return flags

    def died(self, modified: Iterable[int] = ()) -> None:
        """Event: the backward raised. modified: parameters whose gradients may have changed since the last cycle."""
        _call("died", ctypes.c_char_p, restype=None)(self.pointer, self._flags(modified))

    def broken(self, positions: Iterable[int]) -> None:
        """Event: a backward that raised had added sums to these parameters' gradient shards."""
        _call("broken", ctypes.c_char_p, restype=None)(self.pointer, self._flags(positions))

    def zero(self, positions: Sequence[int]) -> None:
        """Event: zero_grad() of these parameters."""
        numbers = (_Int64 * max(1, len(positions)))(*positions)
        _call("zero", _Int64s, _Int64, restype=None)(self.pointer, numbers, len(positions))

    def fail(self, text: str) -> None:
        """Event: the exchange has failed for good. Only the first text is kept."""
        _call("fail", ctypes.c_char_p, restype=None)(self.pointer, dtypes.c_text(text))

    def check_step(self, call: str, grads: Iterable[int] = ()) -> None:
        """Called before gradients are stepped, clipped or unscaled; raises RuntimeError if they must not be. call: the
        user's call, with which the message begins. grads: the parameters whose gradients are this rank's own (not
        reduced) if one was ready since the last reduction."""
        check = _call("check_step", ctypes.c_char_p, ctypes.c_char_p)
        self._answer(check(self.pointer, self._flags(grads), call.encode()))

    def stepping(self) -> None:
        """Event: a step is about to write. If it raises before `stepped`, that is a failure for good, which the next
        `begin` or `check_step` raises."""
        _call("stepping", restype=None)(self.pointer)

    def gathering(self) -> int:
        """Event: the all-gather of a bucket's weights was started. The action "weights" follows for each, in this
        order. Returns the message's number."""
        message: int = _call("gathering", restype=_Int64)(self.pointer)
        return message

    def stepped(self) -> None:
        """Event: the step has written everything and started all all-gathers, or was rejected before it wrote."""
        _call("stepped", restype=None)(self.pointer)

    def set_messages(self, ends: Iterable[int]) -> None:
        """Sets which buckets form one message, from the next backward on. ends: each message's end, exclusive."""
        flags = bytearray(self._n_buckets + 1)
        for end in ends:
            flags[end - 1] = 1
        _call("set_messages", ctypes.c_char_p, restype=None)(self.pointer, bytes(flags))

    # -- actions: what to do

    def next(self) -> str:
        """Returns the next action's name (of DO; "": none); its details are in `action`. Raises RuntimeError if the
        ranks' reports say that this cycle failed."""
        kind = self._next(self.pointer, self._action_at)
        if kind == _RAISE:
            raise RuntimeError(self.action.text.decode())
        return DO[kind]

    def done(self, answered: bool = False) -> None:
        """The action from `next` was run. answered: for "send", whether the message has been waited for already."""
        self._done(self.pointer, answered)

    # -- reports

    def report(self, nonfinite: int, requires_grad: Sequence[bool]) -> torch.Tensor:
        """Returns this rank's report, uint8. nonfinite: the first parameter whose gradient is not finite, or -1."""
        payload = torch.empty(_call("report_bytes", restype=_Int64)(self.pointer), dtype=torch.uint8, device="cpu")
        write = _call("report", _Int64, ctypes.c_char_p, _Pointer, restype=None)
        write(self.pointer, nonfinite, bytes(requires_grad), payload.data_ptr())
        return payload

    def read(self, rows: Sequence[torch.Tensor], held_back: bool = False) -> None:
        """Reads the reports of all ranks, by rank. held_back: FSDP2 keeps some gradients for a later backward."""
        pointers = (_Pointer * len(rows))(*(row.data_ptr() for row in rows))
        scratch = (_Pointer * len(rows))()
        _call("read", _ByteRows, _ByteRows, _Int32, restype=None)(self.pointer, pointers, scratch, held_back)

    def _flags(self, positions: Iterable[int]) -> bytes:
        flags = bytearray(self.n)
        for i in positions:
            flags[i] = 1
        return bytes(flags)


class CycleDriver:
    """Runs a cycle's actions. Subclasses have a method for each: do_check(action), do_send(action), ... (see DO)."""

    cycle: Cycle

    def run(self) -> None:
        """Runs actions until none is left. Raises the RuntimeError that the ranks' reports lead to, the same on every
        rank."""
        while what := self.cycle.next():
            cycle = self.cycle
            answered = getattr(self, f"do_{what}")(cycle.action)
            if cycle is self.cycle:  # a machine that was replaced (action "order") needs no `done`
                cycle.done(bool(answered))

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Returns call(). A RuntimeError becomes the cycle's failure for good: the ranks are no longer at the same
        message, and could not agree on anything by a later one."""
        try:
            return call()
        except RuntimeError as error:
            self.cycle.fail(str(error))
            raise


class Exchange(CycleDriver):
    """A driver that exchanges a reducer's gradients."""

    sent: SentBytes
