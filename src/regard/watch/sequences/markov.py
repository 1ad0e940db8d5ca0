"""A Markov model of any order over integers, smoothed by backing off to shorter contexts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

DISCOUNTS = (0.0, 0.25, 0.5, 0.75)
STRENGTHS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
DEFAULT_DISCOUNT, DEFAULT_STRENGTH = 0.5, 5.0  # with too little data to choose
HELD_OUT = 0.2  # share of the data, the newest, that chooses the order and the smoothing
FEWEST_HELD_OUT = 50
LEAST_GAIN = 1e-3  # nats that one more symbol of context must win


class Smoothing(NamedTuple):
    """How counts of one order are smoothed; see `BackoffMarkov`."""

    discount: float
    strength: float


class BackoffMarkov:
    """p(x | context) from counts n of all context lengths up to `order`.

        p_k(x) = (max(n(x) − d, 0) + (a + d·t) · p_{k−1}(x)) / (N + a)

    N is the sum and t the number of the symbols counted after the last k symbols, and p_{−1} is
    uniform. With a = 0 it is absolute discounting, with d = 0 the hierarchical Dirichlet model of
    MacKay & Peto (1995), and both together are an approximation of the hierarchical Pitman-Yor
    process (Teh, 2006). d and a of each order, and the order itself, are chosen on held-out data.
    Counts are those of all occurrences in every order, so that an update is an increment.
    Kneser-Ney's, which count each longer context once, are no better here (docs/watch-levels.md).

    A context is one integer, the last symbols as digits in base `symbols`, the newest last:
    ``context % symbols**k`` are the last k of them.

    Args:
        order: Longest context.
        symbols: Number of symbols; ``symbols ** (order + 1)`` must be below 2**63.
        max_counts: Most counts kept; beyond, the rarest of the longest contexts are dropped.
    """

    def __init__(self, order: int, symbols: int, *, max_counts: int = 500_000) -> None:
        if order < 0 or symbols ** (order + 1) >= 2**63:
            raise ValueError(f"order={order} with {symbols} symbols does not fit in 63 bits")
        self.order, self.symbols, self.max_counts = order, symbols, max_counts
        self.smoothing = [Smoothing(DEFAULT_DISCOUNT, DEFAULT_STRENGTH)] * (order + 1)
        self.held_out_nats: list[float] = []
        self.clear()

    def clear(self) -> None:
        """Forget all counts; the smoothing stays."""
        self.powers = [self.symbols**k for k in range(self.order + 1)]
        self.counts: list[dict[int, int]] = [{} for _ in self.powers]
        self.totals: list[dict[int, int]] = [{} for _ in self.powers]
        self.types: list[dict[int, int]] = [{} for _ in self.powers]

    def fit(self, contexts: Integers, symbols: Integers) -> Floats:
        """Learn from symbols (n) in order of time, each with its context (n).

        The smoothing is chosen on the newest `HELD_OUT` of them, order by order. Orders that gain
        less than `LEAST_GAIN` nats are dropped.

        Returns:
            Probabilities of the newest symbols, from a model that did not know them; none if there
            are too few to choose by.
        """
        split = round(len(symbols) * (1 - HELD_OUT))
        held_out = np.empty(0)
        if len(symbols) - split >= FEWEST_HELD_OUT:
            self.add(contexts[:split], symbols[:split])
            held_out = self._choose_smoothing(contexts[split:], symbols[split:])
            self.clear()
        self.add(contexts, symbols)
        return held_out

    def add(self, contexts: Integers, symbols: Integers) -> None:
        """Count symbols (n) after their contexts (n)."""
        for k, power in enumerate(self.powers):
            keys, found = np.unique(contexts % power * self.symbols + symbols, return_counts=True)
            for key, n in zip(keys.tolist(), found.tolist(), strict=True):
                self._increase(k, key, n)
        if sum(map(len, self.counts)) > self.max_counts:
            self._drop_rare()

    def _increase(self, k: int, key: int, n: int) -> None:
        """Count a symbol n times after a context of length k; the key is both."""
        context = key // self.symbols
        if key not in self.counts[k]:
            self.types[k][context] = self.types[k].get(context, 0) + 1
        self.counts[k][key] = self.counts[k].get(key, 0) + n
        self.totals[k][context] = self.totals[k].get(context, 0) + n

    def halve(self) -> None:
        """Halve all counts, rounded down, so that what was not repeated is forgotten."""
        for k, counts in enumerate(self.counts):
            self._replace(k, ((key, n // 2) for key, n in counts.items() if n > 1))

    def _drop_rare(self) -> None:
        """Drop counts, the smallest of the longest contexts first, to half of `max_counts`."""
        threshold = 1
        while sum(map(len, self.counts)) > self.max_counts / 2:
            for k in range(self.order, -1, -1):
                if sum(map(len, self.counts)) > self.max_counts / 2:
                    kept = [(key, n) for key, n in self.counts[k].items() if n > threshold]
                    self._replace(k, kept)
            threshold *= 2

    def _replace(self, k: int, counts: Iterable[tuple[int, int]]) -> None:
        kept = list(counts)
        self.counts[k], self.totals[k], self.types[k] = {}, {}, {}
        for key, n in kept:
            self._increase(k, key, n)

    def probability(self, context: int, symbol: int, *, order: int | None = None) -> float:
        """p(symbol | context), from contexts of at most `order` symbols."""
        p = 1 / self.symbols
        last = self.order if order is None else order
        for k in range(last + 1):
            suffix = context % self.powers[k]
            total = self.totals[k].get(suffix)
            if total is None:
                break
            n = self.counts[k].get(suffix * self.symbols + symbol, 0)
            discount, strength = self.smoothing[k]
            spare = strength + discount * self.types[k][suffix]
            p = ((n - discount if n else 0.0) + spare * p) / (total + strength)
        return p

    def probabilities(self, contexts: Integers, symbols: Integers) -> Floats:
        """`probability` of many symbols (n), each after its context (n)."""
        pairs = zip(contexts.tolist(), symbols.tolist(), strict=True)
        return np.array([self.probability(context, symbol) for context, symbol in pairs])

    def most_probable(self, context: int, count: int) -> list[tuple[int, float]]:
        """The most probable next symbols, with their probabilities."""
        known = self.counts[0]  # after no context, a key is a symbol
        ranked = [(symbol, self.probability(context, symbol)) for symbol in known]
        return sorted(ranked, key=lambda each: -each[1])[:count]

    def _choose_smoothing(self, contexts: Integers, symbols: Integers) -> Floats:
        """Choose order and smoothing; returns the probabilities of the symbols (n)."""
        p = np.full(len(symbols), 1 / self.symbols)
        best_order, best, self.held_out_nats = 0, p, []
        for k, power in enumerate(self.powers):
            suffixes = contexts % power
            keys = (suffixes * self.symbols + symbols).tolist()
            n = np.array([self.counts[k].get(key, 0) for key in keys], dtype=np.float64)
            total = np.array([self.totals[k].get(each, 0) for each in suffixes.tolist()])
            types = np.array([self.types[k].get(each, 0) for each in suffixes.tolist()])
            candidates = []
            for discount in DISCOUNTS:
                for strength in STRENGTHS:
                    spare = (strength + discount * types) * p
                    smoothed = (np.maximum(n - discount, 0) + spare) / (total + strength)
                    nats = -float(np.log(smoothed).mean())
                    candidates.append((nats, Smoothing(discount, strength), smoothed))
            nats, self.smoothing[k], p = min(candidates, key=lambda each: each[0])
            self.held_out_nats.append(nats)
            if k == 0 or nats < self.held_out_nats[best_order] - LEAST_GAIN:
                best_order, best = k, p
        self.order = best_order
        self.smoothing = self.smoothing[: best_order + 1]
        return best

    def to_json(self) -> dict[str, Any]:
        """All but the counts."""
        return {
            "order": self.order,
            "symbols": self.symbols,
            "max_counts": self.max_counts,
            "smoothing": [list(each) for each in self.smoothing],
            "held_out_nats": self.held_out_nats,
        }

    def tensors(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """The counts, as arrays of keys and of counts for each order."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for k, counts in enumerate(self.counts):
            arrays[f"{prefix}.keys.{k}"] = np.array(list(counts.keys()), dtype=np.int64)
            arrays[f"{prefix}.counts.{k}"] = np.array(list(counts.values()), dtype=np.int64)
        return arrays

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]], prefix: str
    ) -> BackoffMarkov:
        """The inverse of `to_json` and `tensors`."""
        model = cls(content["order"], content["symbols"], max_counts=content["max_counts"])
        model.smoothing = [Smoothing(*each) for each in content["smoothing"]]
        model.held_out_nats = content["held_out_nats"]
        for k in range(model.order + 1):
            keys, counts = tensors[f"{prefix}.keys.{k}"], tensors[f"{prefix}.counts.{k}"]
            model._replace(k, zip(keys.tolist(), counts.tolist(), strict=True))
        return model


def nats_per_symbol(probabilities: Floats) -> float:
    """Mean of -ln p."""
    return -math.fsum(np.log(probabilities)) / len(probabilities)
