"""Optimizers of others for GPUs: which share of the wall of their own bytes they reach, and ours beside them.

The wall is a copy on the device of as many bytes as the optimizer has to read and write. A peer that is not installed
is skipped by name."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench import optimizer_configs, workload
from bench.figures import Bar
from bench.gpu_work import copy_of, waited
from bench.optimizer_configs import CONFIGURATIONS, Training
from bench.peers import BETA1, BETA2, DECAY, EPS, LR, Unavailable, first_line
from bench.row import Bench
from bench.timing import ratio, spread
from bench.workload import Shapes

_STEPS = 3


class _Peer(NamedTuple):
    what: str
    module: str
    """The Python package that has it."""
    optimizer: str
    """The name of its class."""
    options: dict[str, Any]
    traffic: float
    """Bytes per parameter that a step reads and writes."""
    of: str
    """Our configuration to compare with: as many bytes, or the nearest."""


# FlashOptim: p, g; a correction of the weight of 8 or 16 bits; 8-bit m, v with an fp16 scale for 32 elements.
_FLASH_STATES = 2 + 2 + 2 + 4 * (1 + 2 / 32)
PEERS = {
    "flash24": _Peer(
        "FlashOptim AdamW, 24-bit masters",
        "flashoptim",
        "FlashAdamW",
        {"master_weight_bits": 24, "eps": EPS},
        _FLASH_STATES + 2,
        "8bit",
    ),
    "flash32": _Peer(
        "FlashOptim AdamW, 32-bit masters",
        "flashoptim",
        "FlashAdamW",
        {"master_weight_bits": 32, "eps": EPS},
        _FLASH_STATES + 4,
        "8bit",
    ),
    # bitsandbytes: p, g; 8-bit m, v with an fp32 scale for 256 elements; no masters.
    "bitsandbytes": _Peer(
        "bitsandbytes AdamW8bit",
        "bitsandbytes.optim",
        "AdamW8bit",
        {"eps": EPS},
        2 + 2 + 2 + 4 * (1 + 4 / 256),
        "8bit",
    ),
}


def _theirs(peer: _Peer, shapes: Shapes, seed: int, device: str) -> Training:
    """Raises Unavailable if the package is not installed or its first step fails."""
    try:
        make: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module(peer.module), peer.optimizer)
    except ImportError as error:
        raise Unavailable(f"{peer.module} cannot be imported: {error}") from None
    params = workload.make(shapes, torch.bfloat16, seed, device)
    theirs = Training(make(params, lr=LR, betas=(BETA1, BETA2), weight_decay=DECAY, **peer.options))
    try:
        waited(theirs.step, 1)()
    except Exception as error:  # a package for another torch or Triton fails in many ways
        raise Unavailable(f"its first step failed: {first_line(error)}") from None
    return theirs


def shares(bench: Bench, name: str, device: str) -> None:
    """Adds one figure: our share of the wall of our bytes, less theirs of theirs."""
    peer = PEERS[name]
    what = f"{peer.what}: our share of the wall of our bytes, less theirs of theirs"
    try:
        theirs = _theirs(peer, bench.flat, bench.seed, device)
    except Unavailable as error:
        bench.skip("peers", what, error)
        return
    configuration = CONFIGURATIONS[peer.of]
    ours = optimizer_configs.ours(configuration, bench.flat, bench.seed, device)
    contenders = {
        "copy of theirs": waited(copy_of(peer.traffic, bench.params, device), _STEPS),
        "theirs": waited(theirs.step, _STEPS),
        "copy of ours": waited(copy_of(configuration.traffic, bench.params, device), _STEPS),
        "ours": waited(ours.step, _STEPS),
    }
    times = bench.run(f"peers {name}", contenders, bench.rounds)
    share = {
        who: [wall / own for wall, own in zip(times[f"copy of {who}"], times[who], strict=True)]
        for who in ("ours", "theirs")
    }
    found = spread([a - b for a, b in zip(share["ours"], share["theirs"], strict=True)])
    beside = {
        "our share": ratio(times, "copy of ours", "ours").median,
        "their share": ratio(times, "copy of theirs", "theirs").median,
        "their time / ours": ratio(times, "theirs", "ours").median,
    }
    bench.add("peers", what, found, Bar(0.0, 0.1), beside)
