"""Leaves as tokens: features that a network reads, and cells that it predicts.

The values of a path are partitioned into *cells*: each frequent value is a cell of its own, numbers
that are not frequent share the cells of their quantiles, and everything else is "other". A network
predicts the cell; within a cell the probability of the value is that of the floor. So every value,
however long or new, has a probability, and only finitely many classes are learned.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event, Value, value_kind
from regard.watch.events.times import parse_iso

TENANT_END = "\0"  # between tenant and path
ENDPOINT = None  # stands for the path of the token of the endpoint
EMPTY, MASK, FIRST_HASH = 0, 1, 2  # features: padding, a hidden value, the first hashed feature
BUCKETS = 8192  # features, hashed ones included
KEYS, NGRAMS = 4, 6  # features of the last keys of a path; of a value
KIND = 1 + KEYS  # columns of the features: path, keys, kind, cell, value, n-grams
WIDTH = KIND + 3 + NGRAMS
NGRAM = 4  # characters
BINS = 8  # cells of the numbers of a path
MIN_COUNT = 3  # of a frequent value
MAX_VALUES, MAX_CELLS, MAX_PATHS = 128, 4096, 1024
MAX_MEMO = 1 << 16  # leaves whose features are remembered
TIME_SHARE = 0.95  # of the values of a path that are times
ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")
EPOCHS = ((1e9, 4e9, 1.0), (1e12, 4e12, 1e-3))  # numbers that are seconds or milliseconds

Key = tuple[str, str]  # kind and text of a value; 1, 1.0, True and "1" are different


class PathCells(NamedTuple):
    """The cells of one path.

    Attributes:
        first: Index of its first cell, "other". The cells of numbers follow, then the values.
        edges: Inner edges of the cells of numbers; without edges they are "other".
        values: Cell of each frequent value.
        is_time: Whether the values are times, which are read as seconds after the event.
    """

    first: int
    edges: npt.NDArray[np.float64]
    values: dict[Key, int]
    is_time: bool

    @property
    def size(self) -> int:
        """Number of cells."""
        return 1 + (len(self.edges) + 1 if len(self.edges) else 0) + len(self.values)


class EncodedLeaves(NamedTuple):
    """The leaves of several events, flat, those of an event sorted by path, after a token for its
    endpoint.

    Attributes:
        offsets: (events + 1): the leaves of event i are from `offsets[i]` to `offsets[i + 1]`.
        rows: Row of each leaf in `LeafVocabulary.features`.
        masked_rows: Row of the same leaf with its value hidden.
        cells: Cell of each leaf; -1 if its path is unknown, and for the endpoint.
        leaves: Index of each leaf in the event's own order, -1 for the endpoint.
    """

    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    masked_rows: npt.NDArray[np.int64]
    cells: npt.NDArray[np.int64]
    leaves: npt.NDArray[np.int64]


class LeafVocabulary:
    """The paths, frequent values and number quantiles of normal events.

    Attributes:
        paths: The known paths with their tenants (`own_paths`), sorted.
        cells: Cells of each path, in that order.
        cell_counts: How often each cell occurred, (cells).
        cell_path: Index of the path of each cell, (cells).
        features: Features of the leaves that were encoded, (rows, `WIDTH`); row 0 is empty.
        memo_number: Changes when the rows of `features` are assigned anew.
    """

    def __init__(
        self,
        cells: Mapping[str, PathCells],
        cell_counts: npt.NDArray[np.int64],
        *,
        seed: int = 0,
    ) -> None:
        self.paths, self.seed = list(cells), seed
        self.path_index = {path: index for index, path in enumerate(self.paths)}
        self.cells = list(cells.values())
        self.cell_counts = cell_counts
        sizes = [each.size for each in self.cells]
        self.cell_path = np.repeat(np.arange(len(sizes)), sizes)
        self.path_starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self._hash_key = seed.to_bytes(8, "little")
        self._memo: dict[tuple[str | None, Any], tuple[int, int, int, int]] = {}
        self._masked: dict[str, int] = {}
        self._row_of: dict[Any, int] = {}
        self._features = np.zeros((1024, WIDTH), dtype=np.int64)
        self._rows, self.memo_number = 1, 0

    @classmethod
    def learn(cls, events: Iterable[Event], *, seed: int = 0) -> LeafVocabulary:
        """Count the values of normal events."""
        counts: dict[str, Counter[Key]] = defaultdict(Counter)
        numbers: dict[str, list[float]] = defaultdict(list)
        gaps: dict[str, list[float]] = defaultdict(list)
        totals: Counter[str] = Counter()
        for event in events:
            names = own_paths(event)
            totals.update(names)
            for path, value in zip(names, event.values, strict=True):
                counts[path][value_key(value)] += 1
                if (number := to_number(value)) is not None:
                    numbers[path].append(number)
                if (time := parse_time(value)) is not None:
                    gaps[path].append(time - event.time)
        paths = sorted(path for path, _ in totals.most_common(MAX_PATHS))
        times = {path for path in paths if len(gaps[path]) >= TIME_SHARE * totals[path]}
        frequent = _choose_values({path: counts[path] for path in paths if path not in times})
        cells, first = {}, 0
        for path in paths:
            known = frequent.get(path, ())
            rare = gaps[path] if path in times else _without(numbers[path], known)
            edges = _quantile_edges(rare)
            start = first + 1 + (len(edges) + 1 if len(edges) else 0)
            values = {key: start + i for i, key in enumerate(known)}
            cells[path] = PathCells(first, edges, values, path in times)
            first += cells[path].size
        return cls(cells, np.zeros(first, dtype=np.int64), seed=seed)

    def count_cells(self, leaves: EncodedLeaves) -> None:
        """Add the cells of encoded leaves to `cell_counts`."""
        known = leaves.cells[leaves.cells >= 0]
        self.cell_counts += np.bincount(known, minlength=len(self.cell_counts))

    def frequencies(self) -> npt.NDArray[np.float64]:
        """The smoothed share of each cell among those of its path, (cells)."""
        smoothed = self.cell_counts + 0.5
        totals = np.bincount(self.cell_path, smoothed, len(self.paths))
        shares: npt.NDArray[np.float64] = smoothed / totals[self.cell_path]
        return shares

    # ------------------------------------------------------------------------------- encoding
    def encode(self, events: Sequence[Event], length: int) -> EncodedLeaves:
        """The endpoint and the leaves of events, in the order of their paths, up to `length`
        tokens of each event."""
        self._bound_memo()
        memo, found = self._memo, list[tuple[int, int, int, int]]()
        for event in events:
            endpoint = event.endpoint
            found.append(memo.get((ENDPOINT, endpoint)) or self._add_endpoint(endpoint))
            for path, value in zip(own_paths(event), event.values, strict=True):
                key = value if value.__class__ is str else (value.__class__, value)
                entry = memo.get((path, key))
                found.append(entry or self._add(path, value, key, event.time))
        table = np.array(found, dtype=np.int64).reshape(-1, 4)
        sizes = np.array([1 + len(event.paths) for event in events], dtype=np.int64)
        owner = np.repeat(np.arange(len(events)), sizes)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        leaves = np.arange(len(table)) - starts[owner] - 1
        order = np.lexsort((leaves, table[:, 3], owner))
        kept = order[(np.arange(len(table)) - starts[owner]) < length]
        offsets = np.concatenate(([0], np.cumsum(np.minimum(sizes, length))))
        rows, masked, cells, _ = table[kept].T
        return EncodedLeaves(offsets, rows, masked, cells, leaves[kept])

    @property
    def features(self) -> npt.NDArray[np.int64]:
        """See the class."""
        return self._features[: self._rows]

    def describe_cell(self, cell: int) -> str:
        """What a cell stands for: a value, a range of numbers, or "other"."""
        path = int(self.cell_path[cell])
        known = self.cells[path]
        for (kind, text), index in known.values.items():
            if index == cell:
                return text if kind == "string" else f"{text} ({kind})"
        number = cell - known.first - 1
        if number < 0:
            return "another value"
        unit = " s after the event" if known.is_time else ""
        edges = [-math.inf, *known.edges.tolist(), math.inf]
        low, high = edges[number], edges[number + 1]
        if low == -math.inf:
            return f"at most {high:.4g}{unit}"
        return f"above {low:.4g}{unit}" if high == math.inf else f"{low:.4g} to {high:.4g}{unit}"

    def cell_of(self, path: str, value: Value, time: float) -> int:
        """Cell of a value at a path, as `own_paths` names it, -1 if the path is unknown; `time` is
        that of the event."""
        index = self.path_index.get(path)
        if index is None:
            return -1
        known = self.cells[index]
        cell = known.values.get(value_key(value))
        if cell is not None:
            return cell
        number = to_number(value)
        if known.is_time:
            moment = parse_time(value)
            number = None if moment is None else moment - time
        if number is None or not len(known.edges):
            return known.first
        return known.first + 1 + int(np.searchsorted(known.edges, number))

    def _add_endpoint(self, endpoint: str) -> tuple[int, int, int, int]:
        """The entry of the token of an endpoint, which comes first and is never hidden."""
        row = self._store([self._hash("endpoint", endpoint)])
        entry = self._memo[ENDPOINT, endpoint] = (row, row, -1, -1)
        return entry

    def _add(self, path: str, value: Value, key: Any, time: float) -> tuple[int, int, int, int]:
        """Row, row of the mask, cell and path of a leaf; remembered, unless it depends on time."""
        index = self.path_index.get(path, len(self.paths))
        cell = self.cell_of(path, value, time)
        masked = self._masked.get(path)
        if masked is None:
            masked = self._masked[path] = self._store([*self._path_features(path), MASK])
        is_time = index < len(self.paths) and self.cells[index].is_time
        row_key = (path, cell, _hour(value)) if is_time else (path, key)
        row = self._row_of.get(row_key)
        if row is None:
            row = self._row_of[row_key] = self._store(self._leaf_features(path, value, cell))
        if not is_time:
            self._memo[path, key] = (row, masked, cell, index)
        return row, masked, cell, index

    def _leaf_features(self, path: str, value: Value, cell: int) -> list[int]:
        features = [*self._path_features(path), self._hash("kind", value_kind(value))]
        features.append(self._hash("cell", str(cell), path) if cell >= 0 else EMPTY)
        if cell >= 0 and self.cells[self.path_index[path]].is_time:
            return [*features, self._hash("hour", str(_hour(value)))]
        features.append(self._hash("value", str(value)))
        number = to_number(value)
        if number is not None:
            mantissa, _, exponent = f"{number:.1e}".partition("e")
            digits = (("leading", mantissa), ("exponent", exponent), ("last", str(value)[-1]))
            return features + [self._hash(name, digit) for name, digit in digits]
        text = str(value)
        starts = sorted({round(x) for x in np.linspace(0, max(0, len(text) - NGRAM), NGRAMS)})
        return features + [self._hash("ngram", text[i : i + NGRAM]) for i in starts]

    def _path_features(self, path: str) -> list[int]:
        keys = path.rpartition(TENANT_END)[2].split(".")[-KEYS:]
        hashed = [self._hash("path", path)] + [self._hash("key", key) for key in keys]
        return hashed + [EMPTY] * (1 + KEYS - len(hashed))

    def _hash(self, *parts: str) -> int:
        """A feature of a text; the key makes collisions of another model useless here."""
        text = "\0".join(parts).encode("utf-8", "surrogatepass")
        digest = blake2b(text, digest_size=8, key=self._hash_key).digest()
        return FIRST_HASH + int.from_bytes(digest, "little") % (BUCKETS - FIRST_HASH)

    # ------------------------------------------------------------------------------- memory
    def _store(self, features: list[int]) -> int:
        if self._rows == len(self._features):
            self._features = np.concatenate((self._features, np.zeros_like(self._features)))
        self._features[self._rows, : len(features)] = features
        self._rows += 1
        return self._rows - 1

    def _bound_memo(self) -> None:
        """Forget all leaves once they are many."""
        if self._rows > MAX_MEMO:
            self._memo.clear()
            self._masked.clear()
            self._row_of.clear()
            self._features = np.zeros((1024, WIDTH), dtype=np.int64)
            self._rows, self.memo_number = 1, self.memo_number + 1

    # ------------------------------------------------------------------------------- saving
    def to_json(self) -> dict[str, Any]:
        """The vocabulary as JSON values."""
        return {
            "seed": self.seed,
            "paths": [
                {
                    "path": path,
                    "edges": each.edges.tolist(),
                    "values": [list(key) for key in each.values],
                    "is_time": each.is_time,
                    "counts": self.cell_counts[each.first : each.first + each.size].tolist(),
                }
                for path, each in zip(self.paths, self.cells, strict=True)
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LeafVocabulary:
        """The inverse of `to_json`."""
        cells, counts, first = {}, list[int](), 0
        for row in content["paths"]:
            edges = np.asarray(row["edges"], dtype=np.float64)
            start = first + 1 + (len(edges) + 1 if len(edges) else 0)
            values = {(kind, text): start + i for i, (kind, text) in enumerate(row["values"])}
            cells[row["path"]] = PathCells(first, edges, values, row["is_time"])
            counts += row["counts"]
            first += cells[row["path"]].size
        if len(counts) != first:
            raise ValueError(f"the vocabulary has {first} cells but {len(counts)} counts")
        return cls(cells, np.array(counts, dtype=np.int64), seed=content["seed"])


def own_paths(event: Event) -> list[str]:
    """The paths of an event with its tenant, so that tenants share no values."""
    if not event.tenant:
        return event.paths
    return [f"{event.tenant}{TENANT_END}{path}" for path in event.paths]


def value_key(value: Value) -> Key:
    """A value as a key of a dictionary."""
    return value_kind(value), value if isinstance(value, str) else repr(value)


def to_number(value: Value) -> float | None:
    """A number as a float, None for other values; a boolean is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


def parse_time(value: Value) -> float | None:
    """Seconds since 1970 of an ISO 8601 text or of a number of seconds or milliseconds, or None."""
    if isinstance(value, str):
        return parse_iso(value) if ISO_TIME.match(value) else None
    number = to_number(value)
    for low, high, factor in EPOCHS:
        if number is not None and low <= number < high:
            return number * factor
    return None


def _hour(value: Value) -> int:
    """Hour of the day of a time, -1 if it is none."""
    time = parse_time(value)
    return -1 if time is None else int(time // 3600) % 24


def _choose_values(counts: Mapping[str, Counter[Key]]) -> dict[str, list[Key]]:
    """The frequent values of each path: the most frequent of all, up to `MAX_CELLS`."""
    ranked = [
        (-count, path, key)
        for path, counter in counts.items()
        for key, count in counter.most_common(MAX_VALUES)
        if count >= MIN_COUNT
    ]
    chosen: dict[str, list[Key]] = defaultdict(list)
    for _, path, key in sorted(ranked)[:MAX_CELLS]:
        chosen[path].append(key)
    return chosen


def _without(numbers: Sequence[float], known: Iterable[Key]) -> list[float]:
    """The numbers that are no frequent values."""
    frequent = {float(text) for kind, text in known if kind in ("integer", "number")}
    return [number for number in numbers if number not in frequent]


def _quantile_edges(numbers: Sequence[float]) -> npt.NDArray[np.float64]:
    """Inner edges of `BINS` cells with about as many numbers each; none for too few numbers."""
    finite = np.array([x for x in numbers if math.isfinite(x)])
    if len(finite) < BINS * MIN_COUNT:
        return np.empty(0)
    return np.unique(np.quantile(finite, np.arange(1, BINS) / BINS, method="lower"))
