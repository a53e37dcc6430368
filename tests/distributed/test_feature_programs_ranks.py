"""Random histories of two ranks in which features meet (tests/feature_programs.py), under every strategy, FSDP2 and
DistributedDataParallel's hook. FEATURE_PROGRAMS=1000 runs 1000 more; a seed that failed once is added to SEEDS."""

import os
import warnings

import feature_programs
import pytest
import ranks
import torch

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params", "ddp"]
SEEDS = [*range(3)]
MORE = int(os.environ.get("FEATURE_PROGRAMS", "0"))


def _programs(rank: int, world: int, strategy: str, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in seeds:
        program = feature_programs.Program(seed, strategy)
        program.run(program.acts(20))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_features_change_no_bit_and_say_what_is_so(strategy: str) -> None:
    ranks.run(2, _programs, strategy, [*SEEDS, *range(10_000, 10_000 + MORE)], limit=60.0 + MORE, timeout=30)
