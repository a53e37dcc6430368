"""python -m torch_ext doctor: prints what silently loses updates in a model and its optimizer, before training."""

import argparse
import json
from typing import Any

from torch_ext.cli import named_function
from torch_ext.diagnosis.diagnose import diagnose
from torch_ext.diagnosis.findings import Report

_EXAMPLE = "my_package.train:build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="function without arguments that returns (model, optimizer): the optimizer as the training loop uses "
        "it, best after some steps",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON, for other programs")
    parser.set_defaults(refuse=parser.error)


def run(options: argparse.Namespace) -> int:
    """Prints the report. Returns 0 if there are only notes or no findings, 1 if there is an error or a warning. Raises
    SystemExit(2), with a message, if the function raises or does not return (model, optimizer)."""
    try:
        report = _report(options.target)
    except (ValueError, TypeError) as error:
        options.refuse(str(error))
        raise AssertionError("argparse leaves") from error
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0 if report.ok else 1


def _report(target: str) -> Report:
    function = named_function.load(target, "MODULE:FUNCTION", _EXAMPLE)
    try:
        made: Any = function()
    except Exception as error:
        raise ValueError(f"{target}() raised {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple | list) or len(made) != 2:
        what = f"{len(made)} values" if isinstance(made, tuple | list) else f"a {type(made).__name__}"
        raise TypeError(f"{target}() returns {what}; (model, optimizer) is expected")
    return diagnose(made[0], made[1])
