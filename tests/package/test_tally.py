"""Tests tests/tally.py, which prints the last line of tests/run.sh: every case is counted once, and nothing that went
wrong is ignored."""

import json
import pathlib
from typing import Any

import pytest
import tally

PYTEST_REPORT = """<testsuites><testsuite>
<testcase classname="tests.torch.test_a" name="good"/>
<testcase classname="tests.torch.test_a" name="bad"><failure message="1 != 2&#10;more"/></testcase>
<testcase classname="tests.torch.test_a" name="broken"><error message="no fixture"/></testcase>
<testcase classname="tests.torch.test_a" name="absent"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""

GTEST_REPORT = """<testsuites><testsuite name="S">
<testcase name="Good" status="run" result="completed" classname="S"/>
<testcase name="Bad" status="run" result="completed" classname="S"><failure message="no"/></testcase>
<testcase name="Absent" status="run" result="skipped" classname="S"><skipped message="later"/></testcase>
<testcase name="DISABLED_Off" status="notrun" result="suppressed" classname="S"/>
</testsuite></testsuites>"""

GOOD_REPORT = '<testsuite><testcase name="good"/></testsuite>'


def result(report: pathlib.Path | None, status: str) -> dict[str, Any]:
    """Returns Bazel's event of a finished test with this XML report and status."""
    outputs = [{"name": "test.log", "uri": "file:///nowhere"}]
    if report:
        outputs.append({"name": "test.xml", "uri": report.as_uri()})
    found = {"status": status, "testActionOutput": outputs, "testAttemptDurationMillis": "1500"}
    return {"id": {"testResult": {"label": "//t"}}, "testResult": found}


NOT_BUILT = {"id": {"targetCompleted": {"label": "//t"}}, "completed": {}}
NOT_FOR_THIS_MACHINE = {"id": {"targetCompleted": {"label": "//t"}}, "aborted": {"reason": "SKIPPED"}}
BUILT = {"id": {"targetCompleted": {"label": "//t"}}, "completed": {"success": True}}

CASES = [
    pytest.param(PYTEST_REPORT, "FAILED", [], 3, "1 passed, 2 failed, 1 skipped", id="pytest"),
    pytest.param(GTEST_REPORT, "FAILED", [], 3, "1 passed, 1 failed, 2 skipped", id="GoogleTest"),
    pytest.param(GOOD_REPORT, "PASSED", [BUILT, NOT_FOR_THIS_MACHINE], 0, "1 passed, 0 failed, 0 skipped", id="good"),
    pytest.param(GOOD_REPORT, "TIMEOUT", [], 3, "0 passed, 1 failed, 0 skipped", id="timeout"),
    pytest.param(GOOD_REPORT, "FAILED", [], 3, "1 passed, 1 failed, 0 skipped", id="died after the report"),
    pytest.param(None, "FAILED", [], 3, "0 passed, 1 failed, 0 skipped", id="no report"),
    pytest.param(GOOD_REPORT, "PASSED", [NOT_BUILT], 1, "1 passed, 1 failed, 0 skipped", id="a target is not built"),
    pytest.param(GOOD_REPORT, "PASSED", [], 37, "1 passed, 1 failed, 0 skipped", id="bazel fails by itself"),
]


@pytest.mark.parametrize(("report", "outcome", "events", "status", "line"), CASES)
def test_closing_line(
    report: str | None,
    outcome: str,
    events: list[dict[str, Any]],
    status: int,
    line: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "test.xml"
    if report:
        file.write_text(report)
    events = [result(file if report else None, outcome), *events]
    (tmp_path / "call.json").write_text("\n".join(json.dumps(event) for event in events))
    (tmp_path / "call.status").write_text(str(status))
    monkeypatch.setattr("sys.argv", ["tally.py", str(tmp_path)])
    assert tally.main() == (0 if " 0 failed" in line else 1)
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_nothing_ran_is_a_failure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tally.py", str(tmp_path)])
    assert tally.main() == 1


def test_a_call_that_was_not_made_is_a_skip(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test.xml").write_text(GOOD_REPORT)
    (tmp_path / "call.json").write_text(json.dumps(result(tmp_path / "test.xml", "PASSED")))
    (tmp_path / "call.status").write_text("0")
    (tmp_path / "aarch64.skipped").write_text("no compiler\n")
    monkeypatch.setattr("sys.argv", ["tally.py", str(tmp_path)])
    assert tally.main() == 0
    time, *lines = capsys.readouterr().out.splitlines()
    assert time.split() == ["1.5", "s", "call", "//t"]
    assert lines == ["SKIPPED aarch64: no compiler", "1 passed, 0 failed, 1 skipped"]


def test_the_longest_targets_are_named_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = []
    for i in range(tally.LONGEST + 2):
        event = result(None, "PASSED")
        event["id"]["testResult"]["label"] = f"//t{i}"
        event["testResult"]["testAttemptDurationMillis"] = str(1000 * i)
        events.append(json.dumps(event))
    (tmp_path / "call.json").write_text("\n".join(events))
    (tmp_path / "call.status").write_text("0")
    monkeypatch.setattr("sys.argv", ["tally.py", str(tmp_path)])
    tally.main()
    named = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if " s call" in line]
    assert named == [f"//t{i}" for i in reversed(range(2, tally.LONGEST + 2))]


def test_failures_and_skips_are_named(tmp_path: pathlib.Path) -> None:
    counts = tally.Tally()
    tally.count_report(PYTEST_REPORT.encode(), "//t", counts)
    assert counts.failed == ["//t test_a.bad: 1 != 2 more", "//t test_a.broken: no fixture"]
    assert counts.skipped == ["//t test_a.absent: no GPU"]
