"""python tests/bench comm: compares the data-parallel gradient exchange with its peers. Every figure is a ratio within
one run."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from bench import bench_report, step
from bench.comm import comm_rows, launcher
from bench.comm.comm_rows import ROWS, Found, Row, Versus
from bench.comm.contenders import FULL, QUICK, Size
from bench.comm.networks import Unavailable, network
from bench.comm.rank import Job, Question
from bench.figures import Figure, Findings, Skip

_ROUNDS, _QUICK_ROUNDS = 10, 2
_LIMIT = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=step.positive, help=f"that a median is taken of; {_ROUNDS} unless given")
    parser.add_argument(
        "--limit", type=step.positive, default=_LIMIT, metavar="SECONDS", help="of all that runs over one network"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=step.new_file, metavar="FILE", help="all figures and the seconds of each step")
    parser.add_argument("--quick", action="store_true", help="small, on loopback: whether it runs; figures say nothing")


class _Where(NamedTuple):
    """A network: the kind of its links and its number of ranks."""

    link: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.link}, N = {self.ranks}"


class _Key(NamedTuple):
    """The key of a job. Rows with the same key are measured in one run."""

    kind: str
    compute: float  # seconds slept in a backward


class _Plan(NamedTuple):
    """The settings of a run."""

    rows: dict[str, Row]
    rounds: int
    size: Size
    seed: int
    limit: float
    quick: bool

    def networks(self) -> dict[_Where, list[str]]:
        """Returns network -> the rows that are measured over it."""
        networks: dict[_Where, list[str]] = {}
        for name, row in self.rows.items():
            places = [("loopback", 2)] if self.quick else [(link, ranks) for link in row.links for ranks in row.ranks]
            for place in places:
                networks.setdefault(_Where(*place), []).append(name)
        return networks

    def job_of(self, row: Row) -> _Key:
        return _Key(row.kind, row.compute / 10 if self.quick else row.compute)

    def jobs(self, names: list[str]) -> list[Job]:
        contenders: dict[_Key, dict[str, None]] = {}  # the inner dict serves as an ordered set
        for row in (self.rows[name] for name in names):
            contenders.setdefault(self.job_of(row), {}).update(dict.fromkeys(row.contenders))
        return [Job(key.kind, list(who), self.rounds, key.compute) for key, who in contenders.items()]


def run(options: argparse.Namespace) -> int:
    """Measures the rows and prints their figures as they come. The exit status does not depend on the figures."""
    plan = _Plan(
        rows={name: ROWS[name] for name in options.rows},
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        size=QUICK if options.quick else FULL,
        seed=options.seed,
        limit=options.limit,
        quick=options.quick,
    )
    facts = bench_report.machine(1, options.seed) | {"congestion control": _congestion_control()}
    print(bench_report.facts(facts))
    if options.quick:
        print("quick: small sizes on loopback, these figures are no claims")
    print(f"{plan.size.parameters:,} parameters, {plan.rounds} rounds, a thread per rank; lower is better\n")
    print(bench_report.header(), flush=True)
    loads: dict[str, float] = {}
    settings = {
        "parameters": plan.size.parameters,
        "rounds": plan.rounds,
        "rows": options.rows,
        "quick": options.quick,
        "loads before": loads,
    }
    findings = Findings()
    with _ended_as_by_ctrl_c():
        for where, names in plan.networks().items():
            loads[str(where)] = round(os.getloadavg()[0], 2)
            print(f"-- {where}; load before {loads[str(where)]}", flush=True)
            found, why = _find(plan, where, plan.jobs(names))
            slept = {key: f", {key.compute:g} s slept" * bool(key.compute) for key in found}
            findings.times |= {f"{where}{slept[key]}": f.seconds for key, f in found.items() if f.seconds}
            before = len(findings.figures), len(findings.skips)
            for name in names:
                _judge(plan, where, name, found, why, findings)
            figures, skips = findings.figures[before[0] :], findings.skips[before[1] :]
            print(bench_report.lines(figures, skips), flush=True)
            if options.json:  # after each network, so that minutes of measuring are kept if a later one fails
                text = json.dumps(bench_report.as_json(facts, settings, findings), indent=1)
                options.json.write_text(text + "\n")
    print(bench_report.closing(findings))
    return 0


def _find(plan: _Plan, where: _Where, jobs: list[Job]) -> tuple[dict[_Key, Found], str]:
    """Runs the jobs on a network. Returns the findings by job, and why some are missing ("" if none is)."""
    try:
        with network(where.link, where.ranks) as places:
            place = places[0]
            if not place.command:
                print("without a namespace of its own: whatever else is on this machine's loopback is counted, too")
            question = Question(where.ranks, place.interface, plan.size, plan.seed, jobs)
            answers, why = launcher.ask(question, places, plan.limit)
    except Unavailable as unavailable:
        return {}, str(unavailable)
    pairs = zip(jobs, answers, strict=False)  # there are answers of the finished jobs only
    return {
        _Key(job.kind, job.compute): comm_rows.found(where.link, of_ranks, place.shared) for job, of_ranks in pairs
    }, why


def _judge(plan: _Plan, where: _Where, name: str, found: dict[_Key, Found], why: str, findings: Findings) -> None:
    """Adds a figure, or a skip with its reason, for every comparison of a row."""
    row = plan.rows[name]
    f = found.get(plan.job_of(row))
    for versus in row.versus:
        missing = why if f is None else _missing(f, row, versus)
        if f is None or missing:
            findings.skips.append(Skip(name, f"{name}: {versus.ours}, N = {where.ranks}", missing))
            continue
        value = row.value(f, versus)
        against = f" / {value.theirs}" * bool(value.theirs)
        what = f"{name}: {versus.ours}{against}, N = {where.ranks}"
        findings.figures.append(Figure(name, what, value.spread, versus.bar, value.beside))


def _missing(f: Found, row: Row, versus: Versus) -> str:
    """Returns why the comparison cannot be made: the errors of the contenders that did not take part; "" if it can."""
    needed = [versus.ours, *row.besides]
    if versus.theirs and all(who in f.refused for who in versus.theirs):
        needed += versus.theirs
    return "; ".join(f"{who}: {f.refused[who]}" for who in needed if who in f.refused)


def _congestion_control() -> str:
    """Returns the name of TCP's congestion control."""
    try:
        with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Turns SIGTERM into SystemExit for as long as the context lasts, so that ranks and namespaces are removed."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
