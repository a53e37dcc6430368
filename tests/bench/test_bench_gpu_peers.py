"""Tests the rows that compare our step on a GPU with optimizers of others, here on the CPU with packages that the test
makes."""

import sys
import time
import types
from typing import Any

import pytest
import torch

from bench import gpu_peer_rows
from bench.figures import Findings
from bench.row import Bench

PARAMS = 4096


class Slow(torch.optim.SGD):
    """Stands for an optimizer of others: takes its arguments, and each step takes 20 ms."""

    def __init__(self, params: Any, lr: float, betas: Any, weight_decay: float, **options: Any) -> None:
        super().__init__(params, lr=lr)
        assert betas == (0.9, 0.999) and set(options) <= {"eps", "master_weight_bits"}

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.02)


class Refusing(Slow):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("this needs a GPU\nand more")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return Bench(PARAMS, [], 3, 1, [], 0, Findings())


def _installed(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    for name, optimizer in {(peer.module, peer.optimizer) for peer in gpu_peer_rows.PEERS.values()}:
        package = types.ModuleType(name)
        setattr(package, optimizer, kind)
        monkeypatch.setitem(sys.modules, name, package)


@pytest.mark.parametrize("name", gpu_peer_rows.PEERS)
def test_shares_are_of_the_bytes_of_each(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, Slow)
    gpu_peer_rows.shares(bench, name, "cpu")
    (figure,) = bench.findings.figures
    times = bench.findings.times[f"peers {name}"]
    ours, theirs = (
        sorted(a / b for a, b in zip(times[f"copy of {who}"], times[who], strict=True))[1] for who in ("ours", "theirs")
    )
    assert (figure.beside["our share"], figure.beside["their share"]) == (ours, theirs)
    by_round = zip(*(times[who] for who in ("copy of ours", "ours", "copy of theirs", "theirs")), strict=True)
    assert figure.value.median == sorted(a / b - c / d for a, b, c, d in by_round)[1]
    assert figure.beside["their time / ours"] > 1 and min(times["theirs"]) >= 3 * 0.02
    assert figure.bar is not None and figure.bar.at_least == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Refusing, "its first step failed: ValueError: this needs a GPU"), (None, "cannot be imported")],
    ids=["raises", "missing"],
)
def test_a_peer_that_cannot_run_is_skipped_by_name(
    kind: Any, said: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is None:
        for peer in gpu_peer_rows.PEERS.values():
            monkeypatch.setitem(sys.modules, peer.module, None)
    else:
        _installed(monkeypatch, kind)
    for name in gpu_peer_rows.PEERS:
        gpu_peer_rows.shares(bench, name, "cpu")
    assert bench.findings.figures == []
    assert [skip.why.endswith(said) or said in skip.why for skip in bench.findings.skips] == [True] * 3
    assert all(
        skip.what.startswith(peer.what)
        for skip, peer in zip(bench.findings.skips, gpu_peer_rows.PEERS.values(), strict=True)
    )


def test_the_bytes_of_a_step() -> None:
    traffic = {name: peer.traffic for name, peer in gpu_peer_rows.PEERS.items()}
    assert traffic == {"flash24": 12.25, "flash32": 14.25, "bitsandbytes": 10.0625}
