"""Trains the byte-level GPT with the configurations of configurations.py, in the stages of stages.py.

    torchrun --standalone --nproc-per-node 2 examples/gpt/train.py pretrain/torch-fp32:3 --half scratch/8bit:0
    torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --resume scratch/8bit:0 scratch/torch-fp32:0

A run is named stage/configuration:seed. With several processes, torch's configurations use DistributedDataParallel and
torch_ext's use `parallelize`. The seed determines the initial weights and every batch, so runs of one seed read the
same text in the same order. Each run writes OUT/<stage>/<configuration>-<seed>.jsonl, which report.py reads. With
--half a run stops in the middle with a checkpoint, from which --resume continues in a new process. The stage pretrain
writes OUT/pretrained.pt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import measure
import text
import torch
import torch.distributed as dist
from configurations import CONFIGURATIONS, MORE, Training
from model import GPT
from stages import FULL, PRETRAINED, QUICK, Stage, held_out_loss, train_steps
from tqdm import tqdm


@dataclass(frozen=True)
class Run:
    """The run that one log describes. `part`: "whole", "half" (the first half) or "resume" (the second half)."""

    stage: str
    configuration: str
    seed: int
    part: str = "whole"

    @staticmethod
    def parse(words: str, part: str = "whole") -> Run:
        stage, _, rest = words.partition("/")
        configuration, _, seed = rest.partition(":")
        if stage not in FULL or configuration not in CONFIGURATIONS | MORE or not seed.isdigit():
            raise SystemExit(f"{words!r}: a run is stage/configuration:seed, as scratch/8bit:0")
        return Run(stage, configuration, int(seed), part)

    def file(self, out: Path, ending: str) -> Path:
        return out / self.stage / f"{self.configuration}-{self.seed}.{ending}"


class Log:
    """A file of JSON records, one per line, that only rank 0 writes."""

    def __init__(self, path: Path, append: bool, rank: int) -> None:
        self._file = open(path, "a" if append else "w") if rank == 0 else None

    def write(self, **record: object) -> None:
        if self._file:
            print(json.dumps(record), file=self._file, flush=True)

    def close(self) -> None:
        if self._file:
            self._file.close()


def train(run: Run, stage: Stage, out: Path, on_step: Callable[[str], object]) -> float | None:
    """Trains one run, in one process or in all of the default process group. Returns the loss on the whole held-out
    text; None for a first half. After each step it calls `on_step` with a status text, or "" if there is no news."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(run.seed)
    model, training = build(run, stage, out, distributed=world > 1)
    steps, checkpoint = range(stage.steps), run.file(out, "pt")
    if run.part == "half":
        steps = steps[: stage.steps // 2]
    if run.part == "resume":
        steps = steps[load(checkpoint, model, training) :]

    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    log = Log(run.file(out, "jsonl"), run.part == "resume", rank)
    windows = text.held_out(stage.corpus, stage.config.context, stage.held_out)
    sizes: dict[str, int] = {}
    sent_before = measure.bytes_sent()
    for step, loss, norm in train_steps(stage, training, run.seed, steps, rank, world):
        if step == steps.stop:
            sizes = measure.resident_bytes(training.optimizer)  # with gradients
        log.write(step=step, loss=loss.item(), norm=norm.item())
        said = ""
        if step % stage.preview_every == 0:
            value = held_out_loss(model, windows[: stage.held_out // 10], rank, world)
            log.write(step=step, preview=value)
            said = f"loss {loss.item():.3f}, held-out {value:.3f}"
        on_step(said)
    sent = measure.bytes_sent()
    log.write(
        first=steps.start,
        until=steps.stop,
        sent=None if world == 1 or sent is None or sent_before is None else (sent - sent_before) / len(steps),
        parameters=measure.parameter_count(model),
        sizes=sizes,
        world=world,
    )
    final = None
    if run.part == "half":
        save(checkpoint, model, training, steps.stop, rank)
    else:
        final = held_out_loss(model, windows, rank, world)
        log.write(held_out=final, held_out_bytes=windows.shape[0] * stage.config.context)
    if run.stage == "pretrain" and rank == 0:
        torch.save({name: t.bfloat16() for name, t in model.state_dict().items()}, out / PRETRAINED)
    log.close()
    return final


def build(run: Run, stage: Stage, out: Path, distributed: bool) -> tuple[GPT, Training]:
    configuration = (CONFIGURATIONS | MORE)[run.configuration]
    model = GPT(stage.config)
    if stage.checkpoint:  # stored in bf16, so every configuration starts from the same numbers
        model.load_state_dict(torch.load(out / stage.checkpoint, weights_only=True))
    model.to(configuration.dtype)
    return model, configuration.prepare(model, stage.weight_decay, run.seed, distributed)


def save(path: Path, model: GPT, training: Training, step: int, rank: int) -> None:
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": training.optimizer.state_dict(), "step": step}
        torch.save(state, path)


def load(path: Path, model: GPT, training: Training) -> int:
    """Loads a checkpoint; returns the number of steps that it has taken."""
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    step: int = saved["step"]
    return step


def show(bar: tqdm[NoReturn], said: str) -> None:
    if said:
        bar.set_postfix_str(said, refresh=False)
    bar.update()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="stage/configuration:seed")
    parser.add_argument("--half", action="append", default=[], metavar="RUN", help="its first half, and a checkpoint")
    parser.add_argument("--resume", action="append", default=[], metavar="RUN", help="from that checkpoint on")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()

    runs = [Run.parse(words, "resume") for words in args.resume]
    runs += [Run.parse(words) for words in args.runs]
    runs += [Run.parse(words, "half") for words in args.half]
    dist.init_process_group("gloo")
    for run in runs:
        stage = (QUICK if args.quick else FULL)[run.stage]
        first = stage.steps // 2 if run.part == "resume" else 0
        title = f"{run.stage}, {run.configuration}, seed {run.seed}" + ("" if run.part == "whole" else f" ({run.part})")
        with tqdm(desc=title, initial=first, total=stage.steps, mininterval=1, disable=dist.get_rank() != 0) as bar:
            train(run, stage, args.out, partial(show, bar))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
