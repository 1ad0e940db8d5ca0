"""Tails of the hypergeometric distribution, for populations of any size and fractional counts.

`scipy.stats.hypergeom` takes integers only, and subtracts log-gammas: with a population of 10¹² a
difference of them is known to three digits. Loader's saddle-point form (2000) subtracts no large
numbers.
"""

from __future__ import annotations

import math

CONVERGED = 1e-16
LEAST_LOG = -1e6


def hypergeometric_log_cdf(x: int, marked: float, population: float, draws: float) -> float:
    """ln P(X <= x), where X of `draws` from a population are among its `marked` ones."""
    if x >= min(draws, marked):
        return 0.0
    if x < max(0.0, draws + marked - population):
        return LEAST_LOG
    mean = draws * marked / population
    if x <= mean:  # the terms fall quickly from x down
        total = term = 1.0
        k = float(x)
        while k > 0 and term > CONVERGED * total:
            term *= k * (population - marked - draws + k)
            term /= (marked - k + 1) * (draws - k + 1)
            total += term
            k -= 1
        return _log_pmf(x, marked, population, draws) + math.log(total)

    total = term = 1.0  # P(X > x): they fall quickly from x + 1 up
    k = x + 1.0
    while k < min(draws, marked) and term > CONVERGED * total:
        term *= max(marked - k, 0.0) * (draws - k)
        term /= (k + 1) * (population - marked - draws + k + 1)
        total += term
        k += 1
    above = math.exp(_log_pmf(x + 1, marked, population, draws)) * total
    return math.log1p(-min(above, 1 - CONVERGED))


def _log_pmf(x: float, marked: float, population: float, draws: float) -> float:
    share = draws / population
    return (
        _log_binomial(x, marked, share)
        + _log_binomial(draws - x, population - marked, share)
        - _log_binomial(draws, population, share)
    )


def _log_binomial(x: float, n: float, share: float) -> float:
    """ln of the binomial probability of x in n, with the Gamma function for fractions."""
    if n - x < 0:  # x is a whole number above a fractional n
        return LEAST_LOG
    if x == 0:
        return n * math.log1p(-share) if share < 1 else (0.0 if n == 0 else LEAST_LOG)
    if x == n:
        return n * math.log(share)
    return (
        _stirling_error(n)
        - _stirling_error(x)
        - _stirling_error(n - x)
        - _deviance(x, n * share)
        - _deviance(n - x, n * (1 - share))
        + 0.5 * math.log(n / (2 * math.pi * x * (n - x)))
    )


def _stirling_error(n: float) -> float:
    """ln Γ(n + 1) minus Stirling's approximation of it."""
    if n < 16:
        return math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    square = n * n
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / square) / square) / square) / n


def _deviance(x: float, mean: float) -> float:
    """x ln(x / mean) + mean − x."""
    ratio = (x - mean) / mean
    return mean * ((1 + ratio) * math.log1p(ratio) - ratio)
