"""Only one call at a time may write to an optimizer: a second one raises, instead of mixing states without an error.

Note [one write at a time]

step() releases the GIL while C writes, and a signal handler may run between two lines of it. Without a check, a step in
another thread would step some elements twice and others once, and a load or an offload would exchange the tensors that
are being stepped. So a call that writes makes a note of itself, and a call that finds a note raises.

There is no lock, since a step of small tensors takes little more time than locks do, and an interrupt (Ctrl-C) must not
leave one locked. It suffices that between looking for a note and making one there is no call: only calls and backward
jumps let another thread, or a signal handler, run.
"""

import threading
from collections.abc import Callable
from functools import partial, wraps
from threading import get_ident
from typing import Any, Protocol, TypeAlias, TypeVar, cast

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., Any])

STEP, _ADD, _LOAD = "step()", "add_param_group()", "load_state_dict()"


_Note: TypeAlias = tuple[str, int]
"""What a call is called in messages, and its thread's threading.get_ident(). No class: a tuple takes less time."""


class WritingCalls:
    """The call that is writing to an optimizer, if there is one; see Note [one write at a time]."""

    def __init__(self) -> None:
        self._notes: dict[None, _Note] = {}  # at most one

    def run(self, doing: str, call: Callable[..., _T], *args: Any) -> _T:
        """Runs a call that writes. doing: its name, for messages. Raises RuntimeError, before it runs, during a call
        that writes in another thread, and for a signal handler's call in the middle of step()."""
        note, notes = (doing, get_ident()), self._notes
        while notes:
            if self.refuse(doing):
                return call(*args)  # a hook of a call of this thread, which has the note
        try:
            notes[None] = note
            return call(*args)
        finally:
            del notes[None]

    def refuse(self, doing: str) -> bool:
        """Raises RuntimeError if `run` would. Returns whether a call of this thread is writing, which may call others;
        False also if the call of another thread has ended by now."""
        for running, thread in list(self._notes.values()):
            if thread != get_ident():
                raise RuntimeError(
                    f"{doing} while {running} runs in thread {_name_of(thread)!r}: two calls that write to an "
                    "optimizer at the same time would mix its states. Wait until the other call has returned"
                )
            if running == STEP:
                raise RuntimeError(
                    f"{doing} within {STEP}, by a signal handler, perhaps: let the handler note its request, and call "
                    f"{doing} after the step"
                )
            return True
        return False

    def refuse_reading(self, doing: str) -> None:
        """Raises RuntimeError during a call in which groups or states are not complete."""
        running, thread = self._notes.get(None, ("", 0))
        if running == _ADD or (running == _LOAD and thread != get_ident()):
            raise RuntimeError(
                f"{doing} while {running} runs in thread {_name_of(thread)!r}, whose groups or states are not complete "
                "before it has returned: wait until then"
            )

    def steps_here(self) -> bool:
        """Whether this is called within the optimizer's step() in the same thread, as by a signal handler."""
        return self._notes.get(None) == (STEP, get_ident())


class Writing(Protocol):
    """An optimizer, or what writes to one, with the optimizer's notes."""

    writing_calls: WritingCalls


def writes(doing: str) -> Callable[[_Method], _Method]:
    """Decorator of a method that writes to the optimizer. doing: the call's name, for messages."""

    def decorated(method: _Method) -> _Method:
        @wraps(method)
        def alone(self: Writing, *args: Any, **options: Any) -> Any:
            return self.writing_calls.run(doing, partial(method, self, *args, **options))

        return cast(_Method, alone)

    return decorated


def _name_of(ident: int) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), str(ident))
