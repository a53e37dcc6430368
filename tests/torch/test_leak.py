"""No call leaks memory, whether it succeeds or fails. Counted are the bytes of the C heap, and storages that are still
alive."""

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import operator_samples
import pytest
import torch
from operator_samples import FIRST_SAMPLES, overload
from torch.multiprocessing.reductions import StorageWeakRef

import torch_ext  # noqa: F401  registers the operators

CALLS = 500
# A leaked handle is a block of 32 bytes; allowed is a small fraction of one per call.
ALLOWED = CALLS * 4


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def heap_bytes() -> int:
    """Returns how many bytes the C heap has handed out (glibc >= 2.33, all arenas)."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def growth(work: Callable[[], None]) -> int:
    """Returns how many bytes stay allocated after CALLS calls. Measures up to three times until the growth is small,
    since other threads allocate too."""
    for _ in range(20):
        work()
    grown = 0
    for _ in range(3):
        gc.collect()
        before = heap_bytes()
        for _ in range(CALLS):
            work()
        gc.collect()
        grown = heap_bytes() - before
        if grown < ALLOWED:
            break
    return grown


def has_mallinfo2() -> bool:
    return hasattr(ctypes.CDLL(None), "mallinfo2")


needs_mallinfo2 = pytest.mark.skipif(not has_mallinfo2(), reason="this libc has no mallinfo2 to count the heap with")


def succeeding(operator: str, arguments: list[Any]) -> Callable[[], None]:
    function = overload(operator)
    return lambda: function(*arguments)


def failing(operator: str, arguments: list[Any]) -> Callable[[], None]:
    function = overload(operator)

    def work() -> None:
        try:
            function(*arguments)
        except RuntimeError:
            return
        raise AssertionError("a wrong call succeeded")

    return work


@needs_mallinfo2
@pytest.mark.parametrize("sample", operator_samples.SAMPLES, ids=lambda s: s.id)
def test_calls_that_succeed_leak_nothing(sample: operator_samples.Sample) -> None:
    assert growth(succeeding(sample.operator, sample.make())) < ALLOWED


def wrong_by_the_reader(arguments: list[Any]) -> None:
    """Makes the last tensor unreadable, so that the call fails after all other arguments were read."""
    for i in reversed(range(len(arguments))):
        if isinstance(arguments[i], torch.Tensor):
            arguments[i] = torch.zeros(3, 2).t()
            return
        if isinstance(arguments[i], list) and arguments[i]:
            arguments[i][-1] = torch.zeros(3, 2).t()
            return


def wrong_by_the_entry(arguments: list[Any]) -> None:
    """Gives the first tensor a dtype that the C entry rejects."""
    if isinstance(arguments[0], torch.Tensor):
        arguments[0] = torch.zeros(5, dtype=torch.bool)
    else:
        arguments[0][0] = torch.zeros(5, dtype=torch.bool)


@needs_mallinfo2
@pytest.mark.parametrize("spoil", [wrong_by_the_reader, wrong_by_the_entry], ids=["by_the_reader", "by_the_entry"])
@pytest.mark.parametrize("sample", FIRST_SAMPLES, ids=lambda s: s.operator)
def test_calls_that_fail_leak_nothing(sample: operator_samples.Sample, spoil: Callable[[list[Any]], None]) -> None:
    arguments = sample.make()
    spoil(arguments)
    assert growth(failing(sample.operator, arguments)) < ALLOWED


@needs_mallinfo2
@pytest.mark.parametrize("fails", [False, True], ids=["succeeding", "failing"])
def test_long_lists_leak_nothing(fails: bool) -> None:
    """More tensors than fit into the reader's own buffer."""
    mains, grads = [torch.zeros(1) for _ in range(300)], [torch.ones(1 + fails) for _ in range(300)]
    work = (failing if fails else succeeding)("bucket_accumulate_", [mains, grads])
    assert growth(work) < ALLOWED


@needs_mallinfo2
def test_a_missing_free_would_be_seen() -> None:
    """Checks the measurement: leaking one block of a handle's size per call is far above what is allowed."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    assert growth(lambda: malloc(16)) > 4 * ALLOWED


@pytest.mark.parametrize("fails", [False, True], ids=["succeeding", "failing"])
@pytest.mark.parametrize("sample", FIRST_SAMPLES, ids=lambda s: s.operator)
def test_storages_die_with_their_tensors(sample: operator_samples.Sample, fails: bool) -> None:
    arguments = sample.make()
    if fails:
        wrong_by_the_entry(arguments)
    counts = [t._use_count() for t in operator_samples.tensors(arguments)]
    for _ in range(3):
        (failing if fails else succeeding)(sample.operator, arguments)()
    assert [t._use_count() for t in operator_samples.tensors(arguments)] == counts
    living = [StorageWeakRef(t.untyped_storage()) for t in operator_samples.tensors(arguments)]
    del arguments
    gc.collect()
    assert all(storage.expired() for storage in living)
