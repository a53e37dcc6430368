"""Measures the parts of a benchmark in another process, and goes on in a new one after a part that crashed, hung or
left the device unusable: only that part's figures are missing, and its text says why."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import device_processes

from bench import measuring_process
from bench.figures import Figure, Findings, Skip


@dataclass
class Progress:
    """What is known so far."""

    facts: dict[str, Any] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    failures: dict[str, str] = field(default_factory=dict)
    """Name of a part -> why figures of it are missing: the traceback, or the end of the process' output."""
    processes: int = 0


@dataclass(frozen=True)
class Patience:
    """For how many seconds a process may add nothing to its journal."""

    starting: float = 90.0
    """Until the device is found: on a new machine torch is read from a cold disk."""
    measuring: float = 60.0
    """During a part."""


class Restarts:
    """One measurement of all parts of a module (measuring_process.Measured)."""

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        changed: Callable[[Progress], None],
        patience: Patience = Patience(),  # noqa: B008 - it is frozen
    ) -> None:
        """changed: called whenever a part has ended, with what is known so far."""
        self.progress = Progress()
        self._module, self._settings, self._changed, self._patience = module, dict(settings), changed, patience
        self._left = list(measuring_process.measured_by(module).parts(settings))
        self._known = 0  # lines of the journal

    def run(self) -> Progress:
        with tempfile.TemporaryDirectory(prefix="torch_ext.") as folder, device_processes.stopped_by_sigterm():
            while self._left:
                left = len(self._left)
                why = self._one_process(pathlib.Path(folder))
                if len(self._left) == left:  # a next process would do no better
                    self._give_up(why)
        return self.progress

    def _one_process(self, folder: pathlib.Path) -> str:
        """Runs one process. Returns how it ended, and its output."""
        self.progress.processes += 1
        journal, log = folder / "journal", folder / f"{self.progress.processes}.log"
        command = [sys.executable, "-m", measuring_process.__name__, self._module]
        command += [str(journal), json.dumps(self._settings)]
        # python -m imports from the current folder first, where another torch_ext may be: so it runs in `folder`.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        environment = os.environ | {"PYTHONPATH": paths}
        with log.open("wb") as output, device_processes.started(command, output, environment, folder) as process:
            why = self._watch(process, journal, log)
        self._read(journal)
        text = f"{why}; the end of the output:\n{log.read_text(errors='replace')}"
        began = [line["began"] for line in device_processes.lines(journal) if "began" in line]
        if began and began[-1] in self._left:
            missing: dict[str, Any] = {"figures": [], "skips": [], "seconds": {}, "why": why, "text": text}
            device_processes.add(journal, ended=began[-1], **missing)
            print(f"{began[-1]}: {why}", flush=True)
            self._read(journal)
        return text

    def _watch(self, process: "subprocess.Popen[bytes]", journal: pathlib.Path, log: pathlib.Path) -> str:
        """Waits until the process ends, or ends it; prints what it prints. Returns how it ended."""
        since, patience, told = time.monotonic(), self._patience.starting, 0
        while True:
            ended = process.poll() is not None
            told = _echo(log, told)
            if self._read(journal):
                since, patience = time.monotonic(), self._patience.measuring
            if ended:
                return device_processes.ending(process.returncode)
            if time.monotonic() - since > patience:
                device_processes.abort(process)
                _echo(log, told)
                return f"it hung: nothing came of it for {patience:g} s"
            time.sleep(0.05)

    def _read(self, journal: pathlib.Path) -> bool:
        """Takes what is new in the journal. Returns whether anything is."""
        new = device_processes.lines(journal)[self._known :]
        self._known += len(new)
        for line in new:
            self.progress.facts = line.get("facts", self.progress.facts)
            if "ended" in line:
                self._take(line)
        return bool(new)

    def _take(self, line: Mapping[str, Any]) -> None:
        name, findings = line["ended"], self.progress.findings
        self._left.remove(name)
        findings.figures += [Figure.from_json(given) for given in line["figures"]]
        findings.skips += [Skip(**given) for given in line["skips"]]
        findings.times |= line["seconds"]
        if line["why"]:
            self._fail(name, line["why"], line["text"])
        self._changed(self.progress)

    def _fail(self, name: str, why: str, text: str) -> None:
        self.progress.failures[name] = (
            text if len(text) <= device_processes.LONGEST else f"{why} ... {text[-device_processes.LONGEST :]}"
        )
        self.progress.findings.skips.append(Skip(name, f"{name}: the rest of it", f"failed: {why}"))

    def _give_up(self, why: str) -> None:
        print(f"no part began: {why.partition(';')[0]}", flush=True)
        for name in self._left:
            self._fail(name, f"it did not begin: {why.partition(';')[0]}", why)
        self._left = []
        self._changed(self.progress)


def _echo(log: pathlib.Path, told: int) -> int:
    """Prints the log from a position on. Returns the position of its end."""
    with log.open("rb") as file:
        file.seek(told)
        new = file.read()
    if new:
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
    return told + len(new)
