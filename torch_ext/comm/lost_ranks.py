"""Finds out which ranks are lost when a process group fails. The message that names them is the same in every call.

Note [lost ranks]

A back end knows at most which connection broke. But the connection of a rank that gave up breaks like that of a rank
that died. So a rank whose collective fails does two things. It writes a record to the group's store: the call, and the
ranks whose messages are missing. Then it closes its connections, so that no rank waits for it until the timeout. A rank
with a record is alive. For a few seconds each failing rank reads the records of the ranks that it misses, and of the
ranks that these miss. A missed rank without a record is lost. The verdict is kept as long as the group, since a group
never works again after a failure.

The store usually ends with rank 0's process, which may finish its inquiry before other ranks. So rank 0 adds the lost
ranks to its record, and stays alive for a moment so that others can read it. If the store ends while a rank still
makes its inquiry, that rank takes its verdict from this record.

A rank that began to wait later than rank 0 may find that the store has ended already. Then the kind of its own error
decides. If a process dies, every rank's connections break at once, one after the other. So a broken connection means
that rank 0 has died just now, and the store with it. A timeout means that a rank is stopped or late. Rank 0, whose
process has ended, is neither: it had the same error earlier. So the missed ranks without rank 0 are lost. If a back end
does not say whose messages are missing, the message says that this rank cannot tell.

A store that is there but does not answer is in a process that is stopped. If this rank's connection to another rank
broke, that rank has given up because of rank 0. After a timeout this rank knows whose messages are missing; if rank 0's
is among them, that explains the others.
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
_CLOSING = (1 << 30) | ((1 << 30) - 2)  # a tag with which no message is ever sent

_BROKEN, _LATE = 2.0, 10.0
"""Seconds within which the records of living ranks are expected, but at most half the group's timeout. _BROKEN: after a
broken connection; a rank closes connections right after it has written its record. _LATE: after a timeout, which may
have started later on other ranks."""

_PERIOD = 0.02
_STAYS = 0.5
"""Seconds that rank 0 stays alive after its inquiry, but at most a quarter of the inquiry's time."""

ABANDONED: list[object] = []
"""Posted messages that are no longer waited for. gloo may still write to their memory, so it is never freed."""


class _FailureRecord(NamedTuple):
    """What a failing rank writes to the store."""

    label: str
    """The call in which it failed."""
    missing: tuple[int, ...]
    """Ranks in the group whose messages are missing."""
    lost: tuple[int, ...] | None = None
    """The lost ranks; only in rank 0's record, once its inquiry is over."""


class _Verdict(NamedTuple):
    """The outcome of an inquiry; ranks are global."""

    reason: str
    lost: tuple[int, ...]
    waiting: Mapping[int, str]
    """If no rank is lost: the calls in which the missed ranks failed."""
    store: str = ""
    """Why the other ranks' records could not be read: "has ended" or "does not answer"; "" if they could be."""

    def message(self, label: str) -> str:
        after = "this process group cannot be used any more."
        if self.store:
            after = f"the group's store, usually in rank 0's process, {self.store}, so no rank could be asked; {after}"
        if self.lost:
            several = len(self.lost) > 1
            return (
                f"{label}: {ranks_called(self.lost)} did not respond ({self.reason}). "
                f"{'They were lost, are' if several else 'The rank was lost, is'} more than the process group's "
                f"timeout behind, or {'wait for one of them that is, or run' if several else 'runs'} another program; "
                f"{after}"
            )
        if self.waiting:
            elsewhere = "; ".join(f"rank {rank} in {call!r}" for rank, call in sorted(self.waiting.items()))
            return (
                f"{label}: {ranks_called(self.waiting)} did not respond, or gave up waiting for it ({self.reason}): "
                f"no rank is lost, but they failed elsewhere ({elsewhere}). The ranks are more than the group's "
                "timeout apart, run different programs, or one of them raised an exception that the others did not; "
                f"{after}"
            )
        return f"{label}: a rank did not respond ({self.reason}); this rank cannot tell which one; {after}"


_verdicts: "weakref.WeakKeyDictionary[Any, _Verdict]" = weakref.WeakKeyDictionary()
_announced: "weakref.WeakSet[Any]" = weakref.WeakSet()  # groups with a record from `announce_error`
_lock = threading.RLock()


def ranks_called(ranks: Collection[int]) -> str:
    """Returns "rank 1" or "ranks 1, 3", each rank once."""
    each = sorted(set(ranks))
    return f"rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each))}"


def refuse(group: Any, label: str) -> None:
    """Raises RuntimeError if the group was destroyed or has failed before. group: None stands for the default group."""
    if group is None:
        group = dist.group.WORLD
    if group is None or not _exists(group):
        raise RuntimeError(
            f"{label}: its process group was destroyed (destroy_process_group), so the ranks cannot communicate any "
            "more. Call parallelize again, with a process group that exists"
        )
    refuse_failed(group, label)


def refuse_failed(group: Any, label: str) -> None:
    """Raises RuntimeError if the group has failed before. A destroyed group is accepted: gloo still sends
    point-to-point messages over it as long as the object exists."""
    verdict = _verdicts.get(group)
    if verdict is not None:
        raise RuntimeError(verdict.message(label))


def _exists(group: Any) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return not isinstance(group, dist.ProcessGroup)  # a test's stand-in is never destroyed
    return True


def translated_error(group: Any, label: str, error: BaseException, missing: Iterable[int] = ()) -> RuntimeError:
    """Returns the error to raise instead of a back end's error. The first call for a group makes the inquiry, which
    takes some seconds.

    missing: ranks in the group whose connection broke or that timed out; empty if unknown.
    """
    if group is None:
        group = dist.group.WORLD
    with _lock:
        verdict = _verdicts.get(group)
        if verdict is None:
            verdict = _verdicts[group] = _inquire(group, label, _reason(error), set(missing))
    return RuntimeError(verdict.message(label))


def announce_error(group: Any, label: str) -> None:
    """Writes a record because this rank is about to raise an error that other ranks do not have. If they wait for this
    rank until they fail, their message names the call. Valid until `withdraw_error`."""
    _Inquiry(group, _ranks_of(group)[0], _FailureRecord(label, ())).run(lambda: None, _BROKEN)
    _announced.add(group)


def withdraw_error(group: Any) -> None:
    """Deletes the record of `announce_error`, if there is one, because this rank continues."""
    if group in _announced:
        _announced.discard(group)
        key = _KEY.format(_ranks_of(group)[0])
        worker.ask(lambda: _delete(group, key)).join(_BROKEN)


def _delete(group: Any, key: str) -> None:
    with contextlib.suppress(Exception):  # the store is gone
        _store_of(group).delete_key(key)


def _reason(error: BaseException) -> str:
    """Returns the first line of a back end's error, without its source file and its general advice."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^\]]*\] ", "", first).split(". This is typically")[0] or type(error).__name__


def leave(known: "weakref.ref[Any]") -> None:
    """Ends all waits for other ranks with an error, without an inquiry, because this process exits.

    known: the group; a group that was freed has no waits."""
    if (group := known()) is None:
        return
    _verdicts.setdefault(group, _Verdict("this process ends", (), {}))
    rank, size, _ = _ranks_of(group)
    _close(group, rank, set(range(size)) - {rank})


def is_failure(error: BaseException) -> bool:
    """Whether a back end's error is about other ranks, not about an argument."""
    text = str(error)
    return isinstance(error, dist.DistError) or bool(re.search(r"gloo/|imed out|onnection|NCCL|abort", text))


def _inquire(group: Any, label: str, reason: str, missing: set[int]) -> _Verdict:
    """Makes the inquiry for a group that has just failed. missing: ranks in the group whose messages are missing; empty
    if unknown."""
    rank, size, global_ranks = _ranks_of(group)
    others = set(range(size)) - {rank}
    known = missing or _broken(group, rank, others)
    if known == others and not missing:
        known = set()  # after a timeout gloo has closed all connections, which says nothing
    # Global rank 0, whose process usually has the store.
    keeper = next((r for r in range(size) if global_ranks[r] == 0), rank)
    inquiry = _Inquiry(group, rank, _FailureRecord(label, tuple(sorted(known or others))), keeper)
    timed_out = "imed out" in reason
    seconds = min(_LATE if timed_out else _BROKEN, timeout_of(group, _HOST) / 2)
    inquiry.run(lambda: _close(group, rank, others), seconds)
    lost = inquiry.lost() if inquiry.answered else _lost_unasked(known, {keeper} & others, timed_out, inquiry)
    if rank == keeper and size > 2:
        inquiry.conclude(lost, min(_STAYS, seconds / 4))
    heard = {
        global_ranks[r]: record.label for r, record in inquiry.records.items() if r in inquiry.missed() and not lost
    }
    store = "" if inquiry.answered else "has ended" if inquiry.store_ended else "does not answer"
    return _Verdict(reason, tuple(sorted(global_ranks[r] for r in lost)), heard, store)


def _lost_unasked(known: set[int], keeper: set[int], timed_out: bool, inquiry: "_Inquiry") -> set[int]:
    """Returns the lost ranks if the store has not answered once; see Note [lost ranks]. known: the ranks whose messages
    are missing. keeper: the rank that usually has the store, unless that is this rank."""
    if not timed_out:
        return keeper or (set() if inquiry.store_ended else known)
    return (known - keeper if inquiry.store_ended else known & keeper) or known


def _ranks_of(group: Any) -> tuple[int, int, Sequence[int]]:
    """Returns this rank in the group, the group's size, and the global ranks of its members."""
    try:
        global_ranks = dist.get_process_group_ranks(group)
        return dist.get_rank(group), len(global_ranks), global_ranks
    except Exception:
        return -1, 0, range(1 << 16)


def has_broken(group: Any) -> bool:
    """Whether a connection of the group is broken, as far as its back end reveals that."""
    rank, size, _ = _ranks_of(group)
    return bool(_broken(group, rank, set(range(size)) - {rank}))


def _broken(group: Any, rank: int, others: Iterable[int]) -> set[int]:
    """Returns the ranks to which gloo has no connection any more; empty for other back ends, which do not reveal it."""
    return {peer for peer in others if _posted(group, peer) is None}


def _posted(group: Any, peer: int) -> Any:
    """Posts a receive of a message that is never sent and returns its work; None if the connection is broken; True for
    other back ends than gloo."""
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
    """Makes gloo close every connection, by a wait that times out. That also ends the waits of other ranks for this
    one."""
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
    """Writes this rank's record to the store and reads the records of missed ranks. Runs on a thread of its own,
    because a store whose process hangs never answers."""

    def __init__(self, group: Any, rank: int, record: _FailureRecord, keeper: int = -1) -> None:
        """keeper: the rank whose conclusion counts if the store ends."""
        self.records: dict[int, _FailureRecord] = {}
        self.answered = False
        """Whether the store has answered a question. (It may accept a record after its process has ended.)"""
        self.store_ended = False
        """Whether the store's process ended before the inquiry was over."""
        self._group, self._rank, self._record, self._keeper = group, rank, record, keeper
        self._written = threading.Event()

    def run(self, on_written: Callable[[], None], seconds: float) -> None:
        """Makes the inquiry. on_written: called once this rank's record can be read. seconds: for the whole inquiry."""
        deadline = time.monotonic() + seconds
        thread = worker.ask(lambda: self._run(deadline))
        self._written.wait(seconds)
        on_written()
        thread.join(max(0.0, deadline - time.monotonic()) + 10 * _PERIOD)

    def conclude(self, lost: set[int], seconds: float) -> None:
        """Adds the lost ranks to this rank's record, and waits so many seconds for other ranks to read it."""
        record, deadline = self._record._replace(lost=tuple(sorted(lost))), time.monotonic() + seconds
        worker.ask(lambda: self._write(record)).join(seconds)
        time.sleep(max(0.0, deadline - time.monotonic()))

    def _write(self, record: _FailureRecord) -> None:
        with contextlib.suppress(Exception):  # the store is gone
            _store_of(self._group).set(_KEY.format(self._rank), json.dumps(record))

    def _asks_keeper(self) -> bool:
        return self._keeper not in (-1, self._rank) and getattr(self.records.get(self._keeper), "lost", None) is None

    def missed(self) -> set[int]:
        """Returns the ranks that this rank misses and, transitively, those that a missed rank's record says it
        misses."""
        records = dict(self.records)
        missed, new = set[int](), set(self._record.missing)
        while new:
            missed |= new
            new = {other for r in new if r in records for other in records[r].missing} - missed
        return missed

    def unresponsive(self) -> set[int]:
        """Returns the missed ranks without a record."""
        return self.missed() - self.records.keys() - {self._rank}

    def lost(self) -> set[int]:
        """Returns the lost ranks, if the store has answered."""
        if not self.store_ended:
            return self.unresponsive()
        # Ranks without a record may be alive, so only the keeper's record counts.
        if self._keeper in self.records:
            return set(self.records[self._keeper].lost or ())
        return {self._keeper} - {self._rank}

    def _run(self, deadline: float) -> None:
        store = None
        try:
            store = _store_of(self._group)
            store.set(_KEY.format(self._rank), json.dumps(self._record))
            self._written.set()
            while True:
                for r in sorted(self.unresponsive() | ({self._keeper} if self._asks_keeper() else set())):
                    if store.check([_KEY.format(r)]):
                        self.records[r] = _FailureRecord(*json.loads(store.get(_KEY.format(r))))
                    self.answered = True
                self.answered = True
                if not self.unresponsive() or time.monotonic() > deadline:
                    return
                time.sleep(_PERIOD)
        except Exception:  # the store is gone with the rank that kept it
            self.store_ended = store is not None
            self._written.set()


def _store_of(group: Any) -> Any:
    # A private function: torch has no public way to a group's store, which all its ranks share under a prefix.
    return dist.distributed_c10d._get_process_group_store(group)
