"""python tests/bench: compares the optimizer's step with the machine's memory bandwidth and with its peers. Every
figure is a ratio within one run."""

import argparse
import gc
import json
from pathlib import Path

import torch

from bench import bench_report, cuda_rows, plots, workload
from bench.figures import Findings
from bench.row import Bench
from bench.step_rows import ISAS, ROWS
from torch_ext.cli import info

_PARAMS, _ROUNDS = 64_000_000, 30
_QUICK_PARAMS, _QUICK_ROUNDS = 1 << 16, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_cuda = f"with --device cuda: {', '.join(cuda_rows.ROWS)}"
    choices = list(dict.fromkeys((*ROWS, *cuda_rows.ROWS)))
    parser.add_argument("--rows", nargs="+", choices=choices, metavar="ROW", help=f"{', '.join(ROWS)}; {on_cuda}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--variants", type=Path, metavar="FOLDER", help="of --device cuda: builds of the CUDA library there, instead"
    )
    parser.add_argument("--params", type=positive, help=f"of the flat tensor; {_PARAMS:,} unless given")
    parser.add_argument("--rounds", type=positive, help=f"that a median is taken of; {_ROUNDS} unless given")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    legal = sorted({*ISAS, *info.isas()})
    parser.add_argument(
        "--isa", nargs="+", choices=legal, default=list(ISAS), metavar="ISA", help=f"of row wall: {', '.join(legal)}"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="all figures and the seconds they were made from")
    parser.add_argument("--pictures", type=_folder, metavar="DIR", help="bytes against time (of row peers; matplotlib)")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs; the figures say nothing")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; a number >= 1 is legal")
    return number


def new_file(text: str) -> Path:
    """Returns the path of an output file. Checks its folder now, before minutes of measuring."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is in a folder that does not exist; make it first")
    return path


def _folder(text: str) -> Path:
    plots.require_matplotlib()
    return Path(text)


def run(options: argparse.Namespace) -> int:
    """Measures the rows and prints their figures as they come. The exit status does not depend on the figures."""
    legal = list(cuda_rows.ROWS if options.device == "cuda" else ROWS)
    options.rows = options.rows or legal
    if unknown := [row for row in options.rows if row not in legal]:
        print(f"bench: --device {options.device} has no row {unknown[0]}; {', '.join(legal)} are legal")
        return 2
    if options.device == "cuda":
        return cuda_rows.run(options)
    torch.set_num_threads(options.threads)
    facts = bench_report.machine(options.threads, options.seed)
    print(bench_report.facts(facts))
    findings = Findings()
    bench = Bench(
        params=options.params or (_QUICK_PARAMS if options.quick else _PARAMS),
        model=workload.gpt2(16, 503, 32) if options.quick else workload.gpt2(),
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        threads=options.threads,
        isas=options.isa,
        seed=options.seed,
        findings=findings,
    )
    if options.quick:
        print("quick: small sizes, these figures are no claims")
    print(f"{bench.params:,} parameters in one tensor, {bench.rounds} rounds\n\n{bench_report.header()}", flush=True)
    keys = ("rows", "isa", "quick")
    settings = {"params": bench.params, "rounds": bench.rounds, **{key: getattr(options, key) for key in keys}}
    for row in options.rows:
        _run_row(bench, row)
        if options.json:  # after each row, so that minutes of measuring are kept if a later row fails
            options.json.write_text(json.dumps(bench_report.as_json(facts, settings, findings), indent=1) + "\n")
    print(bench_report.closing(findings))
    if options.pictures:
        print(plots.bytes_against_time(findings.points, facts, options.pictures))
    return 0


def _run_row(bench: Bench, row: str) -> None:
    """Measures one row and prints its figures and skips."""
    print(f"-- {row}")
    findings = bench.findings
    figures, skips = len(findings.figures), len(findings.skips)
    ROWS[row](bench)
    gc.collect()  # frees the row's tensors: optimizers are part of reference cycles
    print(bench_report.lines(findings.figures[figures:], findings.skips[skips:]), flush=True)
