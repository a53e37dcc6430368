"""Out of memory in libtorch_ext.so while a torch operator runs. Each of an operator's allocations is made to fail once:
the call must say so, change nothing, and release everything that it was handed."""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import c_api
import gpu_stand_in
import operator_samples as samples
import pytest
from operator_samples import BF16, F32, I16, Sample, overload
from torch.multiprocessing.reductions import StorageWeakRef

import torch_ext

# A malloc for the whole process. It counts allocations that come from between two addresses and fails the one that is
# `allowed` allocations away. It must be thread-safe: several threads of torch's pool may run library code.
PRELOADED = """
#include <stddef.h>
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
static const char *first, *last;
static long allowed = -1;
void refuse_memory(const char *begin, const char *end, long n) { first = begin; last = end; allowed = n; }
long refuse_memory_left(void) { return __atomic_load_n(&allowed, __ATOMIC_SEQ_CST); }
static int refuses(const char *caller) {
  if (allowed < 0 || caller < first || caller >= last) return 0;
  return __atomic_fetch_sub(&allowed, 1, __ATOMIC_SEQ_CST) == 0;
}
#define REFUSES refuses(__builtin_return_address(0))
void *malloc(size_t bytes) { return REFUSES ? NULL : __libc_malloc(bytes); }
void *calloc(size_t n, size_t bytes) { return REFUSES ? NULL : __libc_calloc(n, bytes); }
void *realloc(void *memory, size_t bytes) { return REFUSES ? NULL : __libc_realloc(memory, bytes); }
"""

MANY = [3] * 100  # sizes of more parameters than fit into the library's tables on the stack


def repeated(make: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """Returns `make` with every list at least as long as MANY."""

    def longer() -> list[Any]:
        arguments = [make() for _ in MANY]
        return [sum(each, []) if isinstance(each[0], list) else each[0] for each in zip(*arguments, strict=True)]

    return longer


CALLS = [
    *samples.SAMPLES,
    Sample("adamw_", "many", lambda: samples.adamw(MANY, BF16, master=I16, extras=True)),
    Sample("adamw_flat_", "many", lambda: samples.adamw_flat(1, numels=MANY, param=BF16, master=F32)),
    Sample("grad_stats_", "many", lambda: samples.grad_stats(MANY * 3)),
    Sample("bucket_pack_", "many", lambda: samples.bucket_pack(numels=MANY * 3)),
    Sample("bucket_accumulate_", "many", repeated(samples.bucket_accumulate)),
    Sample("cast_", "many", repeated(samples.cast)),
    Sample("master_encode_", "many", repeated(samples.master_encode)),
    Sample("master_decode_", "many", repeated(samples.master_decode)),
    Sample("master_resync_", "many", repeated(lambda: samples.master_resync(changed=False))),
]

# Operators that never allocate.
NEVER_ALLOCATES = {"grad_norm_", "muon_mirror_"}


def addresses() -> tuple[int, int]:
    """Returns the address range of the library's code and data."""
    path = os.path.realpath(torch_ext.library_path())
    lines = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    ranges = [line[0].split("-") for line in lines]
    return min(int(begin, 16) for begin, _ in ranges), max(int(end, 16) for _, end in ranges)


def problem(sample: Sample, error: RuntimeError | None, arguments: list[Any], before: list[bytes]) -> str:
    """Returns what is wrong with a call whose allocation failed; empty if nothing is."""
    if error is None or "no memory" not in str(error) or f"torch_ext::{sample.operator}:" not in str(error):
        return f"{sample.id}: {error}"
    return "" if samples.bits(arguments) == before else f"{sample.id} changed something: {error}"


def refused(sample: Sample) -> Iterator[tuple[str, str]]:
    """Fails each allocation of the call in turn. Yields, for each, what is wrong (empty if nothing is) and the error's
    text."""
    process = ctypes.CDLL(None)
    begin, end = map(ctypes.c_void_p, addresses())
    for failing in range(20):
        arguments, error = sample.make(), None
        before, kept = (
            samples.bits(arguments),
            [StorageWeakRef(t.untyped_storage()) for t in samples.tensors(arguments)],
        )
        process.refuse_memory(begin, end, failing)
        try:
            overload(sample.operator)(*arguments)
        except RuntimeError as raised:
            error = RuntimeError(str(raised).splitlines()[0])
        left = process.refuse_memory_left()
        process.refuse_memory(None, None, -1)
        if left >= 0:
            if error is not None:
                yield f"{sample.id}: {error}", ""
            return
        yield problem(sample, error, arguments, before), str(error)
        del arguments
        if not all(storage.expired() for storage in kept):
            yield f"{sample.id} kept some of its tensors: {error}", ""
    yield f"{sample.id} asks for memory again and again", ""


def sweep() -> None:
    """Prints as JSON everything that is wrong, and the error texts of each sample."""
    found = {sample.id: list(refused(sample)) for sample in CALLS}
    wrong = [text for rows in found.values() for text, _ in rows if text]
    print(json.dumps([wrong, {key: [said for _, said in rows if said] for key, rows in found.items()}]))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what `sweep` prints in a process that has the failing malloc."""
    library = gpu_stand_in.compile_library(tmp_path_factory.mktemp("malloc"), "refuse_memory.so", PRELOADED, "-O1")
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "import test_out_of_memory as test; test.sweep()"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_call_that_gets_no_memory_says_so_and_has_changed_nothing(swept: Any) -> None:
    wrong, _ = swept
    assert not wrong, "\n".join(wrong)


def test_every_operator_was_refused_memory_wherever_it_asks(swept: Any) -> None:
    _, said = swept
    asked = {key.split("-")[0] for key, each in said.items() if each}
    assert set(c_api.operators()) - asked == NEVER_ALLOCATES
    messages = [message for each in said.values() for message in each]
    for room in ("to read 1200 tensors", "for the states of 100 params", "to check 1200 tensors"):
        assert any(f"no memory {room}" in message for message in messages), messages
