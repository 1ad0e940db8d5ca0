"""The detector: levels, calibration and budget together. From events to alerts.

bits of each part          levels: leaf, sequence, path, series, user
p-value of each part       conformal, in the group of the part
p-value of each level      harmonic mean of its parts, conformal again
p-value of the event       harmonic mean of its levels, conformal again
alert                      p below the threshold of the budget
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from regard.errors import check_choice
from regard.json_files import CorruptFile
from regard.watch.alert import Alert
from regard.watch.budget import AlertBudget
from regard.watch.calibration import Calibrator, fisher_p, harmonic_mean_p
from regard.watch.event import Event
from regard.watch.explain import NormalEvents, explain, hash_text
from regard.watch.level import Level
from regard.watch.model_files import StoredPart, read_model, write_model
from regard.watch.settings import WatchSettings

EntityStates = MutableMapping[tuple[str, str], dict[str, Any]]
"""(tenant, entity) -> {name of a level: JSON state}. A plain dict works."""

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, and how many of how many steps are done."""

LEVEL_CLASSES = {
    "leaf": "regard.watch.leaves:LeafLevel",
    "sequence": "regard.watch.sequences:SequenceLevel",
    "path": "regard.watch.sequences:PathLevel",
    "series": "regard.watch.series:SeriesLevel",
    "user": "regard.watch.users:UserLevel",
}
"""Name -> module:class. A class is built with the `WatchSettings` as its only argument."""

EVENT_SAMPLE = 50_000  # scores of normal events that are kept
MAX_KNOWN_ENDPOINTS = 100_000
MAX_PAUSE = 3_600.0
MAX_STATES = 20_000  # entities whose states are stored with the model
SECRET_CHECK = "regard watch"  # its hash tells whether a secret is the right one
ANYWHERE = {"endpoint", "signal"}  # parts that can be judged at an endpoint that is new
ABOUT_ENDPOINT = {"window of the endpoint"}  # parts that are not about the entity of the event


class Parts(NamedTuple):
    """The parts of one event at one level: calibration group, bits and p-value of each."""

    groups: npt.NDArray[np.int32]
    bits: npt.NDArray[np.float64]
    p: npt.NDArray[np.float64]


@dataclass(slots=True)
class ScoredEvent:
    """An event with its p-value.

    Attributes:
        event: The event.
        p: Share of normal events that are at least as unusual.
        extrapolated: Whether p is beyond what the calibration sample can show.
        status: "normal", or "alert"; "shadow" for an alert of a new endpoint, "learning" for any
            event of an endpoint that is newer still, "repeated" for an alert whose entity or
            finding was reported often enough today.
        finding: Names by which alerts are counted: of the entity, or the endpoint if the most
            unusual part is about it; and of that part.
        score: -log2 of the harmonic mean of `level_p`.
        level_scores: -log2 of the harmonic mean of the p-values of the parts of each level.
        level_p: p-value of each level.
        parts: The parts of each level.
        states: State of the entity before the batch, by level; for explanations.
        earlier: Events of the same entity that came before it in the batch.
    """

    event: Event
    p: float
    extrapolated: bool
    status: str
    finding: tuple[str, str] = ("", "")
    score: float = 0.0
    level_scores: dict[str, float] = field(default_factory=dict)
    level_p: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Parts] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    earlier: list[Event] = field(default_factory=list)


class Detector:
    """Scores events by several levels, and says which are alerts.

    Example:
        detector = Detector.learn(read_events("traffic.jsonl", settings), settings)
        states = detector.initial_states()
        scored = detector.score(events, states)
        alerts = [detector.alert(each) for each in scored if each.status == "alert"]
        detector.update(scored)

    Attributes:
        states: State of entities at the end of the learning events.

    Args:
        levels: Fitted levels.
        model_id: Names what was learned; the ids of alerts are made from it.
        secret: Key of the hashes of values, if `settings.hash_values`.
    """

    def __init__(
        self,
        settings: WatchSettings,
        levels: Sequence[Level],
        *,
        volume: float = 1.0,
        model_id: str = "",
        secret: bytes = b"",
    ) -> None:
        self.settings, self.levels, self.model_id = settings, list(levels), model_id
        self.secret = secret
        self.states: dict[tuple[str, str], dict[str, Any]] = {}
        self.budget = AlertBudget(settings, volume)
        self.part_calibrators = {
            level.name: Calibrator(settings.calibration_size, settings.seed) for level in levels
        }
        self.event_calibrator = Calibrator(EVENT_SAMPLE, settings.seed)
        self.event_calibrator.extend([*(f"{level.name}:" for level in levels), "event:"])
        self.known_endpoints: dict[tuple[str, str], int] = {}
        self.normal_events = NormalEvents(settings.seed, secret if settings.hash_values else None)

    @classmethod
    def learn(
        cls,
        events: Iterable[Event],
        settings: WatchSettings,
        on_progress: OnProgress = lambda stage, done, total: None,
        *,
        secret: bytes = b"",
    ) -> Detector:
        """Learn what is normal.

        See `regard.watch.learning.learn_detector`, which also returns a report.

        Args:
            events: Normal events; the newest `settings.max_events` are used.
            on_progress: Told about each stage.
            secret: Key of the hashes of values, if `settings.hash_values`.
        """
        from regard.watch.learning import learn_detector

        return learn_detector(events, settings, on_progress, secret).detector

    def initial_states(self, start: float | None = None) -> dict[tuple[str, str], dict[str, Any]]:
        """States to start with: those at the end of the learning events.

        Args:
            start: Time of the first event to score. If it is not within an hour of the end of the
                learning events, all entities start anew, or the pause would be unusual for all.
        """
        end = self.budget.clock
        if start is not None and (end is None or not 0 <= start - end <= MAX_PAUSE):
            return {}
        return {key: dict(state) for key, state in self.states.items()}

    def score(self, events: Sequence[Event], states: EntityStates) -> list[ScoredEvent]:
        """Score a micro-batch of events in order of time.

        Args:
            events: An entity may occur several times.
            states: State of each entity, updated in place. Nothing else changes: the model learns
                by `update`.
        """
        if not events:
            return []
        scored = self._score_levels(events, states)
        level_p = np.array([list(each.level_p.values()) for each in scored]).reshape(
            len(scored), -1
        )
        level_p = np.concatenate([level_p, fisher_p(level_p)[:, None]], axis=1)
        scores = -np.log2(level_p.shape[1] / (1 / level_p).sum(axis=1))
        found = self.event_calibrator.p_values(np.full(len(scored), len(self.levels)), scores)
        values = zip(scores.tolist(), found.p.tolist(), found.extrapolated.tolist(), strict=True)
        reported: dict[str, int] = {}
        for each, (score, p, extrapolated) in zip(scored, values, strict=True):
            each.score, each.p, each.extrapolated = score, p, extrapolated
            each.status = self._status(each, reported)
        return scored

    def _score_levels(self, events: Sequence[Event], states: EntityStates) -> list[ScoredEvent]:
        """Events with their parts and the p-value of each level."""
        keys = dict.fromkeys((event.tenant, event.entity) for event in events)
        before = {key: dict(states.get(key, {})) for key in keys}
        scored: list[ScoredEvent] = []
        earlier: dict[tuple[str, str], list[Event]] = {}
        for event in events:
            key = (event.tenant, event.entity)
            same = earlier.setdefault(key, [])
            one = ScoredEvent(event, 1.0, False, "normal", states=before[key], earlier=same)
            scored.append(one)
            earlier[key] = [*same, event] if event.entity else same
        for number, level in enumerate(self.levels):
            known: dict[tuple[str, str], Any] = {key: before[key].get(level.name) for key in keys}
            surprise = level.score(events, known)
            for key, state in known.items():
                if state is not None:
                    states.setdefault(key, {})[level.name] = state
            calibrator = self.part_calibrators[level.name]
            calibrator.extend(level.group_names())
            p = calibrator.p_values(surprise.groups, surprise.bits).p
            if level.bits_bound_p:
                p = np.maximum(p, np.exp2(-np.clip(surprise.bits, 0, 900)))
            level_score = -np.log2(harmonic_mean_p(p, surprise.offsets))
            level_p = self.event_calibrator.p_values(np.full(len(events), number), level_score).p
            level_scores, offsets = level_score.tolist(), surprise.offsets.tolist()
            for i, (one, value) in enumerate(zip(scored, level_p.tolist(), strict=True)):
                part = slice(offsets[i], offsets[i + 1])
                one.parts[level.name] = Parts(surprise.groups[part], surprise.bits[part], p[part])
                one.level_scores[level.name], one.level_p[level.name] = level_scores[i], value
        return scored

    def _status(self, scored: ScoredEvent, reported: dict[str, int]) -> str:
        """Status of an event.

        Args:
            reported: How often each finding was reported in the batch so far; updated.
        """
        event = scored.event
        count = self.known_endpoints.get((event.tenant, event.endpoint), 0)
        new = count < self.settings.new_events
        learning = not new and count < self.settings.learning_events
        if scored.p > self.budget.threshold:
            return "learning" if new or learning else "normal"
        level, group = self._worst_part(scored)
        finding = f"{event.tenant}/new endpoint" if new else f"{event.tenant}/{level}/{group}"
        if not new and group not in ANYWHERE and count < self.settings.shadow_events:
            return "learning" if learning else "shadow"
        who = f"{event.tenant}/entity/{event.entity}" if event.entity else f"{finding}/alone"
        if group in ABOUT_ENDPOINT:
            who = f"{event.tenant}/endpoint/{event.endpoint}"
        scored.finding = (who, finding)
        extra = (reported.get(scored.finding[0], 0), reported.get(scored.finding[1], 0))
        if self.budget.is_repeated(scored.finding, event.time, extra):
            return "repeated"
        for name in scored.finding:
            reported[name] = reported.get(name, 0) + 1
        return "alert"

    def _worst_part(self, scored: ScoredEvent) -> tuple[str, str]:
        """Level and group of the most unusual part."""
        level = min(self.levels, key=lambda each: scored.level_p[each.name])
        parts = scored.parts[level.name]
        if not len(parts.p):
            return level.name, ""
        return level.name, level.group_names()[parts.groups[int(parts.p.argmin())]]

    def alert(self, scored: ScoredEvent) -> Alert:
        """Explain an event."""
        return explain(self, scored)

    def alert_id(self, event: Event) -> str:
        """Id of the alert of an event: the same whenever it is scored, also after an update."""
        text = f"{self.model_id}\0{event.tenant}\0{event.source}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def baseline(self) -> int:
        """Number of normal events that p is calibrated on."""
        return int(self.event_calibrator.sizes(np.array([len(self.levels)]))[0])

    def update(self, scored: Sequence[ScoredEvent], *, accepted: bool = False) -> None:
        """Learn from scored events.

        Args:
            scored: In the order in which they were scored. Alerts among them, repeated or not, do
                not teach; they count towards the budget.
            accepted: Whether someone said that all of them are normal: then all of them teach.
        """
        if not accepted:
            self.count_alerts(scored)
        for each in scored:
            key = (each.event.tenant, each.event.endpoint)
            if key in self.known_endpoints or len(self.known_endpoints) < MAX_KNOWN_ENDPOINTS:
                self.known_endpoints[key] = self.known_endpoints.get(key, 0) + 1
        suspicious = () if accepted else ("alert", "repeated")
        normal = [each for each in scored if each.status not in suspicious]
        tail = [each for each in scored if each.status in suspicious and self.budget.take_credit()]
        self.calibrate_parts(normal)
        self.calibrate_events(normal)
        self.calibrate_events(tail, self.event_calibrator.quantiles(self.budget.threshold))
        self.teach(normal)

    def count_alerts(self, scored: Sequence[ScoredEvent]) -> None:
        """Count events and alerts for the budget, and do not learn from them."""
        alerts = [each for each in scored if each.status == "alert"]
        self.budget.observe([each.event.time for each in scored], len(alerts))
        for each in alerts:
            self.budget.observe_alert(each.finding, each.event.time)

    def change_budget(
        self, alerts_per_day: float | None = None, volume_per_day: float | None = None
    ) -> None:
        """Ask for another number of alerts, or say how many events there are per day; None leaves
        it as it was."""
        changes = {"alerts_per_day": alerts_per_day, "volume_per_day": volume_per_day}
        changes = {name: value for name, value in changes.items() if value is not None}
        self.settings = WatchSettings.model_validate(self.settings.model_dump() | changes)
        self.budget = AlertBudget.from_json(self.budget.to_json(), self.settings)
        self.budget.volume = volume_per_day or self.budget.volume

    def teach(self, scored: Sequence[ScoredEvent]) -> None:
        """Let the levels learn from events, whatever their status."""
        events = [each.event for each in scored]
        for level in self.levels:
            level.update(events)
        self.normal_events.add(events)

    def calibrate_parts(self, scored: Sequence[ScoredEvent]) -> None:
        """Add the parts of normal events to the calibration."""
        for level in self.levels if scored else ():
            parts = [each.parts[level.name] for each in scored]
            groups = np.concatenate([each.groups for each in parts])
            calibrator = self.part_calibrators[level.name]
            calibrator.add(groups, np.concatenate([each.bits for each in parts]))
            calibrator.correct(groups, np.concatenate([each.p for each in parts]))

    def calibrate_events(
        self, scored: Sequence[ScoredEvent], limits: npt.NDArray[np.float64] | None = None
    ) -> None:
        """Add the scores of events, by level and combined, to the calibration.

        Args:
            limits: Largest score of each level, and the largest combined one.
        """
        if not scored:
            return
        names = [level.name for level in self.levels]
        scores = np.array([[*(each.level_scores[n] for n in names), each.score] for each in scored])
        if limits is not None:
            scores = np.minimum(scores, limits)
        groups = np.tile(np.arange(len(names) + 1), len(scored))
        self.event_calibrator.add(groups, scores.reshape(-1))

    def save(self, folder: Path) -> None:
        """Write the detector to a folder."""
        parts = {
            "detector": StoredPart(
                {
                    "settings": self.settings.model_dump(mode="json"),
                    "model": self.model_id,
                    "secret": hash_text(SECRET_CHECK, self.secret),
                    "levels": [level.name for level in self.levels],
                    "classes": {
                        level.name: f"{type(level).__module__}:{type(level).__qualname__}"
                        for level in self.levels
                    },
                    "budget": self.budget.to_json(),
                    "endpoints": [[*key, count] for key, count in self.known_endpoints.items()],
                    "normal_events": self.normal_events.to_json(),
                    "states": [
                        [*key, each] for key, each in list(self.states.items())[-MAX_STATES:]
                    ],
                },
                {},
            ),
            "events": StoredPart(self.event_calibrator.to_json(), self.event_calibrator.tensors()),
        }
        for level in self.levels:
            calibrator = self.part_calibrators[level.name]
            parts[f"level-{level.name}"] = StoredPart(level.to_json(), level.tensors())
            parts[f"parts-{level.name}"] = StoredPart(calibrator.to_json(), calibrator.tensors())
        write_model(folder, parts, self.model_id)

    @classmethod
    def load(cls, folder: Path, *, secret: bytes = b"") -> Detector:
        """Read a detector that `save` wrote; raise `CorruptFile` if it is damaged.

        Args:
            secret: Key of the hashes of values, if `settings.hash_values`.
        """
        model = read_model(folder)
        try:
            content = model["detector"].content
            settings = WatchSettings.model_validate(content["settings"])
            if hash_text(SECRET_CHECK, secret) != content["secret"]:
                raise ValueError(
                    f"{folder} was learned with another secret: give the same --secret-file."
                    if settings.hash_values and secret
                    else f"{folder} has hashed values: give the --secret-file that it was learned "
                    "with."
                    if settings.hash_values
                    else f"{folder} was learned without a secret."
                )
            levels = []
            for name in content["levels"]:
                stored = model[f"level-{name}"]
                level = find_class(content["classes"][name]).from_json(
                    stored.content, stored.tensors
                )
                if hasattr(level, "secret"):
                    level.secret = secret
                levels.append(level)
            detector = cls(settings, levels, model_id=content["model"], secret=secret)
            for name in content["levels"]:
                detector.part_calibrators[name] = Calibrator.from_json(*model[f"parts-{name}"])
            detector.event_calibrator = Calibrator.from_json(*model["events"])
            detector.budget = AlertBudget.from_json(content["budget"], settings)
            detector.known_endpoints = {
                (tenant, endpoint): count for tenant, endpoint, count in content["endpoints"]
            }
            detector.normal_events.restore(content["normal_events"])
            detector.states = {
                (tenant, entity): state for tenant, entity, state in content["states"]
            }
        except (KeyError, IndexError, AttributeError, TypeError, ValidationError) as error:
            raise CorruptFile(
                f"{folder} was written by another version of Regard, or edited: "
                f"{type(error).__name__}: {error}"
            ) from None
        return detector


def load_level_class(name: str) -> Callable[[WatchSettings], Level]:
    """The class of a level; its module is imported."""
    check_choice("A level", name, LEVEL_CLASSES)
    return cast(Callable[[WatchSettings], Level], find_class(LEVEL_CLASSES[name]))


def find_class(path: str) -> type[Level]:
    """The class of a level from "module:class"; only modules of this package are imported."""
    module, _, name = path.partition(":")
    if not module.startswith(f"{__package__}."):
        raise KeyError(path)
    found: type[Level] = getattr(import_module(module), name)
    return found
