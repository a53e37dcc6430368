"""The threads of `offload_fraction`: every batch once, slots of their own, and what happens when one fails."""

import threading
from ctypes import c_int64, c_void_p
from typing import Any

import pytest
import torch

from torch_ext import _library, _staging
from torch_ext._host_workers import Workers


class Recorder:
    """Notes what is done to batches, and that a slot has one of them at a time."""

    def __init__(self, threads: int = 1, fails: int = -1, skips: int = -1) -> None:
        """threads: that wait for each other in their first batch."""
        self.fails, self.skips = fails, skips
        self.all_here = threading.Barrier(max(threads, 1))
        self.operated: list[int] = []
        self.threads: dict[int, set[int]] = {}  # by slot
        self.inside: dict[int, int] = {}

    def bring(self, k: int, slot: int, free: Any) -> Any:
        assert slot not in self.inside, "the slot is in use"
        self.inside[slot] = k
        return None

    def operate(self, k: int, slot: int) -> bool:
        assert self.inside[slot] == k
        assert not torch.is_grad_enabled()
        if not any(threading.get_ident() in threads for threads in self.threads.values()):
            self.threads.setdefault(slot, set()).add(threading.get_ident())
            self.all_here.wait(20)
        self.threads.setdefault(slot, set()).add(threading.get_ident())
        if k == self.fails:
            raise RuntimeError(f"batch {k}")
        self.operated.append(k)
        return k == self.skips

    def send(self, k: int, slot: int) -> Any:
        del self.inside[slot]
        return None


def lanes(workers: int, slots: int) -> _staging.Lanes:
    return _staging.lanes_of(torch.device("cpu"))._replace(workers=workers, slots=slots)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("batches", [0, 1, 2, 40])
def test_every_batch_once(workers: int, slots: int, batches: int) -> None:
    recorder = Recorder(min(workers, batches))
    Workers(recorder, lanes(workers, slots)).run(range(batches))
    assert sorted(recorder.operated) == list(range(batches)) and not recorder.inside
    if batches == 40:
        assert all(len(threads) == 1 for threads in recorder.threads.values()), "a slot is one thread's"
        assert len(set().union(*recorder.threads.values())) == workers, "all of them had some"


def test_a_failure_is_raised_when_all_threads_ended() -> None:
    recorder = Recorder(3, fails=4)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="batch 4"):
        Workers(recorder, lanes(3, 2)).run(range(40))
    assert threading.active_count() == before and len(recorder.operated) < 40


def test_a_skipped_step_ends_early() -> None:
    workers = Workers(Recorder(skips=0), lanes(2, 1))
    workers.begin()
    workers.run(range(40))
    assert workers.skipped
    workers.begin()
    assert not workers.skipped


def test_copies_of_every_size_at_every_address() -> None:
    """tx_copy: what is asked for and not a byte beside it."""
    copy = _library.function("tx_copy", c_void_p, c_void_p, c_int64, restype=None)
    source = torch.randint(1, 256, (9000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for nbytes in [*range(0, 200), *range(1000, 1200), 4096, 5000, 8191]:
        for at, to in ((0, 0), (1, 3), (63, 64), (7, 200)):
            target = torch.zeros(9000, dtype=torch.uint8)
            copy(target.data_ptr() + to, source.data_ptr() + at, nbytes)
            assert torch.equal(target[to : to + nbytes], source[at : at + nbytes])
            assert not target[:to].any() and not target[to + nbytes :].any()


@pytest.mark.parametrize(
    ("total", "workers", "most", "batch", "why"),
    [
        (0, 2, 1 << 19, 1 << 16, "nothing to step"),
        (1000, 4, 1 << 19, 1 << 16, "not worth another thread"),
        (3 << 16, 2, 1 << 19, 3 << 15, "a batch for each thread, though one had room for all"),
        (1 << 20, 2, 1 << 19, 1 << 19, "exactly one each"),
        ((1 << 20) + 2, 2, 1 << 19, (1 << 18) + 1, "two each"),
        (10 << 20, 3, 1 << 19, -(-(10 << 20) // 21), "seven each"),
        (50_000, 2, 9000, 9000, "small batches on purpose"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else None,
)
def test_batches_are_equal_parts(total: int, workers: int, most: int, batch: int, why: str) -> None:
    assert lanes(workers, 1)._replace(numel=most).batch_of(total) == batch, why
