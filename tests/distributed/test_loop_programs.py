"""Random training loops under every strategy (loop_programs.py) must train the bits of one process. LOOP_PROGRAMS=100
runs 100 more; a seed that failed once is added to SEEDS."""

import os

import loop_programs
import pytest
import ranks
from strategies import STRATEGIES

SEEDS = {2: [*range(8), 10_010], 4: [0, 5, 10_010]}  # by world size
MORE = int(os.environ.get("LOOP_PROGRAMS", "0"))


@pytest.mark.parametrize("world", SEEDS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, loop_programs.FSDP2, "ddp"])
def test_loops_train_the_bits_of_one_process(strategy: str, world: int) -> None:
    seeds = [*SEEDS[world], *range(10_000, 10_000 + MORE)]
    for wrong in ranks.run(world, loop_programs.on_ranks, strategy, seeds, limit=60.0 + 3 * MORE, timeout=20):
        assert not wrong, "\n".join(wrong)
