"""The process that measures parts of the benchmark on a device: python -m bench.measuring_process MODULE JOURNAL
SETTINGS. `restarts` starts it, and starts another one if it ends before its last part.

MODULE is what has the parts (a Measured, cuda_rows for instance). SETTINGS is JSON. JOURNAL is a file to which the
process adds lines of JSON, and whose parts it does not measure again:

    {"facts": {...}}                 on what the figures depend; the process has found its device
    {"began": "wall fp32"}
    {"ended": "wall fp32", "figures": [...], "skips": [...], "seconds": {...}, "why": "", "text": ""}
                                     why, text: why figures are missing, in a line and in full
    {"dead": "CUDA error: ..."}      why the process ends here
"""

import faulthandler
import gc
import importlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from device_processes import DEAD, add, end_with_parent, lines

from bench import bench_report
from bench.figures import Findings
from bench.row import Bench


class Measured(Protocol):
    """What a module with parts has. settings: the same in every call, values of JSON."""

    def parts(self, settings: Mapping[str, Any]) -> dict[str, Callable[[Bench], None]]:
        """Returns the parts by name, in their order. Called where no device may be used as well."""
        ...

    def bench(self, settings: Mapping[str, Any], findings: Findings) -> Bench: ...

    def facts(self, settings: Mapping[str, Any]) -> dict[str, Any]: ...

    def why_dead(self) -> str:
        """Returns why nothing more can be measured in this process; "" if it can."""
        ...

    def clear(self) -> None:
        """Frees the memory that a part has left."""
        ...


def measured_by(module: str) -> Measured:
    return cast(Measured, importlib.import_module(module))


def main(module: str, file: str, given: str) -> None:
    end_with_parent()
    faulthandler.enable()
    rows, journal, settings = measured_by(module), pathlib.Path(file), json.loads(given)
    known = {line.get("began") for line in lines(journal)}
    add(journal, facts=rows.facts(settings))
    for name, part in rows.parts(settings).items():
        if name not in known:
            add(journal, began=name)
            _measure(rows, name, part, journal, settings)


def _measure(
    rows: Measured, name: str, part: Callable[[Bench], None], journal: pathlib.Path, settings: Mapping[str, Any]
) -> None:
    """Measures one part and prints its figures. Ends the process if the device is dead afterwards."""
    print(f"-- {name}", flush=True)
    findings, why, text = Findings(), "", ""
    try:
        part(rows.bench(settings, findings))
    except Exception as error:  # of any kind: the other parts are still measured
        why, text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}", traceback.format_exc()
        print(text, flush=True)
    print(bench_report.lines(findings.figures, findings.skips), flush=True)
    if dead := rows.why_dead():
        print(f"after {name} the device is dead: {dead}", flush=True)
        why, text = why or "the device is dead", f"{text}after this part the device is dead: {dead}"
    figures, skips = [figure.as_json() for figure in findings.figures], [vars(skip) for skip in findings.skips]
    add(journal, ended=name, figures=figures, skips=skips, seconds=findings.times, why=why, text=text)
    if dead:
        add(journal, dead=dead)
        os._exit(DEAD)  # nothing at exit: it might hang
    gc.collect()
    rows.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
