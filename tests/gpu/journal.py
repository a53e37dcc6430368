"""pytest -p journal --journal FILE: what becomes of each test is in FILE when it is known, one line of JSON each.

A test on a device may take its process along, by a signal, or leave a context in which every later call fails. So a
process that has this plugin drops the tests that FILE has already, writes when a test begins and when it ends, and ends
itself where `pytest_why_dead` (conftest.py) has an answer after a test: the next process goes on with the next test.
tests/gpu_files.py begins these processes, and writes down those tests that began and did not end.

    {"collected": 33}                      tests that this process is to run
    {"began": "test_x.py::test_y"}
    {"ended": "test_x.py::test_y", "outcome": "passed", "seconds": 0.1, "text": ""}      failed, skipped: text says why
    {"dead": "CUDA error: ..."}            the process ends here
"""

import json
import os
import pathlib
from typing import Any

import pytest

DEAD = 70  # exit status
_LONGEST = 4000  # characters of a failure's text, whose end says what it was


class Hooks:
    """What the device's conftest.py implements."""

    @pytest.hookspec(firstresult=True)
    def pytest_why_dead(self) -> str | None:
        """Why no later test of this process can pass; None where nothing speaks against it. Asked after each test."""


class Journal:
    def __init__(self, file: pathlib.Path, config: pytest.Config) -> None:
        self._file, self._config = file, config
        text = file.read_text() if file.exists() else ""
        self._known = {line.get("began") for line in map(json.loads, text.splitlines())}
        self._reports: list[pytest.TestReport] = []

    def _write(self, **line: Any) -> None:
        with self._file.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        dropped = [item for item in items if item.nodeid in self._known]
        items[:] = [item for item in items if item.nodeid not in self._known]
        self._config.hook.pytest_deselected(items=dropped)
        self._write(collected=len(items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        self._write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Asks about the device before a failed test is torn down, which may hang where it is dead."""
        self._reports.append(report)
        outcomes = [each.outcome for each in self._reports]
        if report.failed or (report.when == "teardown" and "skipped" not in outcomes):
            why = self._config.hook.pytest_why_dead()
            if why is not None:
                self._end(report.nodeid, f"after this test the device is dead: {why}")
                self._write(dead=why)
                os._exit(DEAD)  # no teardown, nothing at exit

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._end(nodeid)

    def _end(self, nodeid: str, dead: str = "") -> None:
        outcomes = [report.outcome for report in self._reports]
        texts = [report.longreprtext for report in self._reports if report.failed]
        if dead:
            texts.append(dead)
            print(f"\n{nodeid}", *texts, sep="\n", flush=True)  # there will be no summary
        text, outcome = "\n".join(texts)[-_LONGEST:], "failed" if texts or "failed" in outcomes else "passed"
        if outcome == "passed" and "skipped" in outcomes:
            outcome, text = "skipped", _reason(self._reports[outcomes.index("skipped")])
        seconds = round(sum(report.duration for report in self._reports), 3)
        self._write(ended=nodeid, outcome=outcome, seconds=seconds, text=text)


def _reason(report: pytest.TestReport) -> str:
    """Of a skip."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return why.removeprefix("Skipped: ")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=pathlib.Path, required=True, help="the file of what became of each test")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Journal(config.getoption("--journal"), config), "the journal")
