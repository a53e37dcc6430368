"""Waits at exit until the threads of torch's gloo back end have freed what they hold.

Note [gloo's threads at exit]

A thread of ProcessGroupGloo drops a collective's tensors after it has told the caller that the collective is done. To
free a tensor that Python has seen, it takes the GIL. On a busy machine it may be so late that the interpreter is being
finalized by then: the thread is unwound by force, which aborts the process ("terminate called without an active
exception", pytorch/pytorch issue 190489). destroy_process_group() does not prevent that, because FSDP2 keeps the group
alive.

So the exit of the interpreter waits, with the GIL released, until each of these threads is idle. An idle thread sleeps.
A thread that waits for the GIL sleeps as well, but releasing the GIL wakes it, which its count of context switches
shows. So a thread is idle if it sleeps before and after the GIL was released, and its count is the same.
"""

import atexit
import os
import time

_NAME = "pt_gloo_runloop"  # the name that torch gives these threads
_PERIOD = 0.002
_GRACE = 1.0
"""Seconds after which the exit no longer waits. A thread that is still busy then has a collective that cannot end."""

_Activity = dict[str, tuple[str, str]]
"""By thread: its state ("S (sleeping)") and how often it went to sleep."""


def _activity() -> _Activity:
    threads: _Activity = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/status") as file:
                status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
        except OSError:  # it has ended
            continue
        if status["Name"] == _NAME:
            threads[thread] = status["State"], status["voluntary_ctxt_switches"]
    return threads


@atexit.register
def _wait() -> None:
    if not os.path.isdir("/proc/self/task"):
        return
    deadline = time.monotonic() + _GRACE
    before = _activity()
    while before and time.monotonic() < deadline:
        time.sleep(_PERIOD)  # releases the GIL
        now = _activity()
        if now == before and all(state.startswith("S") for state, _ in now.values()):
            return
        before = now
