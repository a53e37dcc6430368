"""The rows of `bench comm`: which contenders are compared over which network, and the targets of the ratios."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench import timing
from bench.comm.contenders import BUCKETS
from bench.comm.networks import LINKS
from bench.comm.rank import Answer
from bench.figures import Bar
from bench.timing import Spread, Times


@dataclass(frozen=True)
class Found:
    """The findings of one job, combined over the ranks."""

    link: str
    seconds: Times  # of a step, one per round: the slowest rank's
    cpu: Times  # processor seconds of a step on all of a rank's threads, the mean over the ranks
    sent: Times  # bytes that a rank sent in a step, the mean over the ranks
    wire_bytes: dict[str, float]  # the same by torch_ext's own count; peers have none
    errors: dict[str, float]
    refused: dict[str, str]


def found(link: str, answers: Sequence[Answer], shared: bool) -> Found:
    """Combines the ranks' answers. shared: whether each rank counted the bytes of all ranks."""
    first, ranks = answers[0], len(answers)

    def rounds(of_rank: list[Times], combine: Callable[[tuple[float, ...]], float]) -> Times:
        return {who: [combine(each) for each in zip(*(r[who] for r in of_rank), strict=True)] for who in of_rank[0]}

    return Found(
        link,
        rounds([a.seconds for a in answers], max),
        rounds([a.cpu for a in answers], statistics.mean),
        rounds([a.sent for a in answers], lambda each: statistics.mean(each) / (ranks if shared else 1)),
        {who: statistics.mean(a.wire_bytes[who] or 0 for a in answers) for who, n in first.wire_bytes.items() if n},
        first.errors,
        first.refused,
    )


class Versus(NamedTuple):
    """One comparison of a row."""

    ours: str
    theirs: tuple[str, ...] = ()  # if several: one peer in several settings, of which the best counts
    bar: Bar | None = None


class Value(NamedTuple):
    """The result of a comparison."""

    spread: Spread
    theirs: str  # the peer's setting that was the best
    beside: dict[str, float]


# -- what is compared --------------------------------------------------------------------------------------------------


# Bytes on the link / bytes that the interface counts. The interface counts segments of up to 64 KB, before they are cut
# into packets with headers of their own.
_FRAMING = 1514 / 1448


def _time(f: Found, versus: Versus) -> Value:
    """Compares the time of a step. Adds the time that the link alone would need if it were always busy."""
    theirs = _best(f.seconds, versus.theirs)
    beside: dict[str, float] = {}
    for whose, who in (("", versus.ours), ("theirs ", theirs)):
        beside |= {f"{whose}ms": _ms(f.seconds[who]), f"{whose}CPU ms": _ms(f.cpu[who])}
    link = LINKS[f.link]
    if link is not None:
        beside["link's ms"] = _FRAMING * statistics.median(f.sent[versus.ours]) * 8 / link.bits_per_second * 1e3
    return Value(timing.ratio(f.seconds, versus.ours, theirs), theirs, beside)


def _bytes(f: Found, versus: Versus) -> Value:
    """Compares the bytes that a rank sends in a step, rounded to as many digits as the target has."""
    theirs = _best(f.sent, versus.theirs)
    exact = timing.ratio(f.sent, versus.ours, theirs)
    beside = {"ratio": exact.median}
    beside |= {
        f"{who}MB": statistics.median(f.sent[name]) / 1e6 for who, name in (("", versus.ours), ("theirs ", theirs))
    }
    if versus.ours in f.wire_bytes:
        beside["wire_bytes() MB"] = f.wire_bytes[versus.ours] / 1e6
    return Value(Spread(*(round(value, 2) for value in exact)), theirs, beside)


_LEAST_EXPOSED = 1e-4  # seconds; a smaller difference of two times is noise


def _exposed(f: Found, versus: Versus) -> Value:
    """Compares the exposed time: how much longer a step takes than one without any exchange."""
    exposed = {
        who: [max(t - alone, _LEAST_EXPOSED) for t, alone in zip(times, f.seconds[ALONE], strict=True)]
        for who, times in f.seconds.items()
    }
    theirs = _best(exposed, versus.theirs)
    beside = {"ms": _ms(exposed[versus.ours]), ALONE + " ms": _ms(f.seconds[ALONE])}
    beside |= {f"{who} ms": _ms(exposed[who]) for who in versus.theirs if who in exposed}
    return Value(timing.ratio(exposed, versus.ours, theirs), theirs, beside)


def _error(f: Found, versus: Versus) -> Value:
    """Compares the relative errors of the gradient; without a peer the value is our error itself."""
    error = f.errors[versus.ours]
    beside = {"error": error} | {f"{who}, error": f.errors[who] for who in versus.theirs}
    value = error / f.errors[versus.theirs[0]] if versus.theirs else error
    return Value(Spread(value, value, value), versus.theirs[0] if versus.theirs else "", beside)


def _best(values: Times, who: Sequence[str]) -> str:
    """Returns the contender with the smallest median."""
    return min((name for name in who if name in values), key=lambda name: statistics.median(values[name]))


def _ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


# -- the table ---------------------------------------------------------------------------------------------------------

ALONE = "alone"


@dataclass(frozen=True)
class Row:
    """A row: its comparisons, and the networks over which they are made."""

    links: tuple[str, ...]
    ranks: tuple[int, ...]
    value: Callable[[Found, Versus], Value]
    versus: tuple[Versus, ...]
    kind: str = "timing"  # the kind of its job, a key of rank.KINDS
    compute: float = 0.0  # seconds slept in a backward
    besides: tuple[str, ...] = field(default=())  # further contenders that every comparison needs

    @property
    def contenders(self) -> list[str]:
        return [*self.besides, *(who for versus in self.versus for who in (versus.ours, *versus.theirs))]


def _less(at_least: float, goal: float) -> Bar:
    return Bar(at_least, goal, lower_is_better=True)


_BF16, _FP32 = ("DDP bf16",), ("DDP fp32",)
_ONE_GIGABIT: tuple[tuple[str, ...], tuple[int, ...]] = (("1 Gbit/s",), (2, 4))

ROWS: dict[str, Row] = {
    "bytes": Row(
        ("loopback",),
        (2,),
        _bytes,
        (
            Versus("no_shard bf16", _FP32, _less(0.51, 0.50)),
            Versus("no_shard bf16, compressed", _FP32),
            Versus("optim bf16, as it is", _FP32),
            Versus("optim bf16, compressed", _FP32),
            Versus("optim fp8", _FP32, _less(0.40, 0.38)),
            Versus("no_shard fp8", _FP32, _less(0.28, 0.26)),
            Versus("no_shard fp8, bf16 sums", _FP32),
        ),
    ),
    "ddp_bf16": Row(
        *_ONE_GIGABIT,
        _time,
        (
            Versus("no_shard bf16", _BF16, _less(1.03, 0.97)),
            Versus("no_shard bf16, as it is", _BF16),
            Versus("no_shard fp8", _BF16, _less(0.80, 0.60)),
            Versus("no_shard fp8, bf16 sums", _BF16),
        ),
    ),
    "hook": Row(
        *_ONE_GIGABIT,
        _time,
        (
            Versus("hook bf16", _BF16, _less(1.0, 0.85)),
            Versus("hook bf16, as it is", _BF16),
            Versus("hook bf16, compressed", _BF16),
        ),
    ),
    "ddp_fp32": Row(*_ONE_GIGABIT, _time, (Versus("no_shard bf16", _FP32, _less(0.57, 0.52)),)),
    "zero": Row(
        *_ONE_GIGABIT,
        _time,
        (Versus("optim bf16", ("ZeRO on DDP bf16",), _less(0.62, 0.52)),),
    ),
    "fsdp2": Row(
        *_ONE_GIGABIT,
        _time,
        (Versus("optim_grads_params bf16", ("FSDP2 fp32 reduction",), _less(0.80, 0.60)),),
    ),
    "exposed": Row(
        *_ONE_GIGABIT,
        _exposed,
        (
            Versus("no_shard bf16", tuple(BUCKETS), _less(1.0, 0.8)),
            Versus("no_shard bf16, as it is", tuple(BUCKETS)),
        ),
        compute=0.15,
        besides=(ALONE,),
    ),
    "loopback": Row(
        ("loopback",),
        (2,),
        _time,
        (
            Versus("no_shard bf16", _BF16, _less(1.05, 0.90)),
            Versus("no_shard bf16, compressed", _BF16),
            Versus("hook bf16", _BF16),
        ),
    ),
    "ten": Row(
        ("10 Gbit/s",),
        (2,),
        _time,
        (
            Versus("no_shard bf16", _BF16),
            Versus("no_shard bf16, as it is", _BF16),
            Versus("no_shard bf16, compressed", _BF16),
            Versus("no_shard bf16", _FP32),
            Versus("no_shard fp8", _BF16),
            Versus("optim bf16", ("ZeRO on DDP bf16",)),
            Versus("optim_grads_params bf16", ("FSDP2 fp32 reduction",)),
        ),
    ),
    "accuracy": Row(
        ("loopback",),
        (4,),
        _error,
        (
            Versus("optim, 1 micro-batch", (), _less(1e-6, 1e-7)),
            Versus("optim, 16 micro-batches", ("DDP bf16, 16 micro-batches",), _less(1 / 2, 1 / 3)),
        ),
        kind="accuracy",
    ),
}
