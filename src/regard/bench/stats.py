"""Times that were taken in turns, and what can be said of them: medians of paired ratios, and from which length on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

LEAST, MOST = 5, 200  # rounds
DRAWS = 1000  # of the bootstrap
SURE = 0.95  # the share of intervals that hold the true ratio

Times = dict[str, list[float]]


class Ratio(NamedTuple):
    """The median of ratios of neighbours in time, an interval that holds it in 95 of 100 measurements, and how many pairs."""

    median: float
    low: float
    high: float
    pairs: int


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    least: int = LEAST,
    most: int = MOST,
    at_once: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """The seconds of each call, A B C B C A C A B ..., after a round to warm up: nobody always comes after the same.

    Rounds go on until `processor_seconds` of the wall are over or there were `most`; there are always `least`.  A turn is `at_once`
    calls, and its time that of one of them.
    """
    for call in calls.values():
        call()
    times: Times = {name: [] for name in calls}
    order = [*calls.items()]
    start = time.perf_counter()
    for done in range(most):
        if done >= least and time.perf_counter() - start > seconds:
            break
        for name, call in order:
            begin = clock()
            for _ in range(at_once):
                call()
            times[name].append((clock() - begin) / at_once)
        if len(order) > 2:  # two would each come after themselves then
            order.append(order.pop(0))
    return times


def paired_ratio(slow: Sequence[float], fast: Sequence[float], *, seed: int = 0) -> Ratio:
    """How many times faster the second is: neighbours are paired, so that a slow minute of the machine hits both.

    The interval is the bootstrap's (Efron 1979): medians of pairs that are drawn again, with replacement.
    """
    pairs = np.asarray(slow, float) / np.asarray(fast, float)
    drawn = np.random.default_rng(seed).integers(len(pairs), size=(DRAWS, len(pairs)))
    low, high = np.quantile(np.median(pairs[drawn], 1), [(1 - SURE) / 2, (1 + SURE) / 2])
    return Ratio(float(np.median(pairs)), float(low), float(high), len(pairs))


def relative_spread(times: Sequence[float]) -> float:
    """How far the slow tenth of the times lies above the fast tenth, as a share of the median."""
    low, high = np.quantile(np.asarray(times), [0.1, 0.9])
    return float((high - low) / median(times))


def crossover(ratios: Iterable[tuple[int, float]]) -> int | None:
    """(length, times faster) -> the first length from which on it is never slower; None: there is none so far."""
    found = sorted(ratios)
    slower = [n for n, times in found if times < 1]
    return next((n for n, _ in found if not slower or n > slower[-1]), None)
