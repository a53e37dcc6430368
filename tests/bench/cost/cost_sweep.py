"""python tests/bench cost: simulates what a step costs on 2 to 4096 ranks. With --measured it instead compares the
simulator's predictions with a real network."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import step
from bench.cost import measured_cost
from bench.cost.cost_pages import draw, table
from bench.cost.shapes import MODELS
from bench.cost.simulator import EXCHANGES, KINDS, Case, Cluster, Link, Model, predict
from torch_ext.policy.loader import load_policy

CLUSTERS = {
    "a 400 Gbit/s card for each GPU": Cluster(
        ranks_per_node=8,
        within=Link(3e-6, 3e11, 1e-6),
        between=Link(1e-5, 4.5e10, 1e-6),
        post_seconds=1e-6,
        sum_bytes_per_second=1e12,
    ),
    "a 100 Gbit/s card for each node": Cluster(
        ranks_per_node=8,
        within=Link(3e-6, 3e11, 1e-6),
        between=Link(3e-5, 1.1e10, 2e-6),
        node_bytes_per_second=1.1e10,
        post_seconds=1e-6,
        sum_bytes_per_second=1e12,
    ),
}
"""Nodes of 8 GPUs. Within a node: NVLink 4 at two thirds of its peak rate; between nodes: cards at nine tenths of
theirs."""

_SECONDS = {"GPT-2 small": (0.013, 0.025), "7 B": (0.28, 0.55)}
"""Seconds of forward and backward for 8192 tokens per rank: 6 operations per parameter and token, at 4e14 operations
per second (7 B) or 1.6e14 (GPT-2 small)."""

_WORLDS = [2**k for k in range(1, 13)]
_FEW_WORLDS = [2, 8, 64, 512, 4096]
"""World sizes that are simulated for FSDP2, fewer because it has three exchanges for each unit."""

_NO_RING = 512
"""Above so many ranks FSDP2's rings are not simulated: they would have millions of messages."""


class Row(NamedTuple):
    """One simulated case, a row of the JSON file. Bytes and messages are those that a rank sends in a step."""

    cluster: str
    model: str
    strategy: str
    exchange: str
    ranks: int
    milliseconds: float
    megabytes: float
    messages: int
    buckets: int
    kilobytes_of_message: float  # of the largest bucket's part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=step.new_file, metavar="FILE", help="all rows, for --rows")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="take them from a file of --json: nothing is simulated"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them; .svg or .png; needs matplotlib")
    parser.add_argument("--quick", action="store_true", help="up to 16 ranks: whether it runs")
    parser.add_argument("--measured", action="store_true", help="instead: 1 Gbit/s between namespaces, N = 2 and 4")
    parser.add_argument("--rounds", type=step.positive, default=6, help="of --measured; the fastest counts")


def run(options: argparse.Namespace) -> int:
    if options.measured:
        print("\n".join(measured_cost.compare(options.rounds)))
        return 0
    most = 16 if options.quick else _WORLDS[-1]
    rows = _read(options.rows) if options.rows else list(_rows(most))
    if options.json:
        options.json.write_text(_json(rows))
    print(table(rows))
    if options.picture:
        draw(rows, {name: 1e3 * sum(seconds) for name, seconds in _SECONDS.items()}, options.picture)
    return 0


def _rows(most: int) -> Iterator[Row]:
    """Yields the rows of all clusters, models and strategies, on up to `most` ranks."""
    policy = load_policy(torch.bfloat16)
    for cluster in CLUSTERS:
        for name, make in MODELS.items():
            forward, backward = _SECONDS[name]
            model = Model.of(make(), policy)._replace(forward_seconds=forward, backward_seconds=backward)
            for strategy in KINDS:
                if strategy != "DDP hook" or name != "7 B":  # which would have 226 buckets of 25 MB
                    yield from _rows_of(cluster, name, model, strategy, most)


def _rows_of(cluster: str, name: str, model: Model, strategy: str, most: int) -> Iterator[Row]:
    """Yields the rows of one strategy, one for each exchange and number of ranks."""
    units = strategy == "optim_grads_params"
    asked = [
        (exchange, ranks)
        for exchange in EXCHANGES
        for ranks in (_FEW_WORLDS if units else _WORLDS)
        if ranks <= most and not (units and exchange == "ring" and ranks > _NO_RING)
    ]
    costs = predict([Case(CLUSTERS[cluster], model, strategy, ranks, exchange) for exchange, ranks in asked])
    for (exchange, ranks), cost in zip(asked, costs, strict=True):
        yield Row(
            cluster,
            name,
            strategy,
            exchange,
            ranks,
            round(cost.seconds * 1e3, 2),
            round(cost.bytes / 1e6, 2),
            cost.messages,
            cost.buckets,
            round(cost.largest_message / 1e3, 1),
        )


def _json(rows: list[Row]) -> str:
    lines = ",\n ".join(json.dumps(row) for row in rows)
    return f'{{"fields": {json.dumps(Row._fields)},\n "rows": [\n {lines}\n]}}\n'


def _read(path: Path) -> list[Row]:
    found: dict[str, Any] = json.loads(path.read_text())
    if tuple(found["fields"]) != Row._fields:
        raise SystemExit(f"{path} was written by another version: make it anew with --json")
    return [Row(*row) for row in found["rows"]]
