"""python -m torch_ext bench comm: the data-parallel exchange against its peers, every figure a ratio of one run."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from torch_ext import _bench, _bench_comm_ranks, _bench_comm_rows, _bench_report
from torch_ext._bench_comm_contenders import FULL, QUICK, Size
from torch_ext._bench_comm_measure import Job, Question
from torch_ext._bench_comm_networks import Unavailable, network
from torch_ext._bench_comm_rows import ROWS, Found, Row, Versus
from torch_ext._bench_figures import Figure, Findings, Skip

_ROUNDS, _QUICK_ROUNDS = 10, 2
_LIMIT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=_bench.positive, help=f"that a median is taken of; {_ROUNDS} unless given")
    parser.add_argument(
        "--limit", type=_bench.positive, default=_LIMIT, metavar="SECONDS", help="of all that runs over one network"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=_bench.new_file, metavar="FILE", help="all figures and the seconds of each step")
    parser.add_argument("--quick", action="store_true", help="small, on loopback: whether it runs; figures say nothing")


class _Where(NamedTuple):
    link: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.link}, N = {self.ranks}"


class _Plan(NamedTuple):
    """What is measured with."""

    rows: dict[str, Row]
    rounds: int
    size: Size
    seed: int
    limit: float
    quick: bool

    def networks(self) -> dict[_Where, list[str]]:
        """Each network that a row needs -> the rows that need it."""
        networks: dict[_Where, list[str]] = {}
        for name, row in self.rows.items():
            places = [("loopback", 2)] if self.quick else [(link, ranks) for link in row.links for ranks in row.ranks]
            for place in places:
                networks.setdefault(_Where(*place), []).append(name)
        return networks

    def job_of(self, row: Row) -> tuple[str, float]:
        """Rows with the same answer are compared in one run."""
        return row.kind, row.compute / 10 if self.quick else row.compute

    def jobs(self, names: list[str]) -> list[Job]:
        contenders: dict[tuple[str, float], dict[str, None]] = {}  # as ordered sets
        for row in (self.rows[name] for name in names):
            contenders.setdefault(self.job_of(row), {}).update(dict.fromkeys(row.contenders))
        return [Job(kind, list(who), self.rounds, compute) for (kind, compute), who in contenders.items()]


def run(options: argparse.Namespace) -> int:
    """Prints the figures as they come; the exit status does not depend on them."""
    plan = _Plan(
        rows={name: ROWS[name] for name in options.rows},
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        size=QUICK if options.quick else FULL,
        seed=options.seed,
        limit=options.limit,
        quick=options.quick,
    )
    facts = _bench_report.machine(1, options.seed) | {"congestion control": _congestion_control()}
    print(_bench_report.facts(facts))
    if options.quick:
        print("quick: small sizes on loopback, these figures are no claims")
    print(f"{plan.size.parameters:,} parameters, {plan.rounds} rounds, a thread per rank; lower is better\n")
    print(_bench_report.header(), flush=True)
    settings = {"parameters": plan.size.parameters, "rounds": plan.rounds, "rows": options.rows, "quick": options.quick}
    findings = Findings()
    with _ended_as_by_ctrl_c():
        for where, names in plan.networks().items():
            _measure(plan, where, names, findings)
            if options.json:
                text = json.dumps(_bench_report.as_json(facts, settings, findings), indent=1)
                options.json.write_text(text + "\n")
    print(_bench_report.closing(findings))
    return 0


def _measure(plan: _Plan, where: _Where, names: list[str], findings: Findings) -> None:
    print(f"-- {where}; load before {os.getloadavg()[0]:.2f}", flush=True)
    jobs = plan.jobs(names)
    found: dict[tuple[str, float], Found] = {}
    try:
        with network(where.link, where.ranks) as places:
            place = places[0]
            question = Question(where.ranks, place.interface, plan.size, plan.seed, jobs)
            answers, why = _bench_comm_ranks.ask(question, places, plan.limit)
        for job, of_job in zip(jobs, answers, strict=False):
            found[job.kind, job.compute] = _bench_comm_rows.found(where.link, of_job, place.shared)
    except Unavailable as unavailable:
        why = str(unavailable)
    for (kind, compute), f in found.items():
        slept = f", {compute:g} s slept" * bool(compute)
        findings.times |= {f"{where}{slept}": f.seconds} if kind == "timing" else {}
    figures, skips = [], []
    for name in names:
        row = plan.rows[name]
        for versus in row.versus:
            what = f"{name}: {versus.ours}"
            ending = f", N = {where.ranks}"
            if plan.job_of(row) not in found:
                skips.append(Skip(name, what + ending, why))
                continue
            f = found[plan.job_of(row)]
            missing = _missing(f, row, versus)
            if missing:
                skips.append(Skip(name, what + ending, missing))
                continue
            value = row.value(f, versus)
            against = f" / {value.theirs}" * bool(value.theirs)
            figures.append(Figure(name, what + against + ending, value.spread, versus.bar, value.beside))
    findings.figures += figures
    findings.skips += skips
    print(_bench_report.lines(figures, skips), flush=True)


def _missing(f: Found, row: Row, versus: Versus) -> str:
    """Why the comparison cannot be made: who did not take part, in its own words."""
    needed = [versus.ours, *row.besides]
    if versus.theirs and all(who in f.refused for who in versus.theirs):
        needed += versus.theirs
    return "; ".join(f"{who}: {f.refused[who]}" for who in needed if who in f.refused)


def _congestion_control() -> str:
    """Of TCP."""
    try:
        with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """A polite kill removes ranks and namespaces, too."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
