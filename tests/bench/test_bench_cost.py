"""Tests python tests/bench cost with small sizes, and that the numbers of docs/cost.md are what is simulated now."""

import json
import pathlib
from typing import Any

import pytest

from bench import __main__ as command
from bench.cost import cost_pages, measured_cost
from bench.cost.cost_sweep import _SECONDS, CLUSTERS, Row
from bench.cost.measured_cost import Work
from bench.cost.shapes import MODELS
from bench.cost.simulator import KINDS, Case, Model, _ddp_buckets, predict
from torch_ext.policy.loader import load_policy

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def _rows(path: pathlib.Path) -> list[Row]:
    return [Row(*row) for row in json.loads(path.read_text())["rows"]]


def test_the_command_writes_its_rows_a_table_and_a_picture(tmp_path: pathlib.Path, capsys: Any) -> None:
    data, picture = tmp_path / "rows.json", tmp_path / "cost.svg"
    assert command.main(["cost", "--quick", "--json", str(data), "--picture", str(picture)]) == 0
    rows = _rows(data)
    assert {r.strategy for r in rows} == set(KINDS) and max(r.ranks for r in rows) == 16
    printed = capsys.readouterr().out
    assert printed.strip() == cost_pages.table(rows).strip() and "| N = 2 | N = 8 |" in printed
    assert picture.read_text().count("</svg>") == 1


def test_the_page_has_the_table_of_its_rows() -> None:
    assert cost_pages.table(_rows(DOCS / "cost.json")).strip() in (DOCS / "cost.md").read_text()


@pytest.mark.parametrize("name", MODELS)
def test_its_rows_are_what_is_simulated_now(name: str) -> None:
    forward, backward = _SECONDS[name]
    model = Model.of(MODELS[name](), load_policy(MODELS[name]()))._replace(
        forward_seconds=forward, backward_seconds=backward
    )
    rows = [r for r in _rows(DOCS / "cost.json") if r.model == name and r.ranks == 64]
    assert {r.strategy for r in rows} >= set(KINDS) - {"DDP hook"}
    costs = predict([Case(CLUSTERS[r.cluster], model, r.strategy, r.ranks, r.exchange) for r in rows])
    for row, cost in zip(rows, costs, strict=True):
        assert (cost.seconds * 1e3, cost.bytes / 1e6) == pytest.approx((row.milliseconds, row.megabytes), rel=0.01), row


def test_the_models_have_as_many_parameters_as_they_are_known_for() -> None:
    found = {name: sum(p.numel() for p in make().parameters()) for name, make in MODELS.items()}
    assert found == {"GPT-2 small": 124_439_808, "7 B": 6_738_415_616}


def test_ddps_buckets_fill_in_reverse_order() -> None:
    params = list(MODELS["GPT-2 small"]().parameters())
    buckets = _ddp_buckets(params, None)
    assert buckets[-1] == 0 and buckets == sorted(buckets, reverse=True)
    assert sum(p.nbytes for p, b in zip(params, buckets, strict=True) if b == 1) >= 25 << 20


def test_the_optimizers_work_is_divided_among_ranks_and_copies_are_not() -> None:
    least = {
        "alone": 0.010,
        "no_shard, one rank": 0.012,
        "optim, one rank": 0.020,
        "optim_grads_params, one rank": 0.050,
    }
    assert measured_cost._work(least, "no_shard", 4) == Work(0.012, 0.0)
    assert measured_cost._work(least, "optim", 4) == pytest.approx(Work(0.012, 0.002))
    assert measured_cost._work(least, "optim_grads_params", 4) == pytest.approx(Work(0.042, 0.002))
    assert measured_cost._work(dict.fromkeys(least, 0.1), "optim", 2) == Work(0.1, 0.0), "what noise made the same"


def test_at_1_gbit_the_link_alone_takes_most_of_the_time() -> None:
    bytes_of_model = 2 * 9_480_288
    for ranks in (2, 4):
        least = 2 * (ranks - 1) / ranks * bytes_of_model * 8 / 1e9
        assert least < measured_cost.seconds_of("no_shard", ranks, Work(0.0, 0.0)) < 1.2 * least
    assert measured_cost.seconds_of("no_shard", 2, Work(0.15, 0.0)) < 0.18, "backward covers the rest"
