"""What tests/gpu.sh counts and writes of its parts, from pytest's files.

python gpu_report.py counts FILE.xml                                   passed, failed and skipped tests
python gpu_report.py report FILE.json FOLDER PASSED FAILED SKIPPED     of FOLDER/parts and FOLDER/xml
"""

import json
import pathlib
import sys
import xml.etree.ElementTree as xml
from typing import Any

_LONGEST = 4000  # characters of a failure's text, whose end says what it was


def counts(file: pathlib.Path) -> tuple[int, int, int]:
    """Passed, failed, skipped."""
    suites = list(xml.parse(file).getroot().iter("testsuite"))
    keys = ("tests", "failures", "errors", "skipped")
    total, failures, errors, skips = (sum(int(suite.get(key, 0)) for suite in suites) for key in keys)
    return total - failures - errors - skips, failures + errors, skips


def _cases(file: pathlib.Path) -> dict[str, Any]:
    failures: dict[str, str] = {}
    skips: dict[str, int] = {}
    for case in xml.parse(file).getroot().iter("testcase"):
        for outcome in case:
            if outcome.tag in ("failure", "error"):
                failures[str(case.get("name"))] = (outcome.text or outcome.get("message") or "")[-_LONGEST:]
            elif outcome.tag == "skipped":
                why = str(outcome.get("message"))
                skips[why] = skips.get(why, 0) + 1
    return {"failures": failures, "skipped, by reason": skips}


def report(folder: pathlib.Path, totals: list[int]) -> dict[str, Any]:
    """Everything, for a file of JSON."""
    parts: dict[str, Any] = {}
    noted = folder / "parts"
    for line in noted.read_text().splitlines() if noted.exists() else []:
        name, status, seconds = line.split("\t")
        parts[name] = {"status": int(status), "seconds": int(seconds)}
    for file in sorted((folder / "xml").glob("*.xml")):
        passed, failed, skipped = counts(file)
        numbers = {"passed": passed, "failed": failed, "skipped": skipped}
        parts.setdefault(file.stem, {}).update(numbers | _cases(file))
    return dict(zip(("passed", "failed", "skipped"), totals, strict=True)) | {"parts": parts}


def main(what: str, *arguments: str) -> None:
    if what == "counts":
        print(*counts(pathlib.Path(arguments[0])))
    else:
        file, folder, *totals = arguments
        written = report(pathlib.Path(folder), [int(number) for number in totals])
        pathlib.Path(file).write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
