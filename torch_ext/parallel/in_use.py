"""Which objects of a class there are, and whether anything but a stored traceback still refers to one.

An error that is stored holds every frame that it passed through, and with them whatever these had in their variables:
an optimizer that was deleted lives on there, although nobody can step it by mistake.
"""

import gc
import sys
import types
import weakref
from collections import Counter
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_SEARCHED = 300  # objects through which one is held; more are not searched


def instances(kind: type[T]) -> list[T]:
    """Note: searching the objects of the garbage collector

    Optimizers and DistributedDataParallel refer to parameters and to hooks' states, not the other way round. torch has
    no public hook for the construction of either, for a state_dict that is loaded into any optimizer, or by which a
    hook's state learns who calls it. So these are searched for, where otherwise weights and states, or the ranks, would
    disagree without an error: once in a call of parallelize, and in the first backward of a copied hook. A million
    objects take 0.3 to 0.4 s.
    """
    # type(): isinstance would call into lazy objects of other packages.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def in_use(target: "weakref.ref[Any]") -> bool:
    """False where the object is gone, or nothing holds it but frames that have ended, directly or through objects that
    only these hold; True where that cannot be known. Takes some tenths of a second.
    """
    members = [target()]
    if members[0] is None:
        return False
    running = _running_frames()
    dead: list[Any] = []
    known = {id(members), id(dead), id(members[0])}
    begin = 0
    while begin < len(members):
        newer = tuple(members[begin:])  # of a list, *newer would be a tuple that Python 3.13 finds among the referrers
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
    """Whether one of the members has references that are none of the others' and of the dead frames': variables of
    functions that run are not seen by the garbage collector, and neither is what C holds."""
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
    """Whether a generator or a coroutine goes on with it (Python 3.11 and newer show its own variables only)."""
    kinds = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
    return any(isinstance(one, kinds) for one in gc.get_referrers(frame))
