"""Random jobs that save and resume as another world under another strategy (elastic_programs.py) must have the bits of
one process that never stopped. ELASTIC_PROGRAMS=100 runs 100 more; a seed that failed once is added to SEEDS.
"""

import os
import pathlib
from typing import Any

import elastic_programs
import pytest
import ranks

SEEDS = [*range(6)]
MORE = int(os.environ.get("ELASTIC_PROGRAMS", "0"))
WORLDS = [(1, 2, 3), (2, 1, 4), (3, 2, 2), (2, 3, 1)]


def _shown(key: str, expected: dict[str, Any], found: dict[str, Any]) -> str:
    return f"{key}: {found.get(key)}, not {expected.get(key)}" if key.startswith("group") else key


@pytest.mark.parametrize("worlds", WORLDS, ids=str)
def test_a_job_goes_on_as_any_other(worlds: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    seeds = [*SEEDS, *range(10_000, 10_000 + MORE)]
    limit = 60.0 + 3 * MORE
    (alone,) = ranks.run(1, elastic_programs.alone, seeds, worlds, limit=limit)
    for at, world in enumerate(worlds):
        found = ranks.run(world, elastic_programs.segments, seeds, worlds, at, str(tmp_path), limit=limit)
        for rank, of_rank in enumerate(found):
            for seed, expected, one in zip(seeds, alone, of_rank, strict=True):
                differing = [
                    _shown(key, expected[at], one)
                    for key in expected[at] | one
                    if expected[at].get(key) != one.get(key)
                ]
                program = elastic_programs.Program.of(seed, worlds)
                assert not differing, f"seed {seed}, segment {at}, rank {rank}: {differing}\n{program}"
