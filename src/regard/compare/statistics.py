"""Differences of metrics between two mechanisms: paired on the test examples and over seeds.

The variance of a mean difference over k seeds has two parts: that of the seeds, s² / k from the
differences d_s of each seed, and that of the examples, from the influence of each example on the
difference of the metrics. The first is known to k - 1 degrees of freedom only. Those of Welch and
Satterthwaite are estimated from s itself, and with two seeds 9 % of equal mechanisms were called
different at a level of 5 %. So, in the manner of Cochran & Cox (1950), the mean difference is
referred to a mixture of Student's t with k - 1 degrees of freedom and of the normal distribution,
weighted by the two parts of the variance. With one seed there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.tasks.metrics import MeanMetric, Metric, UndefinedMetric

LEVEL = 0.05  # of significance, and 1 - LEVEL of the intervals
BOOTSTRAP_SAMPLES = 400
MAX_ITERATIONS, PRECISION = 300, 1e-14  # of the continued fraction


class Estimate(NamedTuple):
    """A mean difference over seeds: its 95 % interval and p-value, NaN for a single seed.

    `example_error` is the standard error that comes from the choice of the test examples alone.
    """

    value: float
    low: float
    high: float
    p: float
    example_error: float
    seeds: int


def paired_difference(
    metric: Metric, ours: Sequence[Tensor], theirs: Sequence[Tensor], *, level: float = LEVEL
) -> Estimate:
    """Return the mean over seeds of metric(ours) - metric(theirs), with its uncertainty.

    Args:
        ours, theirs: Statistics (n, k) of the same test examples for each seed; pairs share a seed.

    Raises:
        UndefinedMetric: The metric has no value on these examples.
    """
    by_seed = np.array(
        [metric.compute(a) - metric.compute(b) for a, b in zip(ours, theirs, strict=True)]
    )
    seeds, examples = len(by_seed), len(ours[0])
    value = float(by_seed.mean())
    if _has_mean(metric):
        influence = sum(
            _mean_influence(a) - _mean_influence(b) for a, b in zip(ours, theirs, strict=True)
        )
        example_variance = float(np.var(influence / seeds, ddof=1) / examples)
    else:
        example_variance = _bootstrap_variance(metric, ours, theirs)
    error = math.sqrt(example_variance)
    if seeds < 2:
        return Estimate(value, math.nan, math.nan, math.nan, error, seeds)
    seed_variance = float(by_seed.var(ddof=1)) / seeds
    total = seed_variance + example_variance
    if not total:  # the same predictions for all seeds
        return Estimate(value, value, value, float(value == 0), 0.0, seeds)
    weight, t = seed_variance / total, abs(value) / math.sqrt(total)
    half = mixed_quantile(1 - level / 2, weight, seeds - 1) * math.sqrt(total)
    p = 2 * (1 - mixed_cdf(t, weight, seeds - 1))
    return Estimate(value, value - half, value + half, p, error, seeds)


def _has_mean(metric: Metric) -> bool:
    """Whether the metric is a ratio of sums, so that the delta method applies."""
    return isinstance(metric, MeanMetric) and type(metric).compute is MeanMetric.compute


def _mean_influence(statistics: Tensor) -> np.ndarray:
    """Influence (n) of each example on the ratio of two sums (the delta method)."""
    total, count = statistics.double().numpy().T
    if not count.sum():
        raise UndefinedMetric("The metric has no value: no example has a target.")
    influence: np.ndarray = (total - total.sum() / count.sum() * count) / count.mean()
    return influence


def _bootstrap_variance(metric: Metric, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Variance of the mean difference when examples are drawn again (Efron 1979)."""
    generator = torch.Generator().manual_seed(0)
    size, values = len(ours[0]), []
    for _ in range(BOOTSTRAP_SAMPLES):
        rows = torch.randint(size, (size,), generator=generator)
        try:
            differences = [
                metric.compute(a[rows]) - metric.compute(b[rows])
                for a, b in zip(ours, theirs, strict=True)
            ]
        except UndefinedMetric:  # such as no positive example in this draw
            continue
        values.append(sum(differences) / len(differences))
    return float(np.var(values, ddof=1)) if len(values) > 1 else math.inf


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979); NaN stays and does not count."""
    order = sorted(
        (i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i]
    )
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def mixed_cdf(t: float, weight: float, dof: float) -> float:
    """Return P(T <= t) of a mixture of Student's t, with this weight, and the normal
    distribution."""
    return weight * t_cdf(t, dof) + (1 - weight) * 0.5 * math.erfc(-t / math.sqrt(2))


def mixed_quantile(p: float, weight: float, dof: float) -> float:
    """Return t with P(T <= t) = p, for p above 1/2, by bisection."""
    low, high = 0.0, 1.0
    while mixed_cdf(high, weight, dof) < p:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if mixed_cdf(middle, weight, dof) < p:
            low = middle
        else:
            high = middle
    return high


def t_cdf(t: float, dof: float) -> float:
    """Return P(T <= t) of Student's t distribution."""
    tail = 0.5 * incomplete_beta(dof / 2, 0.5, dof / (dof + t * t))
    return 1 - tail if t > 0 else tail


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges fast
        return 1 - incomplete_beta(b, a, 1 - x)
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x)) / a
    tiny, c, value = 1e-300, 1.0, 1.0
    d = 0.0
    for i in range(MAX_ITERATIONS):
        m = i // 2
        if i == 0:
            numerator = 1.0
        elif i % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + numerator * d or tiny)
        c = 1 + numerator / c or tiny
        value *= c * d
        if i and abs(1 - c * d) < PRECISION:
            break
    return front * (value - 1)
