"""Fine-tunes OUT/pretrained.pt, which train.py wrote, with every optimizer configuration and three seeds each.

    python examples/gpt/finetune.py [--out OUT] [--quick] [--more] [--seeds N] [--processes N]

Every run starts from the same bf16 numbers; seeds differ in the order of the text (and in torch_ext's dither). A run
uses one thread of one process, and as many runs as there are cores run at a time; the losses do not depend on that. Use
`--more` after a main job: `report.py` then shows the additional rows as well.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
from configurations import CONFIGURATIONS, MORE
from stages import FULL, QUICK, Stage
from tqdm import tqdm
from train import Run, show, train

_steps_done: Synchronized[int]  # of all processes of the pool


def _begin(steps_done: Synchronized[int]) -> None:
    global _steps_done
    _steps_done = steps_done
    torch.set_num_threads(1)


def _count(_: str = "") -> None:
    with _steps_done.get_lock():
        _steps_done.value += 1


def train_all(runs: Sequence[Run], stage: Stage, out: Path, processes: int) -> None:
    """Trains `runs` in a pool of processes; shows a bar of all steps, and a line for each run that ends."""
    context = multiprocessing.get_context("spawn")  # a fork may hang when torch has started threads
    steps_done: Synchronized[int] = context.Value("i", 0)
    with (
        ProcessPoolExecutor(processes, context, _begin, (steps_done,)) as pool,
        tqdm(desc=f"{len(runs)} runs, steps", total=len(runs) * stage.steps, mininterval=1) as bar,
    ):
        open_runs: dict[Future[float | None], Run] = {pool.submit(train, run, stage, out, _count): run for run in runs}
        while open_runs:
            done, _ = wait(open_runs, timeout=1)
            bar.update(steps_done.value - bar.n)
            for future in done:
                run = open_runs.pop(future)
                bar.write(f"{run.configuration:24} seed {run.seed}   held-out loss {future.result():.4f}")


def train_here(runs: Sequence[Run], stage: Stage, out: Path) -> None:
    """Trains `runs` in this process, for runs that are shorter than the start of another process."""
    torch.set_num_threads(1)
    with tqdm(desc=f"{len(runs)} runs, steps", total=len(runs) * stage.steps, mininterval=1) as bar:
        for run in runs:
            train(run, stage, out, partial(show, bar))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    parser.add_argument("--more", action="store_true", help="other roundings, too, as configurations.py has them")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each configuration: 3")
    parser.add_argument("--processes", type=int, help="runs at a time: as many as there are cores; 1 where it is quick")
    args = parser.parse_args()

    stage = (QUICK if args.quick else FULL)["finetune"]
    chosen = CONFIGURATIONS | MORE if args.more else CONFIGURATIONS
    runs = [Run("finetune", name, seed) for seed in range(args.seeds) for name in chosen]
    processes = args.processes or (1 if args.quick else len(os.sched_getaffinity(0)))
    if processes == 1:
        train_here(runs, stage, args.out)
    else:
        train_all(runs, stage, args.out, processes)


if __name__ == "__main__":
    main()
