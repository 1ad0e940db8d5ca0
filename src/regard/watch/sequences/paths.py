"""The level "path": paths through the graph of endpoints that are rarer than their steps imply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.level import Finding, Level, Surprise
from regard.watch.sequences.endpoints import (
    FIRST_ENDPOINT,
    START,
    ContextMemory,
    EndpointVocabulary,
    advance_pause,
)
from regard.watch.sequences.hypergeometric import hypergeometric_log_cdf
from regard.watch.sequences.level import LEAST_MEMORY
from regard.watch.sequences.markov import Integers
from regard.watch.settings import WatchSettings

LONGEST_PATH = 3  # steps
MOST_PATHS = 500_000


class PathScore(NamedTuple):
    """A path and how its frequency compares with what its steps imply.

    Attributes:
        endpoints: The endpoints, in order.
        taken: How often it was taken.
        expected: How often it would be taken if the first endpoint did not matter.
        log_cdf: ln P(X <= taken), which is HYPA's score: near 0 (certain) for a path that is taken
            more often than expected, very negative for one that is avoided.
    """

    endpoints: list[str]
    taken: int
    expected: float
    log_cdf: float


class PathEnsemble:
    """HYPA (LaRock et al., 2020): how likely are k-step paths as rare as they are?

    A path x0 → x1 → … → xk is an edge of the De Bruijn graph of order k, from the node
    v = (x0 … xk−1) to the node w = (x1 … xk). In the random ensemble, the number of paths out of
    each node and into each node is kept on average, and the m paths are drawn without replacement
    from Ξ possible ones, so that a count has a hypergeometric distribution:

        P(X <= f),   X ~ Hypergeometric(Σ Ξ, Ξ_vw, m)

    All v with the same middle (x1 … xk−1) can be followed by all w that begin with it. The part of
    the graph with one middle is therefore complete and bipartite, and the correction of Ξ for edges
    that cannot exist, which HYPA iterates, has the closed form Ξ_vw = s_out(v) s_in(w) · m / s_mid,
    with ΣΞ = m². It makes s_out(v) s_in(w) / s_mid the expected count.

    Paths are integers, as contexts are in `BackoffMarkov`.

    Args:
        steps: k, from 2.
        symbols: Number of symbols.
    """

    def __init__(self, steps: int, symbols: int) -> None:
        self.steps, self.symbols = steps, symbols
        self.clear()

    def clear(self) -> None:
        """Forget all paths."""
        self.counts: dict[int, int] = {}
        self.out_strength: dict[int, int] = {}
        self.in_strength: dict[int, int] = {}
        self.middle_strength: dict[int, int] = {}
        self.total = 0
        self._bits: dict[int, float] = {}  # of paths that were asked for, until counts change

    def add(self, paths: Integers) -> None:
        """Count paths (n)."""
        found, counts = np.unique(paths, return_counts=True)
        for path, n in zip(found.tolist(), counts.tolist(), strict=True):
            self._increase(path, n)
        while len(self.counts) > MOST_PATHS:
            self.halve()

    def _increase(self, path: int, n: int) -> None:
        source, target, middle = self.nodes(path)
        self.counts[path] = self.counts.get(path, 0) + n
        self.out_strength[source] = self.out_strength.get(source, 0) + n
        self.in_strength[target] = self.in_strength.get(target, 0) + n
        self.middle_strength[middle] = self.middle_strength.get(middle, 0) + n
        self.total += n
        self._bits.clear()

    def halve(self) -> None:
        """Halve all counts, rounded down."""
        self.replace({path: n // 2 for path, n in self.counts.items() if n > 1})

    def replace(self, counts: dict[int, int]) -> None:
        """Set the counts of all paths."""
        self.clear()
        for path, n in counts.items():
            self._increase(path, n)

    def nodes(self, path: int) -> tuple[int, int, int]:
        """The nodes of the De Bruijn graph that a path joins, and their common middle."""
        source, target = path // self.symbols, path % self.symbols**self.steps
        return source, target, source % self.symbols ** (self.steps - 1)

    def expected(self, path: int) -> float:
        """Mean of a path's count in the ensemble; 0 if a step of it was never taken."""
        source, target, middle = self.nodes(path)
        ends = self.out_strength.get(source, 0) * self.in_strength.get(target, 0)
        return ends / self.middle_strength[middle] if ends else 0.0

    def log_cdf(self, path: int) -> float:
        """ln P(X <= count of the path). A path with a step that was never taken has no place in the
        ensemble: it is given 1 / (m + 1)."""
        expected = self.expected(path)
        if expected == 0:
            return -math.log(self.total + 1)
        count, m = self.counts.get(path, 0), float(self.total)
        return hypergeometric_log_cdf(count, expected * m, m * m, m)

    def bits(self, path: int) -> float:
        """Surprise of a path: the smaller of −log2 P(X <= count), which says that its rarity is no
        chance, and −log2 of its share among the paths from the same node, which says that it is
        rare. With enough data, a path that is taken every day can be taken significantly less often
        than expected."""
        bits = self._bits.get(path)
        if bits is None:
            source = self.out_strength.get(self.nodes(path)[0], 0)
            share = (self.counts.get(path, 0) + 0.5) / (source + 1)
            bits = max(min(-self.log_cdf(path), -math.log(share)), 0.0) / math.log(2)
            if len(self._bits) >= MOST_PATHS:
                self._bits.clear()
            self._bits[path] = bits
        return bits


class PathLevel(Level):
    """Surprise of the last 2 and of the last 3 steps of an entity, by `PathEnsemble`.

    Each step of a path may be common while their order is not: that is what this level sees and a
    list of known steps does not. A path is surprising only if the data would have shown it had it
    been normal: a rare path of rare steps is not; see `PathEnsemble.bits`. Paths end at pauses, and
    at endpoints that are not in the vocabulary.

    The state of an entity is {"context", "time"}.
    """

    name = "path"

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.vocabulary = EndpointVocabulary()
        self.fitted_events = 0
        self.events_since_halving = 0

    def fit(self, events: Sequence[Event]) -> None:
        self.vocabulary = EndpointVocabulary()
        self.vocabulary.fit(events)
        self._build_ensembles()
        self.fitted_events = len(events)
        self._add(events, from_start=True)

    def _build_ensembles(self) -> None:
        longest = self.vocabulary.longest_context(LONGEST_PATH)
        self.ensembles = [PathEnsemble(k, self.vocabulary.size) for k in range(2, longest + 1)]
        self.memory = ContextMemory(self.vocabulary, longest)
        self.modulus = self.vocabulary.size**longest

    def _add(self, events: Sequence[Event], *, from_start: bool) -> None:
        steps = self.memory.encode(events, from_start=from_start)
        size = self.vocabulary.size
        for ensemble in self.ensembles:
            paths = steps.contexts % size**ensemble.steps * size + steps.symbols
            whole = np.ones(len(paths), dtype=bool)
            for digit in range(ensemble.steps + 1):
                whole &= paths // size**digit % size >= FIRST_ENDPOINT
            ensemble.add(paths[whole])

    def score(self, events: Sequence[Event], states: dict[tuple[str, str], Any]) -> Surprise:
        size, ids = self.vocabulary.size, self.vocabulary.ids
        bits = np.zeros((len(events), len(self.ensembles)))
        for i, event in enumerate(events):
            if not event.entity:
                continue
            symbol = ids.get((event.tenant, event.endpoint), 0)
            context = self._context(event, states.get((event.tenant, event.entity)))
            for j, path in enumerate(self._paths(context, symbol)):
                bits[i, j] = self.ensembles[j].bits(path)
            after = (context * size + symbol) % self.modulus
            states[event.tenant, event.entity] = {"context": after, "time": event.time}
        return Surprise(
            np.arange(len(events) + 1, dtype=np.int64) * len(self.ensembles),
            np.tile(np.arange(len(self.ensembles), dtype=np.int32), len(events)),
            bits.ravel(),
        )

    def _context(self, event: Event, state: Any) -> int:
        """The last endpoints before an event."""
        if state is None:
            return START
        gap = event.time - state["time"]
        return advance_pause(state["context"], gap, self.vocabulary.size) % self.modulus

    def _paths(self, context: int, symbol: int) -> list[int]:
        """The paths of 2, 3 … steps that end in a symbol and are whole."""
        size, paths = self.vocabulary.size, []
        path, power = symbol, 1
        for steps in range(self.ensembles[-1].steps + 1):
            digit = path // power
            if digit < FIRST_ENDPOINT:
                break
            if steps >= 2:
                paths.append(path)
            power *= size
            path += context % size * power
            context //= size
        return paths

    def update(self, events: Sequence[Event]) -> None:
        self._add(events, from_start=False)
        self.events_since_halving += len(events)
        if self.events_since_halving >= max(self.fitted_events, LEAST_MEMORY):
            for ensemble in self.ensembles:
                ensemble.halve()
            self.events_since_halving = 0

    def group_names(self) -> Sequence[str]:
        return [f"{ensemble.steps} steps" for ensemble in self.ensembles]

    def explain(self, event: Event, part: int, state: Any) -> Finding:
        ensemble = self.ensembles[part]
        symbol = self.vocabulary.ids.get((event.tenant, event.endpoint), 0)
        context = self._context(event, state)
        paths = self._paths(context, symbol)
        if part >= len(paths):
            text = f"fewer than {ensemble.steps} steps are known before {event.endpoint}"
            return Finding(self.name, "path", "(endpoint)", event.endpoint, 0.0, 1.0, [], text)

        score = self.path_score(ensemble, paths[part])
        source = ensemble.nodes(paths[part])[0]
        onward = {
            path % self.vocabulary.size: n
            for path, n in ensemble.counts.items()
            if path // self.vocabulary.size == source
        }
        ranked = sorted(onward.items(), key=lambda item: -item[1])[:3]
        expected = [
            (self.vocabulary.name(each), n / ensemble.out_strength[source]) for each, n in ranked
        ]
        walked = " → ".join(score.endpoints)
        if score.expected:
            text = f"{walked}: taken {score.taken} times, and {score.expected:.1f} were expected "
            text += "from how often its steps are taken"
        else:
            text = f"{walked}: a step of it was never taken before"
        bits = ensemble.bits(paths[part])
        return Finding(self.name, "path", "(endpoint)", walked, bits, 1.0, expected, text)

    def path_score(self, ensemble: PathEnsemble, path: int) -> PathScore:
        """A path in words and numbers."""
        size = self.vocabulary.size
        digits = [path // size**k % size for k in range(ensemble.steps, -1, -1)]
        return PathScore(
            [self.vocabulary.name(digit) for digit in digits],
            ensemble.counts.get(path, 0),
            ensemble.expected(path),
            ensemble.log_cdf(path),
        )

    def avoided_paths(self, count: int = 20) -> list[PathScore]:
        """Paths that were taken, but much less often than their steps imply."""
        scores = [self.path_score(each, path) for each in self.ensembles for path in each.counts]
        return sorted(scores, key=lambda score: score.log_cdf)[:count]

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings.model_dump(mode="json"),
            "vocabulary": self.vocabulary.to_json(),
            "fitted_events": self.fitted_events,
            "events_since_halving": self.events_since_halving,
        }

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for each in self.ensembles:
            arrays[f"paths.{each.steps}"] = np.array(list(each.counts.keys()), dtype=np.int64)
            arrays[f"counts.{each.steps}"] = np.array(list(each.counts.values()), dtype=np.int64)
        return arrays

    @classmethod
    def from_json(cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> PathLevel:
        level = cls(WatchSettings(**content["settings"]))
        level.vocabulary = EndpointVocabulary.from_json(content["vocabulary"])
        level.fitted_events = content["fitted_events"]
        level.events_since_halving = content["events_since_halving"]
        level._build_ensembles()
        for each in level.ensembles:
            paths, counts = tensors[f"paths.{each.steps}"], tensors[f"counts.{each.steps}"]
            each.replace(dict(zip(paths.tolist(), counts.tolist(), strict=True)))
        return level
