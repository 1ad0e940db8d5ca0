"""The level "sequence": what an entity calls next, how soon, and whether that is like it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.level import Finding, Level, Surprise
from regard.watch.sequences.endpoints import (
    NO_CONTEXT,
    START,
    ContextMemory,
    EndpointVocabulary,
    advance_pause,
)
from regard.watch.sequences.markov import (
    FEWEST_HELD_OUT,
    STRENGTHS,
    BackoffMarkov,
    Floats,
    Integers,
    nats_per_symbol,
)
from regard.watch.settings import WatchSettings

PARTS = ("transition", "gap", "session")
FIRST_GAP, CLOCK_BACK, LEAST_GAP = 0, 1, 2  # classes of gaps; then two to each doubling
SHORTEST_GAP = 1e-3  # seconds
GAP_CLASSES = 64
OWN_ENDPOINTS = 32  # endpoints that an entity's own history remembers
OWN_EVENTS = 500  # events after which an entity's own history is halved
MOST_DRIFT = 64.0  # bits
NO_OWN_HISTORY = 1e9  # a strength at which the own history has no say
LEAST_MEMORY = 10_000  # events


class History(NamedTuple):
    """What histories of entities knew of events.

    Attributes:
        counts: (m) Events with the same endpoint in the history.
        totals: (m) All events in the history.
    """

    counts: Floats
    totals: Floats


class SessionTest(NamedTuple):
    """How the part "session" compares an entity's own history with all.

    Attributes:
        strength: b of q.
        allowance: k: the middle between the mean of log2 p/q for an entity's own events and that
            for another's.
    """

    strength: float = NO_OWN_HISTORY
    allowance: float = 0.0


class SequenceLevel(Level):
    """Surprise of the next endpoint and of the time until it, for each entity.

    Parts of an event:

    - transition: −log2 q(x), where q mixes the Markov model of all entities, p, with the n(x) of N
      events in which this entity called the endpoint x: q(x) = (n(x) + b·p(x)) / (N + b);
    - gap: −log2 p(time since the event before | this endpoint and the one before), with two classes
      of time to each doubling;
    - session: how much worse the entity's own history predicts than that of all, summed as long as
      it does: s ← max(0, s + log2 p(x)/q(x) − k), Page's CUSUM test (1954) of "someone else"
      against "this entity"; see `SessionTest`.

    Both models are `BackoffMarkov`. b and the test of sessions are chosen on the newest of the
    events, as the models' order and smoothing are. Counts are halved after as many updates as there
    were events in `fit`.

    The state of an entity is {"context", "time", "own", "total", "drift"}.

    Args:
        settings: `order` is the longest context.
    """

    name = "sequence"

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.vocabulary = EndpointVocabulary()
        self.own_strength = NO_OWN_HISTORY
        self.session_test = SessionTest()
        self.fitted_events = 0
        self.events_since_halving = 0

    def fit(self, events: Sequence[Event]) -> None:
        self.vocabulary = EndpointVocabulary()
        self.vocabulary.fit(events)
        size = self.vocabulary.size
        order = self.vocabulary.longest_context(self.settings.order)
        self.transitions = BackoffMarkov(order, size)
        self.gaps = BackoffMarkov(2, size)
        self.memory = ContextMemory(self.vocabulary, order)

        steps = self.memory.encode(events, from_start=True)
        held_out = self.transitions.fit(steps.contexts, steps.symbols)
        self.gaps.fit(steps.contexts % size * size + steps.symbols, gap_classes(steps.gaps))
        if len(held_out):
            first = len(events) - len(held_out)
            own, other = collect_histories(events, steps.symbols, first)
            self.own_strength = choose_own_strength(own, held_out)
            self.session_test = choose_session_test(own, other, held_out)
        self.fitted_events = len(events)

    def score(self, events: Sequence[Event], states: dict[tuple[str, str], Any]) -> Surprise:
        size, ids = self.vocabulary.size, self.vocabulary.ids
        modulus = self.memory.modulus
        copied: set[tuple[str, str]] = set()
        bits: list[float] = []
        for event in events:
            symbol = ids.get((event.tenant, event.endpoint), 0)
            if not event.entity:
                p = self.transitions.probability(NO_CONTEXT, symbol)
                bits += (-math.log2(p), 0.0, 0.0)
                continue

            key = (event.tenant, event.entity)
            if key not in copied:  # the caller's state before the batch is left as it is
                before = states.get(key) or new_state()
                states[key] = {**before, "own": dict(before["own"])}
                copied.add(key)
            state = states[key]
            gap = math.nan if state["time"] is None else event.time - state["time"]
            context = advance_pause(state["context"], gap, size) % modulus
            p = self.transitions.probability(context, symbol)
            q = own_probability(state, symbol, p, self.own_strength)
            test = self.session_test
            ratio = math.log2(p / own_probability(state, symbol, p, test.strength))
            gap_p = self.gaps.probability(context % size * size + symbol, gap_class(gap))
            drift = min(max(0.0, state["drift"] + ratio - test.allowance), MOST_DRIFT)
            bits += (-math.log2(q), -math.log2(gap_p), drift)

            state["drift"] = drift
            state["context"] = (context * size + symbol) % modulus
            state["time"] = event.time
            remember_own(state, str(symbol))
        return Surprise(
            np.arange(0, 3 * len(events) + 1, 3, dtype=np.int64),
            np.tile(np.arange(3, dtype=np.int32), len(events)),
            np.array(bits, dtype=np.float64),
        )

    def update(self, events: Sequence[Event]) -> None:
        size = self.vocabulary.size
        steps = self.memory.encode(events)
        contexts, symbols = steps.contexts[steps.counted], steps.symbols[steps.counted]
        self.transitions.add(contexts, symbols)
        self.gaps.add(contexts % size * size + symbols, gap_classes(steps.gaps[steps.counted]))
        self.events_since_halving += len(events)
        if self.events_since_halving >= max(self.fitted_events, LEAST_MEMORY):
            self.transitions.halve()
            self.gaps.halve()
            self.events_since_halving = 0

    def group_names(self) -> Sequence[str]:
        return PARTS

    def explain(self, event: Event, part: int, state: Any) -> Finding:
        size = self.vocabulary.size
        state = new_state() if state is None else state
        surprise = self.score([event], {(event.tenant, event.entity): state})
        bits = float(surprise.bits[part])
        gap = math.nan if state["time"] is None else event.time - state["time"]
        context = advance_pause(state["context"], gap, size) if event.entity else NO_CONTEXT
        before = self.vocabulary.name(context % size)
        symbol = self.vocabulary.ids.get((event.tenant, event.endpoint), 0)

        if PARTS[part] == "gap":
            expected = [
                (gap_text(each), p)
                for each, p in self.gaps.most_probable(context % size * size + symbol, 3)
            ]
            observed = "the first event" if math.isnan(gap) else f"{gap:.3g} s"
            last = self.vocabulary.name(state["context"] % size)
            text = f"{observed} between {last} and {event.endpoint}; usual: {_listed(expected)}"
            return Finding(self.name, "gap", "(time)", observed, bits, 1.0, expected, text)

        ranked = self.transitions.most_probable(context % self.memory.modulus, size)
        likely = [
            (self.vocabulary.name(each), own_probability(state, each, p, self.own_strength))
            for each, p in ranked
            if self.vocabulary.tenant(each) == event.tenant
        ]
        expected = sorted(likely, key=lambda each: -each[1])[:3]
        if PARTS[part] == "transition":
            text = f"{event.endpoint} after {before}; usual: {_listed(expected)}"
        else:
            own = sorted(state["own"].items(), key=lambda item: -item[1])[:3]
            usual = [
                (self.vocabulary.name(int(each)), count / max(state["total"], 1))
                for each, count in own
            ]
            text = (
                f"The latest events fit other entities better than the history of {event.entity}, "
                f"by a factor of 2^{bits:.1f}; it usually calls {_listed(usual)}"
            )
        return Finding(
            self.name, PARTS[part], "(endpoint)", event.endpoint, bits, 1.0, expected, text
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings.model_dump(mode="json"),
            "vocabulary": self.vocabulary.to_json(),
            "transitions": self.transitions.to_json(),
            "gaps": self.gaps.to_json(),
            "own_strength": self.own_strength,
            "session_test": list(self.session_test),
            "fitted_events": self.fitted_events,
            "events_since_halving": self.events_since_halving,
        }

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return self.transitions.tensors("transitions") | self.gaps.tensors("gaps")

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]
    ) -> SequenceLevel:
        level = cls(WatchSettings(**content["settings"]))
        level.vocabulary = EndpointVocabulary.from_json(content["vocabulary"])
        level.transitions = BackoffMarkov.from_json(content["transitions"], tensors, "transitions")
        level.gaps = BackoffMarkov.from_json(content["gaps"], tensors, "gaps")
        level.memory = ContextMemory(level.vocabulary, level.transitions.order)
        level.own_strength = content["own_strength"]
        level.session_test = SessionTest(*content["session_test"])
        level.fitted_events = content["fitted_events"]
        level.events_since_halving = content["events_since_halving"]
        return level


def new_state() -> dict[str, Any]:
    """The state of an entity at its start."""
    return {"context": START, "time": None, "own": {}, "total": 0.0, "drift": 0.0}


def own_probability(state: dict[str, Any], symbol: int, p: float, strength: float) -> float:
    """q = (n + b p) / (N + b): p of an endpoint, mixed with the entity's own history."""
    own: float = state["own"].get(str(symbol), 0.0)
    total: float = state["total"]
    return (own + strength * p) / (total + strength)


def remember_own(state: dict[str, Any], symbol: str) -> None:
    """Count an endpoint in the own history of an entity, which stays small."""
    own = state["own"]
    own[symbol] = own.get(symbol, 0.0) + 1
    state["total"] += 1
    if state["total"] > OWN_EVENTS:
        state["own"] = {each: count / 2 for each, count in own.items() if count > 1}
        state["total"] /= 2
    elif len(own) > OWN_ENDPOINTS:
        rarest = min(own, key=lambda each: (own[each], each == symbol))
        del own[rarest]


def collect_histories(
    events: Sequence[Event], symbols: Integers, first: int
) -> tuple[History, History]:
    """What the own history of its entity, and that of another entity, knew of each newest event.

    Args:
        events: (n) Events in order of time.
        symbols: (n) Their endpoints.
        first: The first of the newest m events.
    """
    states: dict[tuple[str, str], dict[str, Any]] = {}
    known = np.zeros((4, len(events) - first))
    other_state = last_state = new_state()
    for i, (event, symbol) in enumerate(zip(events, symbols.tolist(), strict=True)):
        if not event.entity:
            continue
        state = states.setdefault((event.tenant, event.entity), new_state())
        if state is not last_state:
            other_state, last_state = last_state, state
        if i >= first:
            known[:2, i - first] = state["own"].get(str(symbol), 0.0), state["total"]
            known[2:, i - first] = other_state["own"].get(str(symbol), 0.0), other_state["total"]
        remember_own(state, str(symbol))
    return History(known[0], known[1]), History(known[2], known[3])


def choose_own_strength(own: History, p: Floats) -> float:
    """The b of q with the fewest nats on the newest events (m), of which the model of all gave p
    to each."""

    def nats(strength: float) -> float:
        return nats_per_symbol((own.counts + strength * p) / (own.totals + strength))

    return min((*STRENGTHS, NO_OWN_HISTORY), key=nats)


def choose_session_test(own: History, other: History, p: Floats) -> SessionTest:
    """The test that best tells an entity's newest events (m) from those of another entity.

    Args:
        own: What the histories of their entities knew.
        other: What those of other entities knew.
        p: What the model of all gave to each event.
    """
    known = (own.totals > 0) & (other.totals > 0)
    best, best_distance = SessionTest(), 0.0
    if known.sum() < FEWEST_HELD_OUT:
        return best
    for strength in STRENGTHS:
        mine, theirs = (
            np.log2(p[known] * (each.totals[known] + strength))
            - np.log2(each.counts[known] + strength * p[known])
            for each in (own, other)
        )
        spread = math.sqrt((mine.var() + theirs.var()) / 2)
        distance = (theirs.mean() - mine.mean()) / spread if spread else 0.0
        if distance > best_distance:
            middle = (theirs.mean() + mine.mean()) / 2
            best, best_distance = SessionTest(strength, float(middle)), distance
    return best


def gap_class(seconds: float) -> int:
    """The class of a gap: two classes to each doubling; a first event and a clock that went back
    have their own."""
    if math.isnan(seconds):
        return FIRST_GAP
    if seconds < 0:
        return CLOCK_BACK
    doublings = math.log2(max(seconds, SHORTEST_GAP) / SHORTEST_GAP)
    return min(LEAST_GAP + int(2 * doublings), GAP_CLASSES - 1)


def gap_classes(seconds: Floats) -> Integers:
    """`gap_class` of many gaps (n)."""
    return np.array([gap_class(each) for each in seconds.tolist()], dtype=np.int64)


def gap_text(number: int) -> str:
    """What a class of gaps means."""
    if number < LEAST_GAP:
        return "the first event" if number == FIRST_GAP else "a clock that went back"
    shortest = SHORTEST_GAP * 2 ** ((number - LEAST_GAP) / 2)
    return f"{shortest:.2g} to {shortest * 2**0.5:.2g} s"


def _listed(expected: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} ({p:.0%})" for name, p in expected) or "nothing yet"
