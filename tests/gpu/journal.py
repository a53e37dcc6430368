"""pytest -p journal --journal FILE: writes to FILE what happens to each test as soon as it is known, as lines of JSON.

A test on a device may kill its process, or leave a CUDA context in which every later call fails. So a process with this
plugin skips the tests that are in FILE already, writes when a test begins and when it ends, and exits if
`pytest_why_dead` (conftest.py) gives a reason after a test. The next process goes on with the next test.
tests/gpu_files.py starts these processes, and records the tests that began and did not end.

    {"collected": 33}                      how many tests this process is to run
    {"began": "test_x.py::test_y"}
    {"ended": "test_x.py::test_y", "outcome": "passed", "seconds": 0.1, "text": ""}      failed, skipped: text says why
    {"dead": "CUDA error: ..."}            why the process ends here
"""

import os
import pathlib
from typing import Any

import device_processes
import pytest


class Hooks:
    """The hook that conftest.py implements for its device."""

    @pytest.hookspec(firstresult=True)
    def pytest_why_dead(self) -> str | None:
        """Returns why no later test of this process can pass; None: they can. Called after each test."""


class Journal:
    """The plugin: writes the file, and ends the process when the device is dead."""

    def __init__(self, file: pathlib.Path, config: pytest.Config) -> None:
        self._file, self._config = file, config
        self._known = {line.get("began") for line in device_processes.lines(file)}
        self._reports: list[pytest.TestReport] = []

    def _write(self, **line: Any) -> None:
        device_processes.add(self._file, **line)

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
        """Asks about the device before a failed test's teardown, which may hang on a dead device."""
        self._reports.append(report)
        outcomes = [each.outcome for each in self._reports]
        if report.failed or (report.when == "teardown" and "skipped" not in outcomes):
            why = self._config.hook.pytest_why_dead()
            if why is not None:
                self._end(report.nodeid, f"after this test the device is dead: {why}")
                self._write(dead=why)
                os._exit(device_processes.DEAD)  # no teardown, nothing at exit

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._end(nodeid)

    def _end(self, nodeid: str, dead: str = "") -> None:
        outcomes = [report.outcome for report in self._reports]
        texts = [report.longreprtext for report in self._reports if report.failed]
        if dead:
            texts.append(dead)
            print(f"\n{nodeid}", *texts, sep="\n", flush=True)  # pytest's summary will not be printed
        text, outcome = (
            "\n".join(texts)[-device_processes.LONGEST :],
            "failed" if texts or "failed" in outcomes else "passed",
        )
        if outcome == "passed" and "skipped" in outcomes:
            outcome, text = "skipped", _reason(self._reports[outcomes.index("skipped")])
        seconds = round(sum(report.duration for report in self._reports), 3)
        self._write(ended=nodeid, outcome=outcome, seconds=seconds, text=text)


def _reason(report: pytest.TestReport) -> str:
    """Returns why a test was skipped."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return why.removeprefix("Skipped: ")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=pathlib.Path, required=True, help="the file of what became of each test")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    device_processes.end_with_parent()
    config.pluginmanager.register(Journal(config.getoption("--journal"), config), "the journal")
