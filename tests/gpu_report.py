"""Counts and reports the results of tests/gpu.sh, from the files that its parts left in a folder.

python gpu_report.py counts FOLDER                                   prints passed, failed, skipped of FOLDER/journals
python gpu_report.py report FILE.json FOLDER PASSED FAILED SKIPPED   writes a report of FOLDER/parts and FOLDER/journals

There is one journal for each test file: tests/gpu/journal.py writes its lines from the tests' processes, and
tests/gpu_files.py adds others.
"""

import json
import pathlib
import sys
from typing import Any

import device_processes

_SLOWEST = 5


def tally(journal: pathlib.Path) -> dict[str, Any]:
    """Returns how many tests of a journal passed, failed and were skipped, with texts, times and processes."""
    numbers = {"passed": 0, "failed": 0, "skipped": 0}
    failures: dict[str, str] = {}
    skips: dict[str, int] = {}
    seconds: dict[str, float] = {}
    processes = []
    for line in device_processes.lines(journal):
        if "ended" in line:
            name = line["ended"].partition("::")[2] or line["ended"]
            numbers[line["outcome"]] += 1
            seconds[name] = line["seconds"]
            if line["outcome"] == "failed":
                failures[name] = line["text"]
            elif line["outcome"] == "skipped":
                skips[line["text"]] = skips.get(line["text"], 0) + 1
        elif "left" in line:
            numbers["skipped"] += line["left"]
            skips[line["why"]] = skips.get(line["why"], 0) + line["left"]
        elif "process" in line:
            processes.append({"status": line["process"]} | {key: line[key] for key in ("seconds", "tests", "why")})
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:_SLOWEST]
    return numbers | {
        "seconds": round(sum(process["seconds"] for process in processes), 1),
        "failures": failures,
        "skipped, by reason": skips,
        "slowest, in seconds": {name: seconds[name] for name in slowest},
        "begun again": max(0, len(processes) - 1),
        "processes": processes,
    }


def _tallies(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {journal.stem: tally(journal) for journal in sorted((folder / "journals").glob("*.jsonl"))}


def counts(folder: pathlib.Path) -> list[int]:
    """Returns how many tests of the folder's journals passed, failed and were skipped."""
    found = _tallies(folder).values()
    return [sum(numbers[key] for numbers in found) for key in ("passed", "failed", "skipped")]


def report(folder: pathlib.Path, totals: list[int]) -> dict[str, Any]:
    """Returns the whole report, for JSON."""
    parts: dict[str, Any] = _tallies(folder)
    noted = folder / "parts"
    for line in noted.read_text().splitlines() if noted.exists() else []:
        name, status, seconds = line.split("\t")
        parts[name] = {"status": int(status), "seconds": int(seconds)}
    return dict(zip(("passed", "failed", "skipped"), totals, strict=True)) | {"parts": parts}


def write(file: pathlib.Path, folder: pathlib.Path, totals: list[int]) -> None:
    """Writes the whole report. Whoever is killed meanwhile leaves the old file or the new one."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(report(folder, totals), indent=1) + "\n")
    new.replace(file)


def main(what: str, *arguments: str) -> None:
    if what == "counts":
        print(*counts(pathlib.Path(arguments[0])))
    else:
        file, folder, *totals = arguments
        write(pathlib.Path(file), pathlib.Path(folder), [int(number) for number in totals])


if __name__ == "__main__":
    main(*sys.argv[1:])
