"""A small, seeded part of the soak; `bash tests/soak.sh SECONDS` runs as much of it as there is time."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

_SOAK = pathlib.Path(__file__).parent

# What is run, and how often of each kind.
PARTS = {
    "faults of ranks": (
        ["kill", "stop", "pause", "interrupt", "interrupt_all", "forward", "backward", "hook", "alone", "everywhere"],
        2,
    ),
    "faults of saves": (
        ["kill_file", "kill_folder", "kill_async", "flip_file", "flip_folder", "disk_full", "two_jobs"],
        3,
    ),
    "programs of ranks": (["program"], 10),
    "programs of one process": (["step_program"], 30),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_soak(part: str) -> None:
    kinds, runs = PARTS[part]
    # Its own process: ranks fork from one that has no threads.
    command = [sys.executable, str(_SOAK), "--seed", "3", "--seconds", "240", "--runs", str(runs), "--kinds", *kinds]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.findall(r"^(\w+) +\d+ runs: 0 hung, 0 silent, 0 unnamed, 0 crashed", found.stdout, re.M) == kinds
