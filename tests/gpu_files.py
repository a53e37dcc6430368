"""Runs test files side by side, for tests/gpu.sh: a test that crashes, hangs or kills the device fails alone.

python gpu_files.py --folder FOLDER --seconds 240 --silence 60 --processors 16 FILE... -- PYTHON -m pytest ...

Each file runs in a process of pytest with a journal (tests/gpu/journal.py), FOLDER/journals/NAME.jsonl. If that ends
before all tests have begun, another process continues with the remaining tests. This program adds to the journal:

    {"ended": "test_x.py::test_y", "outcome": "failed", ...}      the test began and did not end; text: the output's end
    {"process": -11, "seconds": 9.1, "tests": 12, "why": "..."}   for each process: its status; why it ended early
    {"left": 3, "why": "..."}                                     the number of tests that did not begin
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import device_processes
import gpu_report

_FEW = 4  # with fewer processors, files run one after the other
_FRUITLESS = 5  # consecutive processes without a test that passed, after which the rest of a file is skipped
_START = 2  # factor on the allowed silence while a process starts
_REPORT = 2.0  # seconds between reports of what is known so far
_LEAST = 5  # with fewer seconds left, no process is started
_TIME_IS_UP = "its time was up"
# Lines of faulthandler to drop: some forty calls of pytest, which would push out what a C library printed before.
_NOISE = re.compile(r'^  File ".*/(?:_pytest|pluggy|pytest)/.*\n|^Extension modules: .*\n', re.MULTILINE)


@dataclasses.dataclass
class Run:
    """Settings of all files."""

    command: list[str]
    folder: pathlib.Path
    silence: float  # seconds without a new line in the journal, after which a test counts as hanging
    environment: dict[str, str]
    ends: float  # time.monotonic()


class File:
    """One test file, its processes and their logs."""

    def __init__(self, run: Run, path: pathlib.Path) -> None:
        self.name = path.name
        self._run, self._path, self._processes = run, path, 0
        self._journal = run.folder / "journals" / f"{path.name}.jsonl"

    def logs(self) -> list[pathlib.Path]:
        return [self._log(i) for i in range(self._processes)]

    def tally(self) -> dict[str, Any]:
        return gpu_report.tally(self._journal)

    def run(self) -> None:
        """Runs all tests of the file, or as many as there is time for."""
        left, fruitless, why = 1, 0, ""
        while left and not why:
            if time.monotonic() + _LEAST > self._run.ends:
                why = "no time is left"
            elif fruitless == _FRUITLESS:
                why = f"not begun: no test passed in {_FRUITLESS} processes, one after the other"
            else:
                lines = self._one_process()
                began = sum("began" in line for line in lines)
                collected = [line["collected"] for line in lines if "collected" in line]
                if collected or self._processes == 1:  # none collected: the import failed
                    left = sum(collected) - began
                fruitless = 0 if any(line.get("outcome") == "passed" for line in lines) else fruitless + 1
                if not began and time.monotonic() < self._run.ends:
                    why = "not begun: the process before ended without beginning one"
        if left:
            self._write(left=left, why=why)

    def _log(self, process: int) -> pathlib.Path:
        return self._run.folder / "logs" / f"{self.name}.{process}.log"

    def _write(self, **line: Any) -> None:
        device_processes.add(self._journal, **line)

    def _one_process(self) -> list[dict[str, Any]]:
        """Runs one process; returns the lines that it added to the journal."""
        begin, known, log = time.monotonic(), len(device_processes.lines(self._journal)), self._log(self._processes)
        self._processes += 1
        with log.open("wb") as file, device_processes.started(self._command(), file, self._run.environment) as process:
            ended_by_us = self._watch(process)
        status = process.returncode if process.returncode is not None else -signal.SIGKILL
        lines = device_processes.lines(self._journal)[known:]
        self._note(lines, status, ended_by_us, time.monotonic() - begin, log)
        return lines

    def _command(self) -> list[str]:
        return [*self._run.command, "-p", "journal", "--journal", str(self._journal), str(self._path)]

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Waits until the process ends, or ends it. Returns why it was ended, else ""."""
        size, since, patience = self._size(), time.monotonic(), _START * self._run.silence
        while process.poll() is None:
            now = time.monotonic()
            if size != self._size():
                size, since, patience = self._size(), now, self._run.silence
            if now > self._run.ends:
                device_processes.abort(process)
                return _TIME_IS_UP
            if now - since > patience:
                device_processes.abort(process)
                return f"it hung: nothing came of it for {patience:g} s"
            time.sleep(0.05)
        return ""

    def _size(self) -> int:
        return self._journal.stat().st_size if self._journal.exists() else 0

    def _note(
        self, lines: list[dict[str, Any]], status: int, ended_by_us: str, seconds: float, log: pathlib.Path
    ) -> None:
        """Adds to the journal what the process could not write: a test that did not end, and how the process ended."""
        dead, ended, began = ([line[key] for line in lines if key in line] for key in ("dead", "ended", "began"))
        in_flight = [name for name in began if name not in ended]
        why = ended_by_us or device_processes.ending(status)
        if dead:
            why = f"after {began[-1]} the device is dead: {dead[0]}"
        elif status in (0, 1) and not in_flight and any("collected" in line for line in lines):
            why = ""
        elif in_flight:
            why = f"{in_flight[0]}: {why}"
            self._failed(in_flight[0], why, log)
        elif began:
            why = f"{self.name}, after its last test: {why}"
            self._failed(self.name, why, log)
        elif why != _TIME_IS_UP or self._processes == 1:
            why = f"{self.name}, before its tests: {why}"
            self._failed(self.name, why, log)
        self._write(process=status, seconds=round(seconds, 1), tests=len(began), why=why)

    def _failed(self, name: str, why: str, log: pathlib.Path) -> None:
        text = _NOISE.sub("", log.read_text(errors="replace"))[-device_processes.LONGEST :]
        self._write(ended=name, outcome="failed", seconds=0.0, text=f"{why}; the end of the output:\n{text}")


def tell(file: File) -> None:
    print(f"torch_ext: tests on the device: {file.name}", flush=True)
    for log in file.logs():
        print(log.read_text(errors="replace"), end="")
    found = file.tally()
    for process in found["processes"]:
        if process["why"]:
            print(f"torch_ext: {file.name}: {process['why']}")
    if not file.logs():
        print(f"torch_ext: skipped: {file.name}: no time is left")
    numbers = ", ".join(f"{found[key]} {key}" for key in ("passed", "failed", "skipped"))
    again = f", begun again {found['begun again']} times" if found["begun again"] else ""
    print(f"torch_ext: {file.name}: {numbers} in {found['seconds']} s{again}", flush=True)


def main(options: argparse.Namespace, command: list[str]) -> None:
    at_once = len(options.files) if options.processors >= _FEW else 1
    environment = dict(os.environ)
    if at_once > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, options.processors // at_once)))
    for name in ("journals", "logs"):
        (options.folder / name).mkdir(exist_ok=True)
    run = Run(command, options.folder, options.silence, environment, time.monotonic() + options.seconds)
    with device_processes.stopped_by_sigterm(), concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        try:
            running = {pool.submit(file.run): file for file in (File(run, path) for path in options.files)}
            while running:
                done, _ = concurrent.futures.wait(running, _REPORT, concurrent.futures.FIRST_COMPLETED)
                if options.json:  # so that what is known is kept, whoever ends this program
                    gpu_report.write(options.json, options.folder, gpu_report.counts(options.folder))
                for future in done:
                    future.result()
                    tell(running.pop(future))
        finally:
            run.ends = 0.0  # after an interrupt: ends the running processes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="for all files together")
    parser.add_argument("--silence", type=float, required=True, help="for one test")
    parser.add_argument("--processors", type=int, required=True)
    parser.add_argument("--json", type=pathlib.Path, help="where the report is written, again and again")
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    split = sys.argv.index("--")
    main(parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :])
