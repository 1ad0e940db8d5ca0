"""Interleaved timing, paired ratios with confidence intervals, and crossover lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

MIN_ROUNDS, MAX_ROUNDS = 5, 200
BOOTSTRAP_SAMPLES = 1000
CONFIDENCE = 0.95

Times = dict[str, list[float]]


class Ratio(NamedTuple):
    """The median of paired ratios, its 95 % confidence interval, and the number of pairs."""

    median: float
    low: float
    high: float
    pairs: int


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    repeat: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Time calls in rotating order (A B C, B C A, C A B, ...) after a warm-up round.

    The rotation keeps a call from always following the same other one.

    Args:
        calls: What to time, by name.
        seconds: Wall time after which no new round is started.
        min_rounds: Rounds to run in any case.
        max_rounds: Rounds to run at most.
        repeat: Calls per turn; the time of a turn is divided by it.
        clock: Returns seconds.
    """
    for call in calls.values():
        call()
    times: Times = {name: [] for name in calls}
    order = [*calls.items()]
    start = time.perf_counter()
    for done in range(max_rounds):
        if done >= min_rounds and time.perf_counter() - start > seconds:
            break
        for name, call in order:
            begin = clock()
            for _ in range(repeat):
                call()
            times[name].append((clock() - begin) / repeat)
        if len(order) > 2:  # with two, each would follow itself
            order.append(order.pop(0))
    return times


def paired_ratio(slow: Sequence[float], fast: Sequence[float], *, seed: int = 0) -> Ratio:
    """Return how many times faster the second is, with a bootstrap interval (Efron 1979).

    Times of the same round are paired, so that a slow phase of the machine affects both.
    """
    ratios = np.asarray(slow, float) / np.asarray(fast, float)
    samples = np.random.default_rng(seed).integers(
        len(ratios), size=(BOOTSTRAP_SAMPLES, len(ratios))
    )
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(np.median(ratios[samples], 1), tails)
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def relative_spread(times: Sequence[float]) -> float:
    """Return the distance between the 10 % and 90 % quantiles, relative to the median."""
    low, high = np.quantile(np.asarray(times), [0.1, 0.9])
    return float((high - low) / median(times))


def crossover(ratios: Iterable[tuple[int, float]]) -> int | None:
    """Return the first length from which on the ratio is never below 1, if any."""
    points = sorted(ratios)
    last_slower = max((n for n, ratio in points if ratio < 1), default=0)
    return next((n for n, _ in points if n > last_slower), None)
