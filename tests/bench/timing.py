"""How contenders are timed: in turn, round after round, and compared within each round.

The bandwidth of a shared machine changes from second to second, so a figure is never one time beside another that was
taken at another moment: it is the median of the ratios of the rounds, with the least and the largest beside it.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Times = dict[str, list[float]]  # contender -> seconds, one per round

_WARM_UP = 2  # calls of each contender before the first round: state is made, memory touched, threads started


class Spread(NamedTuple):
    """The median of a figure over the rounds, and how far the rounds lie apart."""

    median: float
    least: float
    most: float


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def interleave(contenders: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Seconds of each call, `rounds` of each contender. Every other round goes backwards, so that who runs after whom,
    and a machine that drifts, favour nobody."""
    for step in contenders.values():
        for _ in range(_WARM_UP):
            step()
    times: Times = {name: [] for name in contenders}
    turn = list(contenders.items())
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, step in turn:
                begin = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - begin)
            turn.reverse()
    finally:
        if was_on:
            gc.enable()
    return times


def ratio(times: Times, of: str, to: str) -> Spread:
    """Time of `of` / time of `to`, round by round."""
    return spread([a / b for a, b in zip(times[of], times[to], strict=True)])


def worst(times: Times, name: str) -> Spread:
    """The longest round / the median one; beside it, the shortest / the median and the longest again."""
    median = statistics.median(times[name])
    return Spread(max(times[name]) / median, min(times[name]) / median, max(times[name]) / median)
