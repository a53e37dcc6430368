"""Compares the simulator's predictions for the model of `bench comm` at 1 Gbit/s with measured times."""

import os
from typing import NamedTuple

import torch
from torch import nn

from bench.comm import comm_rows, launcher
from bench.comm.contenders import FULL, ONE_RANK, Stack
from bench.comm.networks import LINKS, Unavailable, network
from bench.comm.rank import Job, Question
from bench.cost.simulator import Case, Cluster, Link, Model, predict
from torch_ext.policy.loader import load_policy

_LINK, _LIMIT = "1 Gbit/s", 500.0
_PAYLOAD = 1448 / 1514
"""The fraction of a packet that is data; the rest is headers and framing."""

# Measured separately, on an idle processor: a message costs it half a millisecond, and adding up 32 MB takes 4 ms.
_LATENCY, _POST, _SUM = 1e-4, 5e-4, 8e9

STRATEGIES = {
    "no_shard bf16, as it is": "no_shard",
    "optim bf16, as it is": "optim",
    "optim_grads_params bf16": "optim_grads_params",
}
"""Contender of `bench comm` -> strategy."""


def compare(rounds: int) -> list[str]:
    """Returns a line for each number of ranks, computation and strategy. The least of `rounds` times counts, since
    other load only adds to a time."""
    lines = ["N, ms slept in backward, strategy: ms predicted, measured; ratio"]
    for ranks in (2, 4):
        try:
            with network(_LINK, ranks) as places:
                jobs = [Job("timing", ["alone", *STRATEGIES, *ONE_RANK], rounds, seconds) for seconds in (0.0, 0.15)]
                question = Question(ranks, places[0].interface, FULL, 0, jobs)
                answers, why = launcher.ask(question, places, _LIMIT)
        except Unavailable as unavailable:
            return [*lines, f"N = {ranks}: {unavailable}"]
        for job, of_ranks in zip(jobs, answers, strict=False):
            found = comm_rows.found(_LINK, of_ranks, False)
            least = {who: min(seconds) for who, seconds in found.seconds.items()}
            lines += [
                f"{ranks}, {job.compute * 1e3:.0f}, {strategy}: {predicted * 1e3:.1f}, {least[who] * 1e3:.1f}; "
                f"{predicted / least[who]:.2f}"
                for who, strategy in STRATEGIES.items()
                if who in least
                for predicted in [seconds_of(strategy, ranks, _work(least, strategy, ranks))]
            ]
        lines += [why] * bool(why)
    return lines


class Work(NamedTuple):
    """Seconds of a rank's processor for a step, without the exchange."""

    backward: float  # forward included, which takes hardly any time
    step: float


def _work(least: dict[str, float], strategy: str, ranks: int) -> Work:
    """Computes the work from the times of steps without exchange, which all ranks made at the same time.

    `optim` without exchange takes longer than a plain step by the optimizer's step, which is divided among the ranks.
    FSDP2's further time is that of its copies, which are not divided."""
    alone, optim = least["alone"], least["optim, one rank"]
    if strategy == "no_shard":
        return Work(least["no_shard, one rank"], 0.0)
    step = max(0.0, optim - max(alone, least["no_shard, one rank"]))
    whole = least[f"{strategy}, one rank"]
    return Work(max(alone, whole - step), step / ranks)


def seconds_of(strategy: str, ranks: int, work: Work) -> float:
    """Returns the predicted seconds of a step."""
    link = LINKS[_LINK]
    assert link is not None
    wire = Link(_LATENCY, link.bits_per_second / 8 * _PAYLOAD)
    shared = max(1.0, ranks / (os.cpu_count() or 1))  # processors
    cluster = Cluster(1, wire, wire, post_seconds=_POST * shared, sum_bytes_per_second=_SUM / shared)
    shapes: nn.Module = Stack(FULL, [], 0.0).to(torch.bfloat16)
    policy = load_policy(shapes, override_ddp_config={"grad_comm_compression": "off"})
    model = Model.of(shapes, policy)._replace(backward_seconds=work.backward, step_seconds=work.step)
    (cost,) = predict([Case(cluster, model, strategy, ranks)])
    return cost.seconds
