"""What a detector finds of edits that are planted into normal events: the table of `learn`."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.watch.detector import Detector, ScoredEvent
from regard.watch.event import Event
from regard.watch.explain import state_before
from regard.watch.planted import LEAF_EDITS, EditPlanter

Session = Sequence[ScoredEvent]

FOUND_P = 0.01
SESSION = 10  # events
FEWEST_ENTITIES, FEWEST_SESSIONS = 5, 20
MOST_UNEDITED = 1_000  # sessions


@dataclass
class SelfTest:
    """Edits of one kind.

    Attributes:
        edits: Number of edits.
        found: Share of them that are found with 1 % false alarms: edited events with p <= 0.01;
            edited sessions whose least p is below that of 99 % of unedited ones.
        by_level: The same for the p-value of each level.
        hit_at_1: Share of edits whose leaf the first finding names; None for sessions.
    """

    edits: int
    found: float
    by_level: dict[str, float] = field(default_factory=dict)
    hit_at_1: float | None = None


def run_self_test(
    detector: Detector,
    known: Sequence[Event],
    checked: Sequence[ScoredEvent],
    *,
    edits: int,
    seed: int = 0,
) -> dict[str, SelfTest]:
    """Plant edits of each kind into held-out events.

    Args:
        known: Events that the detector has learned from: what they do not have is unusual.
        checked: Held-out events, as they were scored in order: the edits are planted into them.
        edits: Most edits of each kind.
    """
    planter = EditPlanter(known, seed)
    results = {}
    for kind in LEAF_EDITS:
        planted = planter.plant([each.event for each in checked], kind, edits)
        if not planted:
            continue
        scored = [
            detector.score([each.event], states_before(detector, checked[each.place]))[0]
            for each in planted
        ]
        paths = [first_leaf_path(detector, each) for each in scored]
        named = [path == each.path for path, each in zip(paths, planted, strict=True)]
        table = _p_values(detector, scored) <= FOUND_P
        results[kind] = _summarise(detector, table, float(np.mean(named)))
    return results | _test_sessions(detector, checked, edits, random.Random(seed))


def states_before(detector: Detector, scored: ScoredEvent) -> dict[tuple[str, str], dict[str, Any]]:
    """The state of the entity of an event just before it, at all levels."""
    states = {level.name: state_before(level, scored) for level in detector.levels}
    known = {name: state for name, state in states.items() if state is not None}
    return {(scored.event.tenant, scored.event.entity): known}


def first_leaf_path(detector: Detector, scored: ScoredEvent) -> str:
    """The path that the first finding of the level "leaf" names."""
    findings = detector.alert(scored).findings
    return next((finding.path for finding in findings if finding.level == "leaf"), "")


def _test_sessions(
    detector: Detector, checked: Sequence[ScoredEvent], edits: int, rng: random.Random
) -> dict[str, SelfTest]:
    """Sessions with the events of another entity in them, and sessions in another order."""
    by_entity: dict[tuple[str, str], list[ScoredEvent]] = defaultdict(list)
    for each in checked:
        if each.event.entity:
            by_entity[each.event.tenant, each.event.entity].append(each)
    sessions = [
        each[start : start + SESSION]
        for each in by_entity.values()
        for start in range(0, len(each) - SESSION + 1, SESSION)
    ]
    rng.shuffle(sessions)
    half = len(sessions) // 2
    chosen, unedited = sessions[:half][:edits], sessions[half:][:MOST_UNEDITED]
    entities = {each[0].event.entity for each in sessions}
    if len(entities) < FEWEST_ENTITIES or len(chosen) < FEWEST_SESSIONS:
        return {}

    def least_p(session: Session, events: Sequence[Event]) -> npt.NDArray[np.float64]:
        scored = detector.score(events, states_before(detector, session[0]))
        return _p_values(detector, scored).min(axis=0)

    def take_over(session: Session) -> list[Event]:
        """The events of another entity's session in the place of this one's."""
        own = session[0].event
        other = rng.choice([each for each in sessions if each[0].event.entity != own.entity])
        later, old = own.time - other[0].event.time, other[0].event.entity
        return [
            replace(
                each.event,
                time=each.event.time + later,
                entity=own.entity,
                values=[own.entity if value == old else value for value in each.event.values],
            )
            for each in other
        ]

    def shuffle(session: Session) -> list[Event]:
        """The same events in another order, at the same times."""
        mixed = rng.sample(list(session), len(session))
        return [
            replace(each.event, time=slot.event.time)
            for each, slot in zip(mixed, session, strict=True)
        ]

    usual = [least_p(session, [each.event for each in session]) for session in unedited]
    limits = np.quantile(usual, FOUND_P, axis=0)
    results = {}
    edits_of: dict[str, Callable[[Session], list[Event]]] = {
        "other_session": take_over,
        "changed_order": shuffle,
    }
    for kind, edit in edits_of.items():
        found = np.array([least_p(session, edit(session)) for session in chosen]) < limits
        results[kind] = _summarise(detector, found, None)
    return results


def _p_values(detector: Detector, scored: Sequence[ScoredEvent]) -> npt.NDArray[np.float64]:
    """p of each event, then that of each level: (events, 1 + levels)."""
    names = [level.name for level in detector.levels]
    return np.array([[each.p, *(each.level_p[name] for name in names)] for each in scored])


def _summarise(
    detector: Detector, found: npt.NDArray[np.bool_], hit_at_1: float | None
) -> SelfTest:
    shares = found.mean(axis=0).tolist()
    names = [level.name for level in detector.levels]
    return SelfTest(len(found), shares[0], dict(zip(names, shares[1:], strict=True)), hit_at_1)
