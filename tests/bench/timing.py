"""How contenders are timed: in turn, round after round, and compared within each round.

The bandwidth of a shared machine changes from second to second, so two times from different moments are not compared. A
figure is the median of the ratios of all rounds, printed with the least and the largest ratio.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Times = dict[str, list[float]]  # contender -> seconds, one per round

_WARM_UP = 2  # calls of each contender before the first round: they create state, touch memory, start threads


class Spread(NamedTuple):
    """The median of a figure over the rounds, with the least and the largest."""

    median: float
    least: float
    most: float


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def interleave(contenders: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Returns the seconds of each call, `rounds` of each contender. Every second round runs in reverse order, so that
    neither the order nor a drift of the machine favours a contender."""
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
    """Returns the time of `of` / time of `to`, round by round."""
    return spread([a / b for a, b in zip(times[of], times[to], strict=True)])


def worst(times: Times, name: str) -> Spread:
    """Returns the longest round / the median round, as a Spread: its `least` is the shortest round / the median round,
    its `most` the same value again."""
    median = statistics.median(times[name])
    return Spread(max(times[name]) / median, min(times[name]) / median, max(times[name]) / median)
