"""Learning a detector from normal traffic, and a report on what was learned."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.watch.budget import DAY
from regard.watch.detector import (
    Detector,
    EntityStates,
    OnProgress,
    ScoredEvent,
    load_level_class,
)
from regard.watch.event import Event
from regard.watch.level import Level
from regard.watch.self_test import run_self_test
from regard.watch.settings import WatchSettings
from regard.watch.users import UserLevel

if TYPE_CHECKING:
    from regard.watch.network import LevelReport

# Shares of the events, in order of time: the levels are fitted on the first; the second gives the
# calibration of parts, the third that of levels and events; the last is held out.
FIT, PARTS, EVENTS = 0.55, 0.15, 0.2
WARM_UP = 0.1  # share of the first that is scored, so that entities do not all start anew
PORTION = 256
MIN_EVENTS = 40
SHORT_SPAN = 3_600.0
REPORTED_P = (0.05, 0.01, 0.001)
SELF_TEST_EVENTS, SELF_TEST_EDITS = 20_000, 50


@dataclass
class LearnReport:
    """What was learned, and how well the calibration holds on the newest events.

    Attributes:
        events: Number of events that were used.
        skipped: Number of older events that were not: there are more than `max_events`.
        endpoints: Number of endpoints.
        new_endpoints: Number of endpoints with too few events to alert on.
        entities: Number of entities; events without one are not counted.
        without_entity: Share of the events without an entity.
        busiest: Share of the events that the most active entity has.
        leaves: Mean number of leaves.
        seconds: Time from the first event to the last.
        volume_per_day: Events per day, measured or from the settings.
        threshold: p of an alert.
        baseline: Number of events that p is calibrated on.
        held_out: Number of events that were held out.
        held_out_rates: For some values of p: share of the held-out events below it.
        held_out_alerts: Alerts among the held-out events, of any status.
        levels: For each level the number of its calibration groups ("groups"), the share of
            held-out events with small p ("held_out_rates"), and what became of its network.
        self_test: What is found of edits planted into the held-out events, by kind; see
            `regard.watch.self_test.SelfTest`.
        notes: What the user should know.
    """

    events: int
    skipped: int
    endpoints: int
    new_endpoints: int
    entities: int
    without_entity: float
    busiest: float
    leaves: float
    seconds: float
    volume_per_day: float
    threshold: float
    baseline: int
    held_out: int
    held_out_rates: dict[str, float]
    held_out_alerts: dict[str, int]
    levels: dict[str, dict[str, Any]] = field(default_factory=dict)
    self_test: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


class Learned(NamedTuple):
    """A detector and the report about it."""

    detector: Detector
    report: LearnReport


def learn_detector(
    events: Iterable[Event],
    settings: WatchSettings,
    on_progress: OnProgress = lambda stage, done, total: None,
    secret: bytes = b"",
) -> Learned:
    """Learn a detector from normal events.

    They are sorted by time. The levels are fitted on the first 55 %. The others are scored first
    and then learned, portion by portion, as `regard watch follow` does: 15 % calibrate the parts,
    20 % the levels and events, and on the last 10 % the result is checked, before they enter the
    calibration too.

    Args:
        events: The newest `settings.max_events` of them are used.
    """
    newest: deque[Event] = deque(maxlen=settings.max_events)
    read = 0
    for read, event in enumerate(events, 1):
        newest.append(event)
        if not read % 1_000:
            on_progress("read events", read, 0)
    known = sorted(newest, key=lambda event: event.time)
    if len(known) < MIN_EVENTS:
        raise ValueError(
            f"There are {len(known)} events to learn from: at least {MIN_EVENTS} normal events are "
            "needed, and some thousands are better."
        )
    ends = np.cumsum([round(share * len(known)) for share in (FIT, PARTS, EVENTS)]).tolist()
    fit, parts = known[: ends[0]], known[ends[0] : ends[1]]
    later, held_out = known[ends[1] : ends[2]], known[ends[2] :]

    levels = fit_levels(fit, settings, on_progress, secret)
    networks: list[LevelReport] = []
    if settings.mixer is not None:
        levels, networks = fit_networks(levels, fit, settings, on_progress)
    detector = Detector(
        settings,
        levels,
        volume=measure_volume(known),
        model_id=_name_model(known, settings),
        secret=secret,
    )
    endpoints = Counter((event.tenant, event.endpoint) for event in known)
    detector.known_endpoints = dict(endpoints)
    detector.normal_events.add(fit)

    states: EntityStates = {}
    total, done = len(known) - ends[0], 0
    for scored in _score_portions(detector, fit[-max(int(WARM_UP * len(fit)), 1) :], states):
        on_progress("warm up", len(scored), 0)
    for scored in _score_portions(detector, parts, states):
        detector.calibrate_parts(scored)
        detector.teach(scored)
        done += len(scored)
        on_progress("calibrate", done, total)
    for scored in _score_portions(detector, later, states):
        detector.calibrate_parts(scored)
        detector.calibrate_events(scored)
        detector.teach(scored)
        done += len(scored)
        on_progress("calibrate", done, total)
    checked: list[ScoredEvent] = []
    for scored in _score_portions(detector, held_out, states):
        checked += scored
        detector.update(scored)
        done += len(scored)
        on_progress("check", done, total)
    detector.known_endpoints = dict(endpoints)
    detector.states = {key: dict(state) for key, state in states.items()}
    on_progress("self-test", 0, 1)
    report = _report(detector, known, read - len(known), checked)
    report.self_test = {
        kind: asdict(result)
        for kind, result in run_self_test(
            detector,
            known[: ends[2]][-SELF_TEST_EVENTS:],
            checked,
            edits=SELF_TEST_EDITS,
            seed=settings.seed,
        ).items()
    }
    for each in networks:
        report.levels[each.level]["network"] = each.describe()
    for level in detector.levels:
        if isinstance(level, UserLevel):
            report.levels[level.name]["metric"] = level.report()
    return Learned(detector, report)


def fit_levels(
    events: Sequence[Event], settings: WatchSettings, on_progress: OnProgress, secret: bytes
) -> list[Level]:
    """The levels of the settings, fitted."""
    levels = []
    for i, name in enumerate(settings.levels):
        on_progress(f"fit {name}", i, len(settings.levels))
        level = load_level_class(name)(settings)
        if secret and hasattr(level, "secret"):
            level.secret = secret
        level.fit(events)
        levels.append(level)
    return levels


def fit_networks(
    levels: list[Level], events: Sequence[Event], settings: WatchSettings, on_progress: OnProgress
) -> tuple[list[Level], list[LevelReport]]:
    """The levels with networks where these help, and what came of each; see
    `regard.watch.network`."""
    from regard.watch.network import NetworkSettings, fit_network_levels, parse_mixers

    assert settings.mixer is not None
    mixers = parse_mixers(settings.mixer)
    network_settings = NetworkSettings(**mixers, seed=settings.seed)
    return fit_network_levels(levels, events, network_settings, on_progress=on_progress)


def measure_volume(events: Sequence[Event]) -> float:
    """Events per day, by the clocks of all but the oldest and the newest 0.5 %, since single clocks
    are wrong now and then. Events that all have the same time count as those of one day."""
    cut = len(events) // 200
    middle = events[cut : len(events) - cut]
    seconds = middle[-1].time - middle[0].time
    return len(middle) / seconds * DAY if seconds > 0 else float(len(events))


def _score_portions(
    detector: Detector, events: Sequence[Event], states: EntityStates
) -> Iterator[list[ScoredEvent]]:
    for start in range(0, len(events), PORTION):
        yield detector.score(events[start : start + PORTION], states)


def _name_model(events: Sequence[Event], settings: WatchSettings) -> str:
    """A name that the same events and settings get again."""
    digest = hashlib.sha256(settings.model_dump_json().encode())
    for event in events:
        digest.update(f"{event.time}\0{event.source}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:12]


def _report(
    detector: Detector, events: Sequence[Event], skipped: int, checked: Sequence[ScoredEvent]
) -> LearnReport:
    settings = detector.settings
    entities = Counter((event.tenant, event.entity) for event in events if event.entity)
    p = np.array([each.p for each in checked])
    new = [key for key, count in detector.known_endpoints.items() if count < settings.shadow_events]
    report = LearnReport(
        events=len(events),
        skipped=skipped,
        endpoints=len(detector.known_endpoints),
        new_endpoints=len(new),
        entities=len(entities),
        without_entity=1 - sum(entities.values()) / len(events),
        busiest=max(entities.values(), default=0) / len(events),
        leaves=float(np.mean([len(event.paths) for event in events])),
        seconds=events[-1].time - events[0].time,
        volume_per_day=detector.budget.volume,
        threshold=detector.budget.threshold,
        baseline=detector.baseline(),
        held_out=len(checked),
        held_out_rates={str(level): float((p <= level).mean()) for level in REPORTED_P},
        held_out_alerts=dict(Counter(each.status for each in checked if each.status != "normal")),
    )
    for level in detector.levels:
        level_p = np.array([each.level_p[level.name] for each in checked])
        report.levels[level.name] = {
            "groups": len(level.group_names()),
            "held_out_rates": {str(each): float((level_p <= each).mean()) for each in REPORTED_P},
        }
    report.notes = _describe_limits(report, settings)
    return report


def _describe_limits(report: LearnReport, settings: WatchSettings) -> list[str]:
    """What the user should know about the learning data."""
    notes = []
    if report.skipped:
        notes.append(
            f"{report.skipped:,} older events were not used: learn keeps the newest "
            f"{settings.max_events:,} (--max-events)."
        )
    if report.without_entity == 1:
        notes.append("No event has an entity: sequences and users are not watched. Give --entity.")
    elif report.without_entity > 0.2:
        notes.append(f"{report.without_entity:.0%} of the events have no entity.")
    if report.busiest > 0.5 and report.entities > 1:
        notes.append(
            f"One entity has {report.busiest:.0%} of the events: it decides what is usual."
        )
    if report.new_endpoints > 0.5 * report.endpoints and report.endpoints > 100:
        notes.append(
            f"{report.new_endpoints:,} of {report.endpoints:,} endpoints have fewer than "
            f"{settings.shadow_events} events and will not alert yet. If ids are in the endpoints, "
            "give --endpoint."
        )
    if settings.volume_per_day is None and report.seconds < SHORT_SPAN:
        notes.append(
            f"The events span {report.seconds:,.0f} s, so {report.volume_per_day:,.0f} events a "
            "day is a guess. Give --volume-per-day."
        )
    if report.threshold < 1 / (report.baseline + 1):
        notes.append(
            f"{settings.alerts_per_day:g} alerts a day need p <= {report.threshold:.1e}, and "
            f"{report.baseline:,} calibration events show p down to "
            f"{1 / (report.baseline + 1):.1e}: alerts are found by a fitted tail, and marked as "
            "extrapolated."
        )
    worst = max(report.held_out_rates.items(), key=lambda item: item[1] / float(item[0]))
    if report.held_out * float(worst[0]) >= 5 and worst[1] > 2 * float(worst[0]):
        notes.append(
            f"{worst[1]:.1%} of the newest events have p <= {worst[0]}: the traffic changes while "
            "it is learned, and there will be more alerts than asked at first."
        )
    return notes
