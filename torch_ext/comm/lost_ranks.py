"""Which ranks are lost when a process group fails, and the message that names them: the same in every call.

Note [lost ranks]

A back end knows at most whose connection broke, and the connection of a rank that gave up breaks like that of one that
died. So a rank in which a collective fails first writes a record into the group's store (the call, and the ranks that
it misses), then closes its connections, so that nobody waits for it until the timeout. Ranks with a record are alive.
Each failing rank reads the records of those it misses, and of those that they miss, for a few seconds; missed ranks
without a record are lost. The verdict is kept as long as the group: none works again after a failure.

The store mostly ends with rank 0's process, which may have heard all it wants before others have. So that rank adds to
its record whom it found lost, and stays a moment for the others to read it; where the store ends, that is the verdict.
"""

import contextlib
import datetime
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_ext.comm import worker
from torch_ext.comm.process_group import backend, timeout_of

_HOST = torch.device("cpu")
_KEY = "torch_ext/failed/{}"
_CLOSING = (1 << 30) | ((1 << 30) - 2)  # a tag of ours with which nothing is sent

_BROKEN, _LATE = 2.0, 10.0
"""Seconds, at most half the group's timeout, in which records of living ranks are expected: after a broken connection,
which follows the record at once; after a timeout, which may have begun later on other ranks."""

_PERIOD = 0.02
_STAYS = 0.5
"""Seconds, at most a quarter of the inquiry's, that rank 0 stays after it."""

ABANDONED: list[object] = []
"""Posted messages for which nobody waits: gloo may still write into their memory, so it is never freed."""


class _FailureRecord(NamedTuple):
    """Written by a rank that failed."""

    label: str
    """The call in which it failed."""
    missing: tuple[int, ...]
    """Whose messages are missing: ranks in the group."""
    lost: tuple[int, ...] | None = None
    """Of rank 0, when its inquiry was over."""


class _Verdict(NamedTuple):
    """The outcome of an inquiry; ranks are global."""

    reason: str
    lost: tuple[int, ...]
    waiting: Mapping[int, str]
    """Where no rank is lost: the calls in which the living ones failed."""

    def message(self, label: str) -> str:
        after = "this process group cannot be used any more."
        if self.lost:
            which = "They were lost, are" if len(self.lost) > 1 else "The rank was lost, is"
            return (
                f"{label}: {ranks_called(self.lost)} did not respond ({self.reason}). {which} more than the process "
                f"group's timeout behind, or {'run' if len(self.lost) > 1 else 'runs'} another program; {after}"
            )
        if self.waiting:
            elsewhere = "; ".join(f"rank {rank} in {call!r}" for rank, call in sorted(self.waiting.items()))
            return (
                f"{label}: {ranks_called(self.waiting)} did not respond, or gave up waiting for it ({self.reason}): "
                f"no rank is lost, but they failed elsewhere ({elsewhere}). The ranks are more than the group's "
                f"timeout apart, run different programs, or parted in an exception; {after}"
            )
        return f"{label}: a rank did not respond ({self.reason}); which one, cannot be told here; {after}"


_verdicts: "weakref.WeakKeyDictionary[Any, _Verdict]" = weakref.WeakKeyDictionary()
_announced: "weakref.WeakSet[Any]" = weakref.WeakSet()  # groups with a record of `announce_error`
_lock = threading.RLock()


def ranks_called(ranks: Collection[int]) -> str:
    """ "rank 1", "ranks 1, 3"; each once."""
    each = sorted(set(ranks))
    return f"rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each))}"


def refuse(group: Any, label: str) -> None:
    """RuntimeError where the group was destroyed or has failed before. group: None: the default one."""
    if group is None:
        group = dist.group.WORLD
    if group is None or not _is_there(group):
        raise RuntimeError(
            f"{label}: its process group was destroyed (destroy_process_group), so the ranks cannot speak with each "
            "other any more. What was parallelized over it needs parallelize again, over a group that is there"
        )
    refuse_failed(group, label)


def refuse_failed(group: Any, label: str) -> None:
    """RuntimeError where the group has failed before. (A destroyed group of gloo still carries messages from rank to
    rank for whoever holds it.)"""
    verdict = _verdicts.get(group)
    if verdict is not None:
        raise RuntimeError(verdict.message(label))


def _is_there(group: Any) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return not isinstance(group, dist.ProcessGroup)  # a test's stand-in is never destroyed
    return True


def failed(group: Any, label: str, error: BaseException, missing: Iterable[int] = ()) -> RuntimeError:
    """What to raise in place of a back end's error. The first call for a group takes some seconds, for the inquiry.

    missing: ranks in the group whose connection broke or that timed out; none: not known.
    """
    if group is None:
        group = dist.group.WORLD
    with _lock:
        verdict = _verdicts.get(group)
        if verdict is None:
            verdict = _verdicts[group] = _find_out(group, label, _reason(error), set(missing))
    return RuntimeError(verdict.message(label))


def announce_error(group: Any, label: str) -> None:
    """This rank is about to raise an error alone: ranks that wait for it will name the call. Until `withdraw_error`."""
    _Inquiry(group, _ranks_of(group)[0], _FailureRecord(label, ())).run(lambda: None, _BROKEN)
    _announced.add(group)


def withdraw_error(group: Any) -> None:
    """Deletes the record of `announce_error`, if there is one: this rank goes on."""
    if group in _announced:
        _announced.discard(group)
        key = _KEY.format(_ranks_of(group)[0])
        worker.ask(lambda: _delete(group, key)).join(_BROKEN)


def _delete(group: Any, key: str) -> None:
    with contextlib.suppress(Exception):  # the store is gone
        _store_of(group).delete_key(key)


def _reason(error: BaseException) -> str:
    """The first line of a back end's error, without its source file and its general advice."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^\]]*\] ", "", first).split(". This is typically")[0] or type(error).__name__


def leave(group: Any) -> None:
    """This process ends: whatever waits for other ranks ends by an error, and asks nobody why."""
    _verdicts.setdefault(group, _Verdict("this process ends", (), {}))
    rank, size, _ = _ranks_of(group)
    _close(group, rank, set(range(size)) - {rank})


def is_failure(error: BaseException) -> bool:
    """Whether a back end's error is about other ranks, rather than about an argument."""
    text = str(error)
    return isinstance(error, dist.DistError) or bool(re.search(r"gloo/|imed out|onnection|NCCL|abort", text))


def _find_out(group: Any, label: str, reason: str, missing: set[int]) -> _Verdict:
    rank, size, of_job = _ranks_of(group)
    others = set(range(size)) - {rank}
    known = missing or _broken(group, rank, others)
    if known == others and not missing:
        known = set()  # a timeout: gloo has closed all of them
    keeper = next((r for r in range(size) if of_job[r] == 0), rank)  # in whose process the store is, as a rule
    inquiry = _Inquiry(group, rank, _FailureRecord(label, tuple(sorted(known or others))), keeper)
    seconds = min(_LATE if "imed out" in reason else _BROKEN, timeout_of(group, _HOST) / 2)
    inquiry.run(lambda: _close(group, rank, others), seconds)
    lost = inquiry.unresponsive()
    if inquiry.store_ended:  # of the others without a record nothing is known
        lost = set(inquiry.records[keeper].lost or ()) if keeper in inquiry.records else {keeper} & others
    elif not inquiry.answered:
        lost = known
        if 0 in (of_job[r] for r in lost):  # whose process keeps the store, as a rule
            lost = {r for r in lost if of_job[r] == 0}
    if rank == keeper and size > 2:
        inquiry.conclude(lost, min(_STAYS, seconds / 4))
    heard = {of_job[r]: record.label for r, record in inquiry.records.items() if r in inquiry.missed() and not lost}
    return _Verdict(reason, tuple(sorted(of_job[r] for r in lost)), heard)


def _ranks_of(group: Any) -> tuple[int, int, Sequence[int]]:
    """This rank in the group, the group's size, and the global ranks of its members."""
    try:
        of_job = dist.get_process_group_ranks(group)
        return dist.get_rank(group), len(of_job), of_job
    except Exception:
        return -1, 0, range(1 << 16)


def has_broken(group: Any) -> bool:
    """Whether a connection of the group broke, as far as its back end tells."""
    rank, size, _ = _ranks_of(group)
    return bool(_broken(group, rank, set(range(size)) - {rank}))


def _broken(group: Any, rank: int, others: Iterable[int]) -> set[int]:
    """Ranks to which gloo has no connection any more; no other back end can be asked."""
    return {peer for peer in others if _posted(group, peer) is None}


def _posted(group: Any, peer: int) -> Any:
    """Posts a receive of what is never sent; None where the connection is broken."""
    try:
        if backend(group, _HOST) != "gloo":
            return True
        message = torch.empty(1, dtype=torch.uint8, device="cpu")
        work = group.recv([message], peer, _CLOSING)
        ABANDONED.append((message, work))
        return work
    except Exception:
        return None


def _close(group: Any, rank: int, others: Iterable[int]) -> None:
    """Makes gloo close every connection, also those on which others wait for this rank, by a wait that times out."""
    for peer in others:
        work = _posted(group, peer)
        if work is True:
            return
        if work is not None:
            try:
                work.wait(datetime.timedelta(milliseconds=1))
            except RuntimeError:
                return


class _Inquiry:
    """Writes this rank's record into the store and reads those of missed ranks, on a thread of its own: a store whose
    process hangs never answers."""

    def __init__(self, group: Any, rank: int, record: _FailureRecord, keeper: int = -1) -> None:
        """keeper: the rank whose conclusion counts where the store ends."""
        self.records: dict[int, _FailureRecord] = {}
        self.answered = False
        """Whether the store answered."""
        self.store_ended = False
        """Whether it did no longer, before the inquiry was over."""
        self._group, self._rank, self._record, self._keeper = group, rank, record, keeper
        self._written = threading.Event()

    def run(self, on_written: Callable[[], None], seconds: float) -> None:
        """on_written: called as soon as this rank's record can be read. seconds: for the whole inquiry."""
        deadline = time.monotonic() + seconds
        thread = worker.ask(lambda: self._run(deadline))
        self._written.wait(seconds)
        on_written()
        thread.join(max(0.0, deadline - time.monotonic()) + 10 * _PERIOD)

    def conclude(self, lost: set[int], seconds: float) -> None:
        """Adds to this rank's record, and stays so many seconds."""
        record, deadline = self._record._replace(lost=tuple(sorted(lost))), time.monotonic() + seconds
        worker.ask(lambda: self._write(record)).join(seconds)
        time.sleep(max(0.0, deadline - time.monotonic()))

    def _write(self, record: _FailureRecord) -> None:
        with contextlib.suppress(Exception):  # the store is gone
            _store_of(self._group).set(_KEY.format(self._rank), json.dumps(record))

    def _asks_keeper(self) -> bool:
        return self._keeper not in (-1, self._rank) and getattr(self.records.get(self._keeper), "lost", None) is None

    def missed(self) -> set[int]:
        """By this rank, or by one that it misses and whose record was read."""
        records = dict(self.records)
        missed, new = set[int](), set(self._record.missing)
        while new:
            missed |= new
            new = {other for r in new if r in records for other in records[r].missing} - missed
        return missed

    def unresponsive(self) -> set[int]:
        """Missed ranks without a record."""
        return self.missed() - self.records.keys() - {self._rank}

    def _run(self, deadline: float) -> None:
        try:
            store = _store_of(self._group)
            store.set(_KEY.format(self._rank), json.dumps(self._record))
            self._written.set()
            while True:
                for r in sorted(self.unresponsive() | ({self._keeper} if self._asks_keeper() else set())):
                    if store.check([_KEY.format(r)]):
                        self.records[r] = _FailureRecord(*json.loads(store.get(_KEY.format(r))))
                self.answered = True
                if not self.unresponsive() or time.monotonic() > deadline:
                    return
                time.sleep(_PERIOD)
        except Exception:  # the store is gone with the rank that kept it
            self.store_ended = self.answered or self._written.is_set()
            self._written.set()


def _store_of(group: Any) -> Any:
    # Private: torch has no public store that all ranks of a group share, with a prefix of its own.
    return dist.distributed_c10d._get_process_group_store(group)
