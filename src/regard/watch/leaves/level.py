"""The level "leaf": surprise of each leaf and of the keys of an event, given its endpoint.

    log2 1 / P(value) is counted with back-off, each step weighted by Witten and Bell (1991):

    P(value | endpoint, path)  counts of the value; the share of new values goes to
    P(value | path)            how many endpoints know the value; the share of new ones goes to
    P(kind | path) · 2^-b      b: the most unusual eight characters in a row and the length of a
                               string; the magnitude of a number

So an unknown value is never only "unknown": in a path of identifiers it is expected, in a path of
three constants it is not, and what it looks like counts in both.

The surprise of a leaf is how many bits that is beyond what is usual for its path at its endpoint,
which is measured while learning: each portion of events is scored before it is counted. So bits of
identifiers, constants and numbers can be compared.

An unusual set of keys is as surprising as its combination is new at its endpoint, or as its rarest
key is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event, Value, value_kind
from regard.watch.leaves.characters import CharacterModel
from regard.watch.leaves.count_sketch import CountSketch, combine_keys, hash_value
from regard.watch.leaves.magnitudes import MagnitudeModel
from regard.watch.leaves.schema import EndpointSchema, NoveltyRates, PathHistory, ancestors
from regard.watch.level import Finding, Level, Surprise
from regard.watch.settings import WatchSettings

KINDS = ("string", "integer", "number", "boolean", "null")
_KIND_OF_CLASS = {str: 0, int: 1, float: 2, bool: 3, type(None): 4}
_KIND_BITS = np.array([0.0, 0.0, 0.0, 1.0, 0.0])  # of a value that no model looks into

# Parts that every event has, before its leaves: their calibration groups.
HEAD = ("endpoint", "unseen_key", "missing_key", "size", "signal")
SIGNAL = HEAD.index("signal")

MAX_ENDPOINTS, MAX_PATHS, MAX_CONTEXTS = 8_192, 16_384, 65_536
MAX_MEMO, MAX_SHAPE_MEMO = 400_000, 20_000
TOP_VALUES = 16  # values kept for each context, to be shown
SHOWN_CHARACTERS = 120
# Events are learned at a time when they are 2 % of those that are known and ten seconds have gone
# by, or when they are many.
PENDING_SHARE, PENDING_SECONDS, MAX_PENDING = 0.02, 10.0, 4_096
FIRST_PORTION = 256
MEASURED = 4_096  # values of each portion whose bits are measured
KNOWN_LOOKS = 2_000  # values of a path, after which only a share of new ones teaches their looks
KNOWN_VALUES = 16  # of a context, before the bits of its values are measured
USUAL_PRIOR = 4.0  # weight of the usual bits of a path in those of a context
MAX_MEASURED = 20_000.0  # weight at which the older half of the usual bits is forgotten

Key = str | tuple[type, Value]
"""A value by which a dict tells 1 from 1.0 and True: strings are as they are."""


def make_key(value: Value) -> Key:
    """The key of a value."""
    return value if value.__class__ is str else (value.__class__, value)


def key_value(key: Key) -> Value:
    """The inverse of `make_key`."""
    return key if isinstance(key, str) else key[1]


def to_float(value: Value) -> float:
    """A number as a float; infinite if it is too large."""
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]


class _Layout:
    """What all events with the same endpoint and paths share.

    Attributes:
        groups: Calibration group of each part.
        head: Bits of the parts of `HEAD` without the signals.
        contexts: Context of each leaf, -1 if the endpoint never had its path.
        path_ids: Path of each leaf, -1 if it is unknown.
        usual: Bits that are usual for each part.
        memos: For each leaf, the bits of the values of its context that were seen before.
    """

    __slots__ = ("contexts", "groups", "head", "memos", "path_ids", "usual")

    def __init__(
        self,
        groups: npt.NDArray[np.int32],
        usual: npt.NDArray[np.float64],
        head: list[float],
        contexts: list[int],
        path_ids: list[int],
        memos: list[dict[Key, float]],
    ) -> None:
        self.groups, self.usual, self.head = groups, usual, head
        self.contexts, self.path_ids, self.memos = contexts, path_ids, memos


@dataclass
class _KeyFinding:
    """A key that is unusual at its endpoint: its path, and the bits."""

    path: str
    bits: float


class LeafLevel(Level):
    """Surprise of the leaves of an event by counts, without a network.

    Memory is bounded: values are counted in a `CountSketch`, characters in one hashed table, and
    there is a largest number of endpoints, paths and contexts; further ones share one entry.

    Events given to `update` are learned in portions, so that the bits of frequent values need not
    be computed again for each event.
    """

    name = "leaf"
    bits_bound_p = True

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.secret = b""
        self.events = 0
        self.schemas: dict[tuple[str, str], EndpointSchema] = {}
        self.novelty = NoveltyRates()
        self.nodes: dict[tuple[str, str], PathHistory] = {}
        self.path_ids: dict[tuple[str, str], int] = {}
        self.path_names: list[tuple[str, str]] = []
        self.path_groups: list[int] = []
        self.top_values: list[dict[Key, int]] = []
        self.group_list = [*HEAD, *(f"{kind}:" for kind in KINDS)]

        self.values = CountSketch()
        self.characters = CharacterModel()
        self.magnitudes = MagnitudeModel()  # rows: 2 * path for numbers, 2 * path + 1 for lengths
        self.context_paths = np.zeros(0, np.int64)
        self.context_counts = np.zeros((0, 2), np.int64)  # values, different values
        self.context_bits = np.zeros((0, 2))  # values whose bits were measured, sum of the bits
        self.path_bits = np.zeros((0, 2))
        self.path_counts = np.zeros((0, 2), np.int64)  # endpoints' values, different values
        self.path_kinds = np.zeros((0, len(KINDS)), np.int64)
        self.path_keys = np.zeros(0, np.uint64)

        self._pending: list[Event] = []
        self._layouts: dict[tuple[str, str, tuple[str, ...]], _Layout] = {}
        self._memos: dict[int, dict[Key, float]] = {}
        self._memo_size = 0

    # Learning

    def fit(self, events: Sequence[Event]) -> None:
        start = 0
        while start < len(events):  # small portions first, so that usual bits can be measured
            end = start + min(max(start, FIRST_PORTION), MAX_PENDING)
            self._learn(events[start:end])
            start = end

    def update(self, events: Sequence[Event]) -> None:
        self._pending.extend(events)
        count = len(self._pending)
        if count and (
            count >= MAX_PENDING
            or (
                count > self.events * PENDING_SHARE
                and self._pending[-1].time - self._pending[0].time > PENDING_SECONDS
            )
        ):
            self.flush()

    def flush(self) -> None:
        """Learn the events that `update` keeps back."""
        pending, self._pending = self._pending, []
        self._learn(pending)

    def _learn(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self.events += len(events)
        shapes = Counter((event.tenant, event.endpoint, tuple(event.paths)) for event in events)
        contexts = {shape: self._count_shape(*shape, count) for shape, count in shapes.items()}
        pairs: Counter[tuple[int, Key]] = Counter()
        for event in events:
            shape = (event.tenant, event.endpoint, tuple(event.paths))
            pairs.update(zip(contexts[shape], map(make_key, event.values), strict=True))
            if event.signals:
                schema = self._schema(event.tenant, event.endpoint)
                for kind in {signal.kind for signal in event.signals}:
                    schema.signals[kind] = schema.signals.get(kind, 0) + 1
        self._count_values(pairs)
        self._layouts.clear()
        self._memos.clear()
        self._memo_size = 0

    def _schema(self, tenant: str, endpoint: str) -> EndpointSchema:
        """The schema of an endpoint, made if it is new; the last one is shared by all that are too
        many."""
        if (tenant, endpoint) not in self.schemas and len(self.schemas) >= MAX_ENDPOINTS - 1:
            tenant, endpoint = "", "(other endpoints)"
        return self.schemas.setdefault((tenant, endpoint), EndpointSchema())

    def _count_shape(
        self, tenant: str, endpoint: str, paths: tuple[str, ...], count: int
    ) -> list[int]:
        """Count the keys of events with the same paths; the context of each leaf."""
        self._count_nodes(tenant, set(paths), count)
        schema = self._schema(tenant, endpoint)
        found = [self._context(schema, tenant, path) for path in paths]
        schema.add(frozenset(found), len(paths) - len(set(paths)), count, self.novelty)
        return found

    def _count_nodes(self, tenant: str, paths: set[str], count: int) -> None:
        """Count the paths and objects of events, and the keys in each that one event had."""
        for name in sorted(paths.union(*map(ancestors, paths))):  # objects before their keys
            node = self.nodes.get((tenant, name))
            if node is None and len(self.nodes) >= MAX_PATHS:
                continue
            if node is None:
                node = self.nodes[tenant, name] = PathHistory()
            change = (node.events + count == 1) - (node.events == 1)
            node.events += count
            parent = self.nodes.get((tenant, name.rpartition(".")[0])) if name else None
            if parent is not None:
                parent.once += change

    def _context(self, schema: EndpointSchema, tenant: str, path: str) -> int:
        """The context of a path at an endpoint, made if it is new."""
        if path in schema.contexts:
            return schema.contexts[path]
        if len(self.top_values) >= MAX_CONTEXTS - 1:
            path = "(other paths)"
        key = (tenant, path)
        if key not in self.path_ids and len(self.path_ids) >= MAX_PATHS - 1:
            key = ("", "(other paths)")
        if key not in self.path_ids:
            self.path_ids[key] = len(self.path_groups)
            self.path_names.append(key)
            self.path_groups.append(-1)  # until the kind of its values is known
        if path not in schema.contexts:
            schema.contexts[path] = len(self.top_values)
            self.top_values.append({})
            self._grow(self.path_ids[key], tenant, path)
        return schema.contexts[path]

    def _grow(self, path_id: int, tenant: str, path: str) -> None:
        """Make room in the arrays for the newest context, and for its path."""
        context = len(self.top_values) - 1
        if context >= len(self.context_paths):
            room = 64 + context // 2
            self.context_paths = np.pad(self.context_paths, (0, room))
            self.context_counts = np.pad(self.context_counts, ((0, room), (0, 0)))
            self.context_bits = np.pad(self.context_bits, ((0, room), (0, 0)))
        self.context_paths[context] = path_id
        if path_id >= len(self.path_keys):
            room = 64 + path_id // 2
            self.path_keys = np.pad(self.path_keys, (0, room))
            self.path_counts = np.pad(self.path_counts, ((0, room), (0, 0)))
            self.path_bits = np.pad(self.path_bits, ((0, room), (0, 0)))
            self.path_kinds = np.pad(self.path_kinds, ((0, room), (0, 0)))
        self.path_keys[path_id] = hash_value(f"{tenant}\0{path}", self.secret)

    def _count_values(self, pairs: Counter[tuple[int, Key]]) -> None:
        """Count values in their contexts, and what is new in them in their paths."""
        values = [key_value(key) for _, key in pairs]
        contexts = np.fromiter((context for context, _ in pairs), np.int64, len(pairs))
        amounts = np.fromiter(pairs.values(), np.int64, len(pairs))
        hashes = np.fromiter((hash_value(v, self.secret) for v in values), np.uint64, len(pairs))
        paths = self.context_paths[contexts]
        kinds = np.array([_KIND_OF_CLASS[value.__class__] for value in values])
        self._measure_usual_bits(contexts, paths, values, amounts)

        keys = combine_keys(contexts.astype(np.uint64) + np.uint64(1 << 32), hashes)
        before = self.values.estimate(keys)
        self.values.add(keys, amounts)
        new = before == 0
        np.add.at(self.context_counts[:, 0], contexts, amounts)
        np.add.at(self.context_counts[:, 1], contexts, new)
        np.add.at(self.path_kinds, (paths, kinds), amounts)

        keys, first, amounts_of_path = np.unique(
            combine_keys(self.path_keys[paths[new]], hashes[new]),
            return_index=True,
            return_counts=True,
        )
        first = np.flatnonzero(new)[first]  # one pair for each value that is new somewhere
        new_in_path = self.values.estimate(keys) == 0
        self.values.add(keys, amounts_of_path)
        np.add.at(self.path_counts[:, 0], paths[first], amounts_of_path)
        np.add.at(self.path_counts[:, 1], paths[first], new_in_path)
        looks = first[new_in_path]
        known_looks = self.path_counts[paths[looks], 1] // KNOWN_LOOKS
        chosen = hashes[looks] % (known_looks + 1).astype(np.uint64) == 0
        self._learn_looks(looks[chosen], values, kinds, paths)

        for path in np.unique(paths[self._without_group(paths)]):
            kind = KINDS[int(self.path_kinds[path].argmax())]
            self.path_groups[path] = self._group(int(path), kind)
        for (context, key), amount, count in zip(pairs, amounts, before, strict=True):
            self._keep_top_value(self.top_values[context], key, int(amount + count))

    def _measure_usual_bits(
        self,
        contexts: npt.NDArray[np.int64],
        paths: npt.NDArray[np.int64],
        values: Sequence[Value],
        amounts: npt.NDArray[np.int64],
    ) -> None:
        """Score some of the values that are about to be counted."""
        known = np.flatnonzero(self.context_counts[contexts, 0] >= KNOWN_VALUES)
        chosen = known[:: len(known) // MEASURED + 1]
        if not len(chosen):
            return
        bits = self.value_bits(
            contexts[chosen].tolist(),
            paths[chosen].tolist(),
            [values[i] for i in chosen.tolist()],
        )
        weights = amounts[chosen]
        for sums, rows in ((self.context_bits, contexts), (self.path_bits, paths)):
            np.add.at(sums[:, 0], rows[chosen], weights)
            np.add.at(sums[:, 1], rows[chosen], weights * bits)
            sums[sums[:, 0] > MAX_MEASURED] /= 2

    def _usual_bits(
        self, contexts: npt.NDArray[np.int64], paths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Mean bits of the values of contexts, with those of their paths as a prior; -1 is an
        unknown context or path."""
        if not len(self.path_bits):
            return np.zeros(len(contexts))
        count, total = self.path_bits[paths].T
        of_path = total / np.maximum(count, 1)
        count, total = np.where(contexts[:, None] >= 0, self.context_bits[contexts], 0.0).T
        usual = (total + USUAL_PRIOR * of_path) / (count + USUAL_PRIOR)
        return np.where(paths >= 0, usual, 0.0)

    def _learn_looks(
        self,
        chosen: npt.NDArray[np.int64],
        values: Sequence[Value],
        kinds: npt.NDArray[np.int64],
        paths: npt.NDArray[np.int64],
    ) -> None:
        """Learn what new values look like: characters and length, or magnitude."""
        strings = chosen[kinds[chosen] == 0]
        numbers = chosen[(kinds[chosen] == 1) | (kinds[chosen] == 2)]
        texts = [str(values[i]) for i in strings.tolist()]
        self.characters.add(self.path_keys[paths[strings]], texts)
        lengths = np.array([len(text) for text in texts], np.float64)
        sizes = np.array([to_float(values[i]) for i in numbers.tolist()], np.float64)
        self.magnitudes.add(2 * paths[strings] + 1, lengths)
        self.magnitudes.add(2 * paths[numbers], sizes)

    def _without_group(self, paths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.array(self.path_groups)[paths] < 0

    def _group(self, path_id: int, kind: str) -> int:
        """A calibration group for a path whose values are mostly of one kind."""
        if len(self.group_list) >= self.settings.max_groups:
            return len(HEAD) + KINDS.index(kind)
        tenant, path = self.path_names[path_id]
        self.group_list.append(f"{kind}:{tenant}/{path}" if tenant else f"{kind}:{path}")
        return len(self.group_list) - 1

    def _keep_top_value(self, top: dict[Key, int], key: Key, count: int) -> None:
        """Keep the value if it is one of the most frequent of its context."""
        if isinstance(key, str):
            if self.settings.hash_values:
                key = f"hash:{hash_value(key, self.secret):016x}"
            elif len(key) > SHOWN_CHARACTERS:
                key = key[:SHOWN_CHARACTERS] + "…"
        if key not in top and len(top) >= TOP_VALUES:
            least = min(top, key=top.__getitem__)
            if top[least] >= count:
                return
            del top[least]
        top[key] = count

    # Scoring

    def group_names(self) -> Sequence[str]:
        return self.group_list

    def score(self, events: Sequence[Event], states: dict[tuple[str, str], Any]) -> Surprise:
        groups, usual, bits, offsets = [], [], [], [0]
        missed: list[tuple[int, int, int, Value]] = []  # place in `bits`, context, path, value
        for event in events:
            layout = self._layout(event.tenant, event.endpoint, tuple(event.paths))
            groups.append(layout.groups)
            usual.append(layout.usual)
            bits.extend(layout.head)
            bits.append(self._signal_bits(event) if event.signals else 0.0)
            found = [
                memo.get(value if value.__class__ is str else (value.__class__, value), -1.0)
                for memo, value in zip(layout.memos, event.values, strict=True)
            ]
            if -1.0 in found:
                missed += [
                    (len(bits) + i, layout.contexts[i], layout.path_ids[i], event.values[i])
                    for i, each in enumerate(found)
                    if each == -1.0
                ]
            bits.extend(found)
            offsets.append(len(bits))
        flat = np.array(bits, np.float64)
        if missed:
            places, contexts, paths, values = zip(*missed, strict=True)
            computed = self.value_bits(contexts, paths, values)
            flat[list(places)] = computed
            self._remember(contexts, paths, values, computed)
        if not events:
            return Surprise(np.array(offsets), np.zeros(0, np.int32), flat)
        flat = np.maximum(flat - np.concatenate(usual), 0.0)
        return Surprise(np.array(offsets), np.concatenate(groups), flat)

    def value_bits(
        self, contexts: Sequence[int], paths: Sequence[int], values: Sequence[Value]
    ) -> npt.NDArray[np.float64]:
        """Surprise of values.

        Args:
            contexts: Context of each value, or -1: only its path is known.
            paths: Path of each value, or -1: unknown, then its surprise is 0.
        """
        if not self.path_groups:
            return np.zeros(len(values))
        context, path = np.array(contexts, np.int64), np.array(paths, np.int64)
        count = len(values)
        hashes = np.fromiter((hash_value(v, self.secret) for v in values), np.uint64, count)
        kinds = np.array([_KIND_OF_CLASS[value.__class__] for value in values])

        kind_counts = self.path_kinds[path]
        kind_share = (kind_counts[np.arange(count), kinds] + 0.1) / (kind_counts.sum(axis=1) + 0.5)
        share = kind_share * 2.0 ** -self._look_bits(path, kinds, values)
        seen = self.values.estimate(combine_keys(self.path_keys[path], hashes))
        share = _back_off(seen, self.path_counts[path], share)

        keys = combine_keys(context.astype(np.uint64) + np.uint64(1 << 32), hashes)
        known = context >= 0
        totals = np.where(known[:, None], self.context_counts[context], 0)
        share = _back_off(np.where(known, self.values.estimate(keys), 0), totals, share)
        return np.where(path >= 0, -np.log2(share), 0.0)

    def _look_bits(
        self, paths: npt.NDArray[np.int64], kinds: npt.NDArray[np.int64], values: Sequence[Value]
    ) -> npt.NDArray[np.float64]:
        """Surprise of what values look like, given their kind."""
        bits = _KIND_BITS[kinds]
        strings = np.flatnonzero(kinds == 0)
        numbers = np.flatnonzero((kinds == 1) | (kinds == 2))
        texts = [str(values[i]) for i in strings.tolist()]
        lengths = np.array([len(text) for text in texts], np.float64)
        sizes = np.array([to_float(values[i]) for i in numbers.tolist()], np.float64)
        bits[strings] = self.characters.bits(self.path_keys[paths[strings]], texts)
        bits[strings] += self.magnitudes.bits(2 * paths[strings] + 1, lengths)
        bits[numbers] = self.magnitudes.bits(2 * paths[numbers], sizes)
        return bits

    def _remember(
        self,
        contexts: Iterable[int],
        paths: Iterable[int],
        values: Sequence[Value],
        bits: npt.NDArray[np.float64],
    ) -> None:
        """Keep bits for the next event with the same value."""
        self._memo_size += len(values)
        if self._memo_size > MAX_MEMO:
            for memo in self._memos.values():
                memo.clear()
            self._memo_size = len(values)
        for context, path, value, each in zip(contexts, paths, values, bits.tolist(), strict=True):
            self._memos[_memo_key(context, path)][make_key(value)] = each

    def _layout(self, tenant: str, endpoint: str, paths: tuple[str, ...]) -> _Layout:
        """What events with these paths share, from the memo or computed."""
        found = self._layouts.get((tenant, endpoint, paths))
        if found is not None:
            return found
        schema = self.schemas.get((tenant, endpoint))
        path_ids = [self.path_ids.get((tenant, path), -1) for path in paths]
        contexts = [schema.contexts.get(path, -1) if schema else -1 for path in paths]
        unseen, missing = self._key_findings(schema, tenant, paths)
        keys = map(_memo_key, contexts, path_ids)
        of_leaves = self._usual_bits(np.array(contexts, np.int64), np.array(path_ids, np.int64))
        repeated = len(paths) - len(set(paths))
        layout = _Layout(
            groups=np.array(
                [
                    *range(len(HEAD)),
                    *(self.path_groups[i] if i >= 0 else len(HEAD) for i in path_ids),
                ],
                np.int32,
            ),
            usual=np.array([*np.zeros(len(HEAD)), *of_leaves]),
            head=[
                self._endpoint_bits(schema),
                unseen[0].bits if unseen else 0.0,
                missing[0].bits if missing else 0.0,
                schema.size_bits(repeated) if schema else 0.0,
            ],
            contexts=contexts,
            path_ids=path_ids,
            memos=[self._memos.setdefault(key, {}) for key in keys],
        )
        if len(self._layouts) >= MAX_SHAPE_MEMO:
            self._layouts.clear()
        self._layouts[tenant, endpoint, paths] = layout
        return layout

    def _endpoint_bits(self, schema: EndpointSchema | None) -> float:
        """Surprise of an endpoint among all events."""
        total = self.events + len(self.schemas)
        if not total:
            return 0.0
        return log2(total / (schema.events if schema and schema.events else len(self.schemas)))

    def _signal_bits(self, event: Event) -> float:
        schema = self.schemas.get((event.tenant, event.endpoint), EndpointSchema(self.events))
        return max(schema.signal_bits(signal.kind) for signal in event.signals)

    def _key_findings(
        self, schema: EndpointSchema | None, tenant: str, paths: Sequence[str]
    ) -> tuple[list[_KeyFinding], list[_KeyFinding]]:
        """Keys that are unusual at an endpoint, and keys that are missing; the most surprising
        first."""
        distinct = dict.fromkeys(paths)
        new = [path for path in distinct if (tenant, path) not in self.path_ids]
        if schema is None or not schema.events:
            return [_KeyFinding(path, self._new_path_bits(tenant, path)) for path in new], []
        shape = frozenset(schema.contexts[path] for path in paths if path in schema.contexts)
        unknown = [path for path in distinct if path not in schema.contexts]
        names = {context: path for path, context in schema.contexts.items()}
        nearest = schema.nearest_shape(shape)
        more, less = shape - nearest, nearest - shape
        rates = self.novelty
        new_shape = schema.new_shape_bits(rates)
        never = max(schema.unseen_key_bits(rates), new_shape)
        unseen = [_KeyFinding(path, never) for path in unknown if path not in new]
        unseen += [_KeyFinding(path, max(never, self._new_path_bits(tenant, path))) for path in new]
        unseen += [
            _KeyFinding(names[each], max(schema.present_bits(each), new_shape * (each in more)))
            for each in shape
        ]
        missing = [
            _KeyFinding(
                names[each], max(schema.missing_bits(each, rates), new_shape * (each in less))
            )
            for each in schema.presence
            if each not in shape
        ]
        return (
            sorted(unseen, key=lambda each: -each.bits),
            sorted(missing, key=lambda each: -each.bits),
        )

    def _new_path_bits(self, tenant: str, path: str) -> float:
        """Surprise of a path that no event had, in the nearest object that is known."""
        for name in ancestors(path):
            if (tenant, name) in self.nodes:
                return self.nodes[tenant, name].new_key_bits()
        return 0.0

    # Explanations

    def explain(self, event: Event, part: int, state: Any) -> Finding:
        schema = self.schemas.get((event.tenant, event.endpoint))
        surprise = self.score([event], {})
        bits = float(surprise.bits[part])
        if part >= len(HEAD):
            return self._explain_value(event, part - len(HEAD), schema, bits)
        kind = HEAD[part]
        if kind == "endpoint":
            common = sorted(self.schemas.items(), key=lambda item: -item[1].events)[:5]
            expected: list[tuple[Any, float]] = [
                (name, each.events / max(self.events, 1))
                for (tenant, name), each in common
                if tenant == event.tenant
            ]
            seen = schema.events if schema else 0
            text = f"{event.endpoint} was called in {seen:,} of {self.events:,} normal events"
            return Finding(self.name, kind, "", event.endpoint, bits, 1.0, expected, text)
        if kind in ("unseen_key", "missing_key"):
            unseen, missing = self._key_findings(schema, event.tenant, event.paths)
            found = (unseen if kind == "unseen_key" else missing)[:1]
            path = found[0].path if found else ""
            return self._explain_key(event, kind, path, schema, bits)
        if kind == "size":
            path, count = Counter(event.paths).most_common(1)[0] if event.paths else ("", 0)
            repeated = len(event.paths) - len(set(event.paths))
            text = (
                f"{repeated:,} leaves are further elements of arrays, most of them at {path}: an "
                "unusual number"
            )
            return Finding(self.name, kind, path, count, bits, 1.0, [], text)
        worst = max(
            event.signals,
            key=lambda signal: schema.signal_bits(signal.kind) if schema else 0.0,
            default=None,
        )
        if worst is None:
            return Finding(self.name, kind, "", None, bits, 1.0, text="no signal")
        times = schema.signals.get(worst.kind, 0) if schema else 0
        text = f"{worst.kind.replace('_', ' ')} at {worst.path!r}: in {times:,} normal events"
        return Finding(self.name, worst.kind, worst.path, worst.kind, bits, 1.0, [], text)

    def _explain_key(
        self, event: Event, kind: str, path: str, schema: EndpointSchema | None, bits: float
    ) -> Finding:
        """A finding about a key that is there, or is not."""
        context = schema.contexts.get(path) if schema else None
        have = schema.presence.get(context, 0) if schema and context is not None else 0
        total = schema.events if schema else 0
        if kind == "missing_key":
            text = f"{path} is missing; {have:,} of {total:,} normal events have it"
            return Finding(
                self.name, kind, path, None, bits, 1.0, self._expected_values(schema, path), text
            )
        observed = event.values[event.paths.index(path)] if path in event.paths else None
        text = f"{path} is there; {have:,} of {total:,} normal events have it"
        return Finding(self.name, kind, path, observed, bits, 1.0, [], text)

    def _explain_value(
        self, event: Event, leaf: int, schema: EndpointSchema | None, bits: float
    ) -> Finding:
        """A finding about the value of a leaf."""
        path, value = event.paths[leaf], event.values[leaf]
        expected = self._expected_values(schema, path)
        path_id = self.path_ids.get((event.tenant, path), -1)
        kind = value_kind(value)
        if path_id < 0:
            return Finding(
                self.name, "value", path, value, bits, 1.0, [], f"{path} was never there"
            )
        usual = self.path_kinds[path_id]
        if not usual[KINDS.index(kind)]:
            text = f"{path} is a {kind}; it was always a {KINDS[int(usual.argmax())]}"
            return Finding(self.name, "type", path, value, bits, 1.0, expected, text)
        text = f"{path} is {_shorten(value)}; usually {_list_values(expected)}"
        if isinstance(value, str) and len(value) > 8:
            fragment = self.characters.unusual_fragment(self.path_keys[path_id], value)
            text += f"; the most unusual part is {fragment!r}"
        elif kind in ("integer", "number") and len(expected) > 3:
            middle = self.magnitudes.median(2 * path_id)
            text += f"; the median is about {middle:.3g}" if middle is not None else ""
        return Finding(self.name, "value", path, value, bits, 1.0, expected, text)

    def _expected_values(self, schema: EndpointSchema | None, path: str) -> list[tuple[Any, float]]:
        """The most frequent values of a path at an endpoint, with probabilities."""
        context = schema.contexts.get(path) if schema else None
        if context is None:
            return []
        total = max(int(self.context_counts[context, 0]), 1)
        top = sorted(self.top_values[context].items(), key=lambda item: -item[1])
        return [(key_value(key), min(count / total, 1.0)) for key, count in top[:5]]

    # Files

    def to_json(self) -> dict[str, Any]:
        self.flush()
        return {
            "settings": self.settings.model_dump(mode="json"),
            "events": self.events,
            "novelty": asdict(self.novelty),
            "nodes": [[*key, node.events, node.once] for key, node in self.nodes.items()],
            "schemas": [[*key, schema.to_json()] for key, schema in self.schemas.items()],
            "paths": self.path_names,
            "path_groups": self.path_groups,
            "groups": self.group_list,
            "top_values": [
                [[key_value(key), count] for key, count in top.items()] for top in self.top_values
            ],
            "sightings": self.values.seen_keys,
        }

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        self.flush()
        contexts, paths = len(self.top_values), len(self.path_groups)
        sparse = {
            "value_counts": self.values.counts.reshape(-1),
            "first_sightings": self.values.seen.astype(np.uint32),
            "characters": self.characters.table,
        }
        stored: dict[str, npt.NDArray[Any]] = {
            "context_paths": self.context_paths[:contexts],
            "context_counts": self.context_counts[:contexts],
            "context_bits": self.context_bits[:contexts],
            "path_bits": self.path_bits[:paths],
            "path_counts": self.path_counts[:paths],
            "path_kinds": self.path_kinds[:paths],
            "path_keys": self.path_keys[:paths].view(np.int64),
            "magnitudes": self.magnitudes.counts,
        }
        for name, table in sparse.items():
            places = np.flatnonzero(table)
            stored[f"{name}.places"], stored[f"{name}.counts"] = places, table[places]
        return stored

    @classmethod
    def from_json(cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> LeafLevel:
        level = cls(WatchSettings.model_validate(content["settings"]))
        level.events = content["events"]
        level.novelty = NoveltyRates(**content["novelty"])
        level.nodes = {
            (tenant, name): PathHistory(events, once)
            for tenant, name, events, once in content["nodes"]
        }
        level.schemas = {
            (tenant, endpoint): EndpointSchema.from_json(schema)
            for tenant, endpoint, schema in content["schemas"]
        }
        level.path_names = [(tenant, path) for tenant, path in content["paths"]]
        level.path_ids = {name: i for i, name in enumerate(level.path_names)}
        level.path_groups, level.group_list = content["path_groups"], content["groups"]
        level.top_values = [
            {make_key(value): count for value, count in top} for top in content["top_values"]
        ]
        level.context_paths = tensors["context_paths"]
        level.context_counts = tensors["context_counts"]
        level.context_bits, level.path_bits = tensors["context_bits"], tensors["path_bits"]
        level.path_counts, level.path_kinds = tensors["path_counts"], tensors["path_kinds"]
        level.path_keys = tensors["path_keys"].view(np.uint64)
        level.magnitudes.counts = tensors["magnitudes"]
        level.values.seen_keys = content["sightings"]
        for name, table in {
            "value_counts": level.values.counts.reshape(-1),
            "first_sightings": level.values.seen,
            "characters": level.characters.table,
        }.items():
            table[tensors[f"{name}.places"]] = tensors[f"{name}.counts"]
        return level


def _memo_key(context: int, path_id: int) -> int:
    """A number for a context, or for a path without one."""
    return context if context >= 0 else -2 - path_id


def _back_off(
    seen: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], share: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Witten-Bell: counted probability, and what is left for new values times `share`.

    Args:
        seen: Count of each value.
        counts: Values and different values of its context: (values, 2).
        share: Probability of each value if it is new.
    """
    total, types = counts[:, 0], np.maximum(counts[:, 1], 1)
    counted = (np.minimum(seen, total) + types * share) / np.maximum(total + types, 1)
    return np.where(total > 0, counted, share)


def _shorten(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def _list_values(expected: Sequence[tuple[Any, float]]) -> str:
    """The most frequent values in words."""
    if not expected:
        return "something else"
    return ", ".join(f"{_shorten(value)} ({share:.0%})" for value, share in expected[:3])
