"""Bounds on the error that rounding causes. `python tests/bench --quality` prints the same experiments in full."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from bench import __main__ as command
from bench.accuracy.rounding import Decay, Track, follow_moments, follow_remainders, follow_weights

torch.set_num_threads(1)

ROOT = pathlib.Path(os.path.abspath(__file__)).parents[2]

# Format of v (exp_avg_sq) -> bound of the rms error of the step length, 1/sqrt(v), from the end of the warm-up on.
STEP_ERROR = {"fp32": 1e-5, "bf16": 0.02, "8-bit": 0.11}
DECAY = Decay(elements=8192)


@pytest.fixture(scope="module")
def dithered() -> dict[str, Track]:
    """Returns tracks of dithered v (exp_avg_sq) by format, with beta2 = 0.999: v follows gradients that have become ten
    times smaller."""
    tracks, _ = follow_moments(DECAY, [(state, "dithered") for state in STEP_ERROR], seed=0)
    return {track.state: track for track in tracks}


@pytest.mark.parametrize("state", STEP_ERROR)
def test_dithered_step_length_throughout_a_decay(dithered: dict[str, Track], state: str) -> None:
    samples = dithered[state].after(DECAY.warmup)
    assert len(samples) > DECAY.decay / DECAY.every
    assert max(sample.step_error for sample in samples) <= STEP_ERROR[state]


@pytest.mark.parametrize("state", STEP_ERROR)
def test_dithered_v_arrives_at_the_true_mean(dithered: dict[str, Track], state: str) -> None:
    assert abs(dithered[state].at(DECAY.steps).mean - 1) <= 0.01


@pytest.mark.parametrize("state", STEP_ERROR)
def test_dithered_v_has_the_true_mean_on_the_way(dithered: dict[str, Track], state: str) -> None:
    """Also in every sample during the decay, not only at its end."""
    assert max(abs(sample.mean - 1) for sample in dithered[state].after(DECAY.warmup)) <= 0.01


def test_other_roundings_are_worse() -> None:
    """Rounding to nearest does not move v at all; stochastic rounding moves it by a random walk."""
    decay = Decay(elements=2048, decay=2000, every=2000 + 1000)
    kinds = [(state, rounding) for state in ("bf16", "8-bit") for rounding in ("nearest", "stochastic", "dithered")]
    tracks, _ = follow_moments(decay, kinds, seed=0)
    error = {(track.state, track.rounding): track.at(decay.steps).step_error for track in tracks}
    for state in ("bf16", "8-bit"):
        assert 2 * error[state, "dithered"] < error[state, "stochastic"] < error[state, "nearest"]


# -- bf16 weights without a master --------------------------------------------------------------------------------

# rounding -> steps -> bounds of the rms error, relative to the update, after so many steps
WEIGHT_ERROR = {
    "nearest": {200: (0.98, 1.0), 2000: (0.98, 1.0)},  # nearly every update is lost
    "stochastic": {200: (0.40, 0.50), 2000: (0.12, 0.17)},
    "dithered": {200: (0.0, 0.17), 2000: (0.0, 0.023)},
    "floor": {200: (0.0, 0.11), 2000: (0.0, 0.010)},
}


def test_weights_without_a_master() -> None:
    errors = follow_weights((200, 2000), seed=0, elements=4096)
    assert [error.rounding for error in errors] == list(WEIGHT_ERROR)
    for error in errors:
        for step, (least, most) in WEIGHT_ERROR[error.rounding].items():
            assert least <= error.shares[step] <= most, (error.rounding, step)


# -- remainders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_G4_remainders_are_fp32_masters_under_the_rule(seed: int) -> None:
    """Equal to the bit in every step. An element that never has the one inexact bit pattern is equal without the rule
    for it."""
    check = follow_remainders(steps=800, seed=seed)
    assert check.differ_from_rule == 0
    assert check.differ_unmet == 0
    # Half of all weights are even, so one bit pattern in 2^17 is inexact. It must occur, and be as rare as that.
    assert 5 <= check.elements_met <= check.met < 3 * check.element_steps / 2**17


# -- the commands -------------------------------------------------------------------------------------------------


def test_bench_prints_tables_and_draws_v(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--quality", "--quick", "--pictures", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = ("| 8-bit      | dithered   |", "| floor      |", "|    0 |")
    for start in tables:
        assert any(line.startswith(start) for line in lines), start
    assert (tmp_path / "v_against_step.png").stat().st_size > 10_000


def test_losses_of_every_wire(tmp_path: pathlib.Path) -> None:
    """In seconds, it shows that each wire format trains and is reported. Losses that mean something take minutes."""
    script = [sys.executable, "examples/gpt/wires.py", "--quick"]
    environment = os.environ | {"OUT_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert sum(row.startswith("| fp32 wire") for row in rows) == 3
    assert sum(row.startswith("| 8-bit wire") for row in rows) == 3
    assert (tmp_path / "wires.png").stat().st_size > 10_000
