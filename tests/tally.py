"""Counts the results of `bazel test`: python tests/tally.py FOLDER, called by tests/run.sh.

FOLDER has, for each call of Bazel, NAME.json (its build events, one JSON object per line) and NAME.status (its exit
status). The cases in the XML reports of all targets of these calls are counted, cached or not. A target that was not
built, or that failed without a failed case in its report, counts as one failure. NAME.skipped, which contains the
reason, stands for a call that was not made, and counts as one skip. Failures and skips are listed by name, and before
them the targets that took longest.
"""

import json
import pathlib
import sys
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LONGEST = 10
"""How many targets are listed with their times."""


@dataclass
class Tally:
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by call and target


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())[:200]


def count_report(report: bytes, where: str, tally: Tally) -> None:
    """Counts the test cases of a JUnit report. GoogleTest has "skipped" or "suppressed" (disabled) in an attribute."""
    for case in ElementTree.fromstring(report).iter("testcase"):
        suite = case.get("classname", "").split(".")[-1]
        name = f"{where} {suite}.{case.get('name', '')}".replace(" .", " ")
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            tally.failed.append(f"{name}: {one_line(bad.get('message') or bad.text)}")
        elif skip is not None or case.get("result") in ("skipped", "suppressed") or case.get("status") == "notrun":
            reason = skip is not None and (skip.get("message") or skip.text)
            tally.skipped.append(f"{name}: {one_line(reason or 'disabled')}")
        else:
            tally.passed += 1


def reports(event: dict[str, Any]) -> Iterator[bytes]:
    for output in event["testResult"].get("testActionOutput", []):
        if output["name"] == "test.xml":
            path = urllib.request.url2pathname(urllib.parse.urlparse(output["uri"]).path)
            yield pathlib.Path(path).read_bytes()


def count_call(events: pathlib.Path, tally: Tally) -> None:
    """Counts the results of one call of Bazel."""
    call = events.stem
    status = int(events.with_suffix(".status").read_text())
    failures_before = len(tally.failed)
    lines = events.read_text().splitlines() if events.exists() else []
    for event in map(json.loads, lines):
        kind, of = next(iter(event["id"].items()))
        where = f"{call} {of.get('label', '')}"
        if kind == "testResult":
            failed = len(tally.failed)
            outcome = event["testResult"].get("status")
            seconds = int(event["testResult"].get("testAttemptDurationMillis", 0)) / 1000
            tally.seconds[where] = tally.seconds.get(where, 0.0) + seconds
            if outcome != "TIMEOUT":
                for report in reports(event):
                    count_report(report, where, tally)
            if outcome != "PASSED" and len(tally.failed) == failed:
                tally.failed.append(f"{where}: {outcome}")
        elif kind == "targetCompleted" and not event.get("completed", {}).get("success"):
            reason = event.get("aborted", {}).get("reason", "")
            if reason != "SKIPPED":  # not for this platform
                tally.failed.append(f"{where}: not built {reason}".rstrip())
    if status and len(tally.failed) == failures_before:
        tally.failed.append(f"{call}: bazel ended with status {status}")


def main() -> int:
    tally = Tally()
    for status in sorted(pathlib.Path(sys.argv[1]).glob("*.status")):
        count_call(status.with_suffix(".json"), tally)
    for call in sorted(pathlib.Path(sys.argv[1]).glob("*.skipped")):
        tally.skipped.append(f"{call.stem}: {one_line(call.read_text())}")
    for name, seconds in sorted(tally.seconds.items(), key=lambda item: -item[1])[:LONGEST]:
        print(f"{seconds:7.1f} s {name}")
    for name in tally.skipped:
        print("SKIPPED", name)
    for name in tally.failed:
        print("FAILED ", name)
    print(f"{tally.passed} passed, {len(tally.failed)} failed, {len(tally.skipped)} skipped")
    return 1 if tally.failed or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main())
