"""Random programs in one process in which features meet (tests/feature_programs.py).

FEATURE_PROGRAMS=1000 runs that many more. A seed that has once failed stays in SEEDS.
"""

import os

import feature_programs
import pytest

SEEDS = [*range(60), 10_178, 10_720, 10_809, 20_163, 20_375, 20_459, 20_536]
MORE = int(os.environ.get("FEATURE_PROGRAMS", "0"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [*SEEDS, *range(30_000, 30_000 + MORE)])
def test_features_change_no_bit_and_say_what_is_so(seed: int) -> None:
    program = feature_programs.Program(seed)
    program.run(program.acts(30))
