"""Finds all objects of a class, and whether anything but a stored traceback still refers to one.

A stored exception keeps every frame that it passed through, with the frames' variables. An optimizer that was deleted
may live on in such a frame, although no code can step it any more.
"""

import gc
import sys
import types
import weakref
from collections import Counter
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_SEARCHED = 300  # objects on the way to the one that is asked about; more are not searched


def instances(kind: type[T]) -> list[T]:
    """Returns all existing objects of this class.

    Note: searching the objects of the garbage collector

    Optimizers refer to parameters, and DistributedDataParallel to hooks' states, not the other way round. torch has no
    public hook for their construction or for load_state_dict of any optimizer, and does not tell a hook's state which
    DDP calls it. Without a search, weights and optimizer state, or the ranks, would disagree without an error. So the
    garbage collector's objects are searched: once per call of parallelize, and in the first backward of a copied hook.
    A million objects take 0.3 to 0.4 s.
    """
    # type(): isinstance would run code of other packages' lazy objects.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def in_use(target: "weakref.ref[Any]") -> bool:
    """Whether running code may still reach the object; True if that is not certain. False if it is deleted, or if only
    frames that have ended refer to it, directly or through objects to which nothing else refers. Takes some tenths of a
    second.
    """
    members = [target()]
    if members[0] is None:
        return False
    running = _running_frames()
    dead: list[Any] = []
    known = {id(members), id(dead), id(members[0])}
    begin = 0
    while begin < len(members):
        newer = tuple(members[begin:])  # a tuple: `*list` would make one, which Python 3.13 finds as a referrer
        begin = len(members)
        known.add(id(newer))
        found = gc.get_referrers(*newer)
        known.add(id(found))
        for one in found:
            if id(one) in known:
                continue
            known.add(id(one))
            if isinstance(one, types.FrameType):
                if id(one) in running or _is_suspended(one):
                    return True
                dead.append(one)
            elif isinstance(one, types.ModuleType) or len(members) > _MAX_SEARCHED:
                return True
            else:
                members.append(one)
        del found, newer
    one = None
    return _held_from_outside(members, dead)


def _held_from_outside(members: list[Any], dead: list[Any]) -> bool:
    """Whether a member has references besides those from other members and from dead frames. The garbage collector does
    not see variables of running functions and references from C: reference counts reveal them."""
    probe = object()
    members.append(probe)
    del probe
    places = {id(one): i for i, one in enumerate(members)}
    inside: Counter[int] = Counter()
    for holders in (members[:-1], dead):
        for holder in holders:
            for held in gc.get_referents(holder):
                if id(held) in places:
                    inside[places[id(held)]] += 1
        del holders
    holder = held = None
    counts = [sys.getrefcount(members[i]) - inside[i] for i in range(len(members))]
    return any(count > counts[-1] for count in counts)


def _running_frames() -> set[int]:
    found = set()
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            found.add(id(frame))
            frame = frame.f_back
    return found


def _is_suspended(frame: types.FrameType) -> bool:
    """Whether the frame is that of a suspended generator or coroutine, which may run again. (From Python 3.11 on
    the garbage collector shows the variables of such a frame as the generator's own.)"""
    kinds = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
    return any(isinstance(one, kinds) for one in gc.get_referrers(frame))
