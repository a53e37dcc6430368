"""Runs Python code in another process, for tests of what ends or poisons its process."""

import contextlib
import os
import signal
import subprocess
import sys

from device_processes import abort

# Less than tests/gpu_files.py waits for a test: then the test itself reports the hang, with the process' output.
SECONDS = 50.0


def run(code: str, *arguments: object, seconds: float = SECONDS, **environment: str) -> tuple[int, str]:
    """Returns the exit status and the output. A process that takes longer than `seconds` is aborted: its status is that
    of the signal, and the output ends with where each of its threads was."""
    command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
    )
    try:
        text, _ = process.communicate(timeout=seconds)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        abort(process)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        text, _ = process.communicate(timeout=3)
        return process.returncode, f"{text}\nit was ended after {seconds:g} s"
    return -signal.SIGKILL, f"it could not be ended after {seconds:g} s; its output is lost"
