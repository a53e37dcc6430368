"""A process that ends by an uncaught exception while buckets are being sent must end as Python says: with its traceback
and status 1."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

PROGRAM = """
import datetime, sys, time
import torch.distributed as dist
from gradients import Given, noise, policy
import torch_ext

rank, world, store = int(sys.argv[1]), 2, sys.argv[2]
timeout = datetime.timedelta(seconds=20)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
shapes = [(1000,)] * 40
chosen = policy(bucket_size=1, overlap_grad_reduce=True)
model = torch_ext.parallelize(Given(shapes), chosen, strategy="no_shard")
for step in range(2):
    model(noise(step, rank, shapes)).backward()
    model.zero_grad()
for i, p in enumerate(model.parameters()):
    if rank == 1:  # which comes while rank 0 ends
        p.register_hook(lambda grad: time.sleep(0.03))
    if i == (36 if rank == 0 else 1):
        p.register_hook(lambda grad: 1 / 0)
model(noise(2, rank, shapes)).backward()
"""

# Runs at exit after everything that torch_ext has registered there; afterwards the interpreter is torn down.
THREADS_LEFT = """
import atexit, sys, threading
atexit.register(lambda: print(*(t.name for t in threading.enumerate() if "torch_ext" in t.name), file=sys.stderr))
"""
# Rank 0 is alive and has sent nothing when rank 1 ends.
LATE = PROGRAM.replace("1 / 0)", "time.sleep(100) if rank == 0 else 1 / 0)").replace("36 if", "39 if")
SHORT_GRACE = "from torch_ext.comm import worker; worker._GRACE = 1.0\n"
# The model's threads, which were told to end, are still running when the process ends, as on a busy machine.
MODEL_IS_GONE = (
    """
import threading, time
run = threading.Thread.run
def late(thread):
    run(thread)
    time.sleep(0.5 if "torch_ext" in thread.name else 0)
threading.Thread.run = late
"""
    + PROGRAM.partition("for i, p in")[0]
    + "del model, chosen\nimport gc; gc.collect()\ndist.destroy_process_group()\n"
)

# The model's threads have left threading.enumerate(), so the exit does not wait for them, and drop what they still
# reference while the interpreter begins to be torn down.
THREADS_ARE_ENDING = (
    """
import atexit, queue, threading
ending, torn_down, dropping = [], threading.Event(), queue.SimpleQueue()
delete = threading.Thread._delete
def late(thread):
    delete(thread)
    if "torch_ext" in thread.name:
        ending.append(thread.name)
        torn_down.wait()
        dropping.put(None)
threading.Thread._delete = late
def last():
    torn_down.set()
    for _ in ending:
        dropping.get(timeout=10.0)
atexit.register(last)
"""
    + PROGRAM.partition("for i, p in")[0]
    + """
del model, chosen
import gc; gc.collect()
dist.destroy_process_group()
while any("torch_ext" in thread.name for thread in threading.enumerate()) or not ending: time.sleep(0.01)
"""
)


@contextlib.contextmanager
def _started(program: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """Starts two ranks that run `program`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        store = str(pathlib.Path(folder) / "store")
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank), store],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            yield started
        finally:
            for process in started:
                process.kill()
                process.communicate()


def test_an_uncaught_exception_ends_a_process_in_order() -> None:
    with _started(PROGRAM) as started:
        messages = [process.communicate(timeout=60.0)[1] for process in started]
        assert [process.returncode for process in started] == [1, 1], messages
    assert all("ZeroDivisionError" in message.splitlines()[-1] for message in messages)


def test_no_thread_waits_for_others_when_the_interpreter_is_torn_down() -> None:
    """Such a thread would return from C++ during the teardown, for example because the other rank ended. It would then
    be unwound by force, which aborts the process."""
    with _started(THREADS_LEFT + SHORT_GRACE + LATE) as (_, second):
        message = second.communicate(timeout=60.0)[1]
        assert second.returncode == 1, message
    assert "ZeroDivisionError" in message.splitlines()[-2], message
    assert message.splitlines()[-1] == "", message


def test_threads_of_a_model_that_is_gone_are_waited_for() -> None:
    """The threads release the last message's memory. C++ releases the GIL for that and takes it again."""
    with _started(THREADS_LEFT + MODEL_IS_GONE) as started:
        messages = [process.communicate(timeout=60.0)[1] for process in started]
        assert [process.returncode for process in started] == [0, 0], messages
    assert messages == ["\n", "\n"]


def test_threads_that_are_ending_do_not_free_the_process_group() -> None:
    """C++ releases the GIL for that and takes it again, by which a thread is unwound by force during the teardown."""
    with _started(THREADS_ARE_ENDING) as started:
        messages = [process.communicate(timeout=60.0)[1] for process in started]
        assert [process.returncode for process in started] == [0, 0], messages


# A thread like those of torch's gloo back end, as the exit sees them: it has that name and is still in C code.
GLOO_THREAD = """
import ctypes, os, sys, threading, zlib
from torch import nn
import torch_ext
torch_ext.AdamW(nn.Linear(1, 1).parameters())
started = threading.Event()
data = bytes(300_000_000)
def run():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
    started.set()
    zlib.crc32(data)
    os.write(2, b"freed")
threading.Thread(target=run, daemon=True).start()
started.wait()
"""
# The thread is ready before the exit begins, but this thread does not let it have the GIL.
WAITS_FOR_THE_GIL = GLOO_THREAD + "sys.setswitchinterval(1e6)\nfor _ in range(3): sum(range(20_000_000))\n"


@pytest.mark.parametrize(
    "program",
    [pytest.param(GLOO_THREAD, id="is running"), pytest.param(WAITS_FOR_THE_GIL, id="waits for the GIL")],
)
def test_gloos_threads_free_their_tensors_before_the_teardown(program: str) -> None:
    """Later they would be unwound by force, which aborts the process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "freed")
