"""Tests python tests/bench accuracy with small sizes: the order of the errors of different sums, and how errors grow
with the number of ranks or micro-batches."""

import json
import math
import pathlib

import pytest
import torch

from bench import __main__ as command
from bench.accuracy.reduction import Accumulated, Gradients, Reduced, accumulate, reduce

RANKS = (8, 64, 512)
MICRO_BATCHES = (1, 16, 64, 256)
GRADIENTS = Gradients(elements=1024, seed=3)
BF16 = 2.0**-9  # the largest relative error of one rounding


@pytest.fixture(scope="module")
def over_ranks() -> dict[int, Reduced]:
    return {ranks: reduce(ranks, GRADIENTS) for ranks in RANKS}


@pytest.mark.parametrize("ranks", RANKS)
def test_fp32_sums_lose_less_than_bf16_ones(over_ranks: dict[int, Reduced], ranks: int) -> None:
    found = over_ranks[ranks]
    assert found.sent_in_bf16 < found.rounded_once < BF16 < found.tree < found.ring
    assert found.sent_in_bf16 < found.sent_in_8_bits


@pytest.mark.parametrize("figure", ["sent_in_bf16", "sent_in_8_bits"])
def test_what_the_wire_loses_averages_out(over_ranks: dict[int, Reduced], figure: str) -> None:
    """With eight times as many ranks the error is smaller by the root of eight, within a quarter."""
    errors = [getattr(over_ranks[ranks], figure) for ranks in RANKS]
    for more, fewer in zip(errors, errors[1:], strict=False):
        assert more / fewer == pytest.approx(math.sqrt(8), rel=0.25)


def test_a_ring_loses_more_the_more_ranks_there_are(over_ranks: dict[int, Reduced]) -> None:
    assert 8 * over_ranks[8].ring < over_ranks[512].ring


def test_8_bits_are_rounded_differently_on_each_rank() -> None:
    """With equal gradients on all ranks, errors of 8 bits average out, since what one rank rounds up another rounds
    down. Errors of bf16 do not: it is rounded to nearest."""
    few, many = (reduce(ranks, Gradients(elements=1024, seed=3, noise=0.0)) for ranks in (8, 512))
    assert many.sent_in_8_bits < few.sent_in_8_bits / 6
    assert many.sent_in_bf16 == pytest.approx(few.sent_in_bf16, rel=0.01)


def test_any_number_of_ranks() -> None:
    one = reduce(1, GRADIENTS)
    assert one.ring == one.tree == one.sent_in_bf16 == one.rounded_once
    assert reduce(7, GRADIENTS).tree < 2 * BF16


def test_micro_batches() -> None:
    found = {count: accumulate(count, GRADIENTS) for count in MICRO_BATCHES}
    assert found[1] == Accumulated(1, 0.0, 0.0, 0.0), "what is there once is not rounded"
    for count in MICRO_BATCHES[1:]:
        assert found[count].fp32 < 1e-7 < found[count].rounded_once < BF16 < found[count].bf16
    assert found[16].bf16 < found[64].bf16 < found[256].bf16
    assert found[256].bf16 > 8 * found[256].rounded_once


def test_figures_are_a_function_of_the_seed() -> None:
    assert reduce(8, GRADIENTS) == reduce(8, GRADIENTS) != reduce(8, GRADIENTS._replace(seed=4))


def test_gradients_have_a_signal_and_noise() -> None:
    first, second = GRADIENTS(2)
    assert (first - second).std() == pytest.approx(math.sqrt(2), rel=0.1)
    assert torch.corrcoef(torch.stack([first, second]))[0, 1] == pytest.approx(0.5, abs=0.1)
    assert torch.equal(next(GRADIENTS(5)), first)


def test_the_command_prints_tables_and_writes_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "accuracy.json"
    sizes = ["--ranks", "2", "1100", "--micro-batches", "4", "--elements", "128", "--seed", "5"]
    assert command.main(["accuracy", *sizes, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["elements"], found["seed"]) == (128, 5) and "128 elements" in text and "seed 5" in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert [row[0] for row in rows if row[0][:1].isdigit()] == ["2", "1,100", "4"]
    for row, figures in zip(
        (row for row in rows if row[0][:1].isdigit()), found["ranks"] + found["micro_batches"], strict=True
    ):
        assert row[1:] == [f"{figure:.1e}" for figure in list(figures.values())[1:]]
    assert found["ranks"][0] == reduce(2, Gradients(128, 5))._asdict()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--elements", "100"], "100; a multiple of 128", id="elements"),
        pytest.param(["--ranks", "0"], "--ranks", id="no rank"),
        pytest.param(["--json", "/nowhere/figures.json"], "/nowhere", id="folder"),
        pytest.param(["--rows", "wall"], "--rows", id="another benchmark's option"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["accuracy", *arguments])
    assert words in capsys.readouterr().err
