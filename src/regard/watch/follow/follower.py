"""The main loop of `regard watch follow`: read, score, commit, acknowledge.

What is made of a record is committed in one transaction: the alerts, the states of the entities,
the counts of shapes, and the id of the record. Only then is the record acknowledged. If the process
is killed

- before the commit, the broker delivers the record again, and nothing of it is left here;
- after the commit, the broker may deliver it again too, and its id says that it is done.

So within one state folder each record counts once. What the model itself learns from normal events
(calibration windows, counts of values) is saved every few minutes: a crash loses what was learned
since, and no alert.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from regard.json_files import flush_to_disk
from regard.watch.alert import Alert
from regard.watch.detector import Detector, ScoredEvent
from regard.watch.event import Event
from regard.watch.events import DeadLetters, EventParser, UnknownFormat
from regard.watch.follow.entities import EntityStore
from regard.watch.follow.metrics import FollowMetrics, HealthState
from regard.watch.follow.processed import ProcessedIds
from regard.watch.follow.reader import ReadAhead
from regard.watch.follow.sending import AlertSender
from regard.watch.follow.state_folder import DEAD_LETTERS_FILE, MODEL_FOLDER
from regard.watch.follow.store import (
    Accepted,
    AlertEntry,
    ClusterPlace,
    Drift,
    Mute,
    SeriesPoint,
    Shape,
    WatchStore,
    event_from_json,
    event_to_json,
)
from regard.watch.follow.timeline import Timeline
from regard.watch.leaves import LeafLevel
from regard.watch.outputs import Output
from regard.watch.sources import Record, Source
from regard.watch.users import UserLevel
from regard.watch.users.drift import DriftMonitor
from regard.watch.users.mutes import find_mute, is_about_shape
from regard.watch.users.ranking import RankingHead, priority
from regard.watch.users.shapes import ShapeEvents, ShapeMonitor, describe_shape

STATUS_FACT, RANKING_FACT = "status", "ranking"
DAY = 86_400.0
SHAPE_REASON = "shape "  # how the reason of an alert about a new shape begins
SERIES_DAYS = 7  # for which points of series are kept
STATUS_SECONDS = 5.0
PRUNE_SECONDS = 600.0
RETRY_SECONDS = 5.0  # between attempts to commit to a disk that is full
POLL_SECONDS = 0.2
SEND_SECONDS = 5.0  # for the outputs, when the process ends


@dataclass
class FollowSettings:
    """Settings of `Follower`.

    Attributes:
        batch_size: Most records that are scored together.
        queue_size: Records that are read ahead.
        commit_seconds: Longest time from scoring to the commit; alerts are committed at once.
        model_seconds: Time between two saves of what the model has learned.
        entities_in_memory: Entities whose states stay in memory.
        max_entities: Entities whose states are stored.
        keep_days: Days for which alerts are kept.
        max_alerts: Alerts that are kept.
        adopt_entities: A new shape of requests is accepted by itself when so many entities have
            used it; 0: never.
        share: (i, n): of n processes, this is number i from 0, and scores its share of entities.
        show_values: Whether outputs get sensitive values.
        learn: Whether the model learns from normal events, and from alerts that are muted or
            accepted.
    """

    batch_size: int = 512
    queue_size: int = 4096
    commit_seconds: float = 1.0
    model_seconds: float = 300.0
    entities_in_memory: int = 20_000
    max_entities: int = 1_000_000
    keep_days: float = 90.0
    max_alerts: int = 200_000
    adopt_entities: int = 0
    share: tuple[int, int] = (0, 1)
    show_values: bool = False
    learn: bool = True


@dataclass
class Pending:
    """What was made of records since the last commit."""

    ids: list[str] = field(default_factory=list)
    id_set: set[str] = field(default_factory=set)
    oldest: float = 0.0
    alerts: list[AlertEntry] = field(default_factory=list)
    shapes: list[ShapeEvents] = field(default_factory=list)
    drifts: list[Drift] = field(default_factory=list)
    points: list[SeriesPoint] = field(default_factory=list)
    muted: Counter[int] = field(default_factory=Counter)
    last_events: dict[tuple[str, str], float] = field(default_factory=dict)


class Follower:
    """Follows a source until it is stopped.

    Args:
        detector: The model.
        open_source: Opens the source of records, in the thread that reads it.
        folder: The state folder; the caller has locked it.
        settings: See `FollowSettings`.
        outputs: Where alerts go.
        report: Called with lines for people.
    """

    def __init__(
        self,
        detector: Detector,
        open_source: Callable[[], Source],
        folder: Path,
        settings: FollowSettings,
        *,
        outputs: Sequence[Output] = (),
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.detector, self.folder, self.settings = detector, folder, settings
        self.open_source, self.source_name = open_source, ""
        self.outputs, self.report = list(outputs), report
        self.metrics, self.health = FollowMetrics(), HealthState()
        self.stopping = threading.Event()

        self.store = WatchStore(folder, create=True, check=True)
        self.states = EntityStore(
            self.store.database,
            capacity=settings.entities_in_memory,
            max_stored=settings.max_entities,
            initial=detector.initial_states(),
        )
        self.processed = ProcessedIds(self.store.database)
        self.dead_letters = DeadLetters(folder / DEAD_LETTERS_FILE)
        self.parser = EventParser(
            detector.settings,
            self.dead_letters,
            lambda found: report(f"the format is {found.name} ({found.title})"),
        )
        self.leaves = next((each for each in detector.levels if isinstance(each, LeafLevel)), None)
        self.users = next((each for each in detector.levels if isinstance(each, UserLevel)), None)
        self.drift = DriftMonitor()
        self.timeline = Timeline()
        self.pending = Pending()
        self.learned: list[str] = []
        self.events = self.alerts = 0
        now = time.monotonic()
        self.committed = self.saved = self.pruned = self.status_written = now
        self._read_feedback()
        self.alerted_shapes = {
            reason.removeprefix(SHAPE_REASON).partition(":")[0]
            for reason in self.store.alert_values("reason")
            if reason.startswith(SHAPE_REASON)
        }
        self.changes = self.store.change_count()

    # ------------------------------------------------------------------------ the main loop
    def run(self) -> None:
        """Follow the source until `stopping` is set, or until it is exhausted."""
        reader = ReadAhead(self.open_source, self.settings.queue_size, self.report)
        self.source_name = reader.name
        self.report(f"following {reader.name}")
        sender = AlertSender(
            self.folder, self.outputs, show_values=self.settings.show_values, report=self.report
        )
        sender.wake()  # what an earlier process left
        self.health.problems.pop("start", None)
        try:
            while not self.stopping.is_set() and not reader.exhausted:
                self.health.beat = time.monotonic()
                records = reader.take(self.settings.batch_size, self._patience())
                if (changes := self.store.change_count()) != self.changes:
                    self.changes = changes
                    self._read_feedback()
                if records:
                    self._process(records, reader, oldest=time.monotonic() - reader.waited)
                if self._commit_is_due() and self._commit(reader):
                    sender.wake()
                self._look_after(reader, sender)
            if self._commit(reader):
                self.save_model()
        finally:
            reader.close()
            sender.close(SEND_SECONDS)
            self.dead_letters.close()
            self.store.close()

    def _patience(self) -> float:
        """How long to wait for records: until the next commit is due."""
        if not self.pending.ids:
            return POLL_SECONDS
        left = self.committed + self.settings.commit_seconds - time.monotonic()
        return max(0.0, min(POLL_SECONDS, left))

    def _commit_is_due(self) -> bool:
        """Whether there is an alert, or something has waited long enough."""
        pending = self.pending
        return bool(pending.alerts) or (
            bool(pending.ids)
            and (
                time.monotonic() - self.committed >= self.settings.commit_seconds
                or len(self.states.used) > self.settings.entities_in_memory
            )
        )

    def _look_after(self, reader: ReadAhead, sender: AlertSender) -> None:
        """What is to be done now and then."""
        now = time.monotonic()
        problems = {"source": reader.error, "output": sender.error}
        for part, problem in problems.items():
            if problem:
                self.health.problems[part] = problem
            else:
                self.health.problems.pop(part, None)
        self.metrics.waiting.set(reader.waiting)
        if reader.lag is not None:
            self.metrics.lag.set(reader.lag)
        self.metrics.entities.set(len(self.states.memory))
        if now - self.saved >= self.settings.model_seconds:
            self.save_model()
        if now - self.pruned >= PRUNE_SECONDS:
            self.pruned = now
            with suppress(OSError):  # a full disk is reported by the commits
                self.store.prune(
                    before=time.time() - self.settings.keep_days * DAY,
                    max_alerts=self.settings.max_alerts,
                    series_seconds=SERIES_DAYS * DAY,
                )
                self.states.prune()

    # --------------------------------------------------------------------------- processing
    def _process(self, records: Sequence[Record], reader: ReadAhead, *, oldest: float) -> None:
        """Score records; what is made of them waits for the commit."""
        self.metrics.records.inc(len(records))
        fresh: dict[str, Record] = {}
        again = []
        for record in records:
            if record.id in self.processed:
                again.append(record.id)
            elif record.id not in self.pending.id_set:
                fresh.setdefault(record.id, record)
        if again:
            self.metrics.duplicates.inc(len(again))
            reader.acknowledge(again)
        if not fresh:
            return

        pending = self.pending
        if not pending.ids:
            pending.oldest, self.committed = oldest, time.monotonic()
        pending.ids += fresh
        pending.id_set.update(fresh)
        scored = self._score(self._parse(list(fresh.values())))
        self.events += len(scored)
        for status, count in Counter(each.status for each in scored).items():
            self.metrics.events.labels(status).inc(count)

        shapes, shape_ids = self.shapes.add(each.event for each in scored)
        pending.shapes += shapes.values()
        drifts = self.drift.add(scored)
        self.metrics.drifts.inc(len(drifts))
        pending.drifts += drifts
        pending.points += self.timeline.add(scored)
        others: list[ScoredEvent] = []
        accepted: list[ScoredEvent] = []
        for each, shape in zip(scored, shape_ids, strict=True):
            event = each.event
            if event.entity:
                pending.last_events[event.tenant, event.entity] = min(event.time, time.time())
            if each.status in ("normal", "learning"):
                others.append(each)
                continue
            entry = self._judge(each, None if shape is None else shapes[shape].shape)
            pending.alerts.append(entry)
            (accepted if entry.status in ("muted", "accepted") else others).append(each)
        for found in shapes.values():
            self._report_shape(found)
        if self.settings.learn:
            self.detector.update(others)
            if accepted:
                self.detector.update(accepted, accepted=True)

    def _parse(self, records: Sequence[Record]) -> list[Event]:
        """The events of records that are this process's share, in order of time."""
        dead = self.dead_letters.total
        try:
            events = self.parser.parse(records)
        except UnknownFormat as error:
            for record in records:
                self.dead_letters.add(record.id, f"unknown format: {error}", record.data)
            events = []
        self.metrics.dead_letters.inc(self.dead_letters.total - dead)
        number, processes = self.settings.share
        if processes > 1:
            events = [each for each in events if entity_share(each, processes) == number]
        return sorted(events, key=lambda event: event.time)

    def _score(self, events: Sequence[Event]) -> list[ScoredEvent]:
        """Score events. One that cannot be scored becomes a dead letter and stops no other."""
        if not events:
            return []
        keys = {(event.tenant, event.entity) for event in events}
        self.states.prefetch(keys)
        before = self.states.snapshot(keys)
        try:
            with self.metrics.scoring.time():
                return self.detector.score(events, self.states)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            self.states.restore(before)
            if len(events) > 1:
                middle = len(events) // 2
                return self._score(events[:middle]) + self._score(events[middle:])
            reason = f"cannot be scored: {type(error).__name__}: {error}"
            self.report(f"{events[0].source} {reason}. Please report this; it is a dead letter.")
            text = orjson.dumps(event_to_json(events[0]), default=str)
            self.dead_letters.add(events[0].source, reason, text)
            self.metrics.dead_letters.inc()
            return []

    def _judge(self, scored: ScoredEvent, shape: Shape | None) -> AlertEntry:
        """The alert of an event, and whether it is to be shown."""
        if scored.status == "repeated":
            entry = AlertEntry(repeated_alert(self.detector, scored).to_json(), status="repeated")
        else:
            alert = self.detector.alert(scored)
            entry = AlertEntry(
                alert.to_json(), status=alert.status, event=event_to_json(scored.event)
            )
            now = time.time()
            mutes = [each for each in self.mutes if each.expires is None or each.expires > now]
            if mute := find_mute(alert, mutes):
                entry.status, entry.reason = "muted", f"mute {mute.id}: {mute.reason}".strip(": ")
                self.pending.muted[mute.id] += 1
            elif shape is not None and is_about_shape(
                alert, {*(path for path, _ in shape.added), *shape.missing}
            ):
                entry.reason = f"{SHAPE_REASON}{shape.id}: {describe_shape(shape)}"
                known = self.shapes.reported.get(shape.id)
                if known is not None and known.status == "accepted":
                    entry.status = "accepted"
                elif shape.id in self.alerted_shapes:
                    entry.status = "known_shape"
                elif entry.status == "alert":
                    self.alerted_shapes.add(shape.id)
        entry.priority = priority(entry.content, self.ranking)
        self.alerts += entry.status == "alert"
        self.metrics.alerts.labels(entry.status, entry.content["severity"]).inc()
        return entry

    def _report_shape(self, found: ShapeEvents) -> None:
        """Report a shape when it is new; accept it if the rule says so."""
        shape = found.shape
        if shape.id not in self.shapes.reported:
            self.shapes.reported[shape.id] = shape
            self.report(f"new shape {shape.id}: {describe_shape(shape)} ({shape.example})")

    # ----------------------------------------------------------------------------- feedback
    def _read_feedback(self) -> None:
        """Read what people said: mutes, accepted shapes and alerts, and the head of the labels."""
        self.mutes: list[Mute] = self.store.mutes()
        content = self.store.fact(RANKING_FACT)
        self.ranking = None if content is None else RankingHead(**content)
        stored = self.store.shapes()
        if not hasattr(self, "shapes"):
            self.shapes = ShapeMonitor(
                {} if self.leaves is None else self.leaves.schemas,
                learning_events=self.detector.settings.learning_events,
                reported=stored,
            )
        for shape in stored:
            known = self.shapes.reported.get(shape.id)
            if shape.status == "accepted" and (known is None or known.status != "accepted"):
                self.shapes.accept(shape)
        self._learn_accepted(
            each for each in self.store.accepted_to_learn() if each.alert not in self.learned
        )

    def _learn_accepted(self, accepted: Any) -> None:
        """Learn the events of accepted alerts as normal."""
        for each in accepted:
            assert isinstance(each, Accepted)
            event = event_from_json(each.event)
            scored = self.detector.score([event], {})
            self.detector.update(scored, accepted=True)
            self.learned.append(each.alert)
            self.report(f"learned the event of alert {each.alert} as normal")

    # ------------------------------------------------------------------------------ commits
    def _commit(self, reader: ReadAhead) -> bool:
        """Commit what waits and acknowledge it. While the disk is full or the store cannot be
        written, wait; nothing is read meanwhile. False if stopped before it was possible."""
        if not self.pending.ids:
            return True
        while True:
            try:
                self._write()
                break
            except OSError as error:
                self.metrics.failed_commits.inc()
                if "store" not in self.health.problems:
                    self.report(f"{explain_os_error(error)} Trying again; nothing is acknowledged.")
                self.health.problems["store"] = explain_os_error(error)
            deadline = time.monotonic() + RETRY_SECONDS
            while time.monotonic() < deadline:
                self.health.beat = time.monotonic()
                if self.stopping.wait(POLL_SECONDS):
                    self.report(
                        f"Stopped: {len(self.pending.ids):,} records could not be stored. They "
                        "are not acknowledged, and come again after the next start."
                    )
                    return False
        if self.health.problems.pop("store", None) is not None:
            self.report(f"{self.store.database.path} can be written again.")
        self.states.evict()
        self.processed.remember(self.pending.ids)
        reader.acknowledge(self.pending.ids)
        self.metrics.commits.inc()
        self.metrics.latency.observe(time.monotonic() - self.pending.oldest)
        self.pending, self.committed = Pending(), time.monotonic()
        return True

    def _write(self) -> None:
        """Write what waits, in one transaction; dead letters come first."""
        pending = self.pending
        self.dead_letters.flush()
        flush_to_disk(self.folder / DEAD_LETTERS_FILE)
        with self.store.transaction():
            self.store.add_alerts(pending.alerts, [output.name for output in self.outputs])
            self.states.write()
            self.processed.write(pending.ids)
            for found in pending.shapes:
                self.store.add_shape_events(found.shape, found.entities)
            self._adopt_shapes(pending.shapes)
            self.store.add_drifts(pending.drifts)
            self.store.add_series(pending.points)
            for mute, count in pending.muted.items():
                self.store.count_muted(mute, count)
            self._write_clusters()
            now = time.monotonic()
            if now - self.status_written >= STATUS_SECONDS:
                self.status_written = now
                self.store.set_fact(STATUS_FACT, self.status())

    def _adopt_shapes(self, found: Sequence[ShapeEvents]) -> None:
        """Accept the shapes that enough entities use, if there is such a rule."""
        if not self.settings.adopt_entities or not found:
            return
        wanted = {each.shape.id for each in found}
        for shape in self.store.shapes("new"):
            if shape.id in wanted and shape.entities >= self.settings.adopt_entities:
                self.store.accept_shape(shape.id)
                shape.status = "accepted"
                self.shapes.accept(shape)
                self.report(
                    f"accepted shape {shape.id}: {describe_shape(shape)}, used by "
                    f"{shape.entities:,} entities"
                )

    def _write_clusters(self) -> None:
        """Write where the entities are that have acted."""
        if self.users is None:
            return
        times = self.pending.last_events
        states = {}
        for key in times:
            state = self.states.memory.get(key, {}).get(self.users.name)
            if state is not None:
                states[key] = state
        self.store.set_clusters(
            [
                ClusterPlace(
                    tenant,
                    entity,
                    place.cluster,
                    place.home,
                    place.x,
                    place.y,
                    place.events,
                    times[tenant, entity],
                )
                for (tenant, entity), place in self.users.places(states).items()
            ]
        )

    def status(self) -> dict[str, Any]:
        """What the page shows about the process."""
        return {
            "time": time.time(),
            "source": self.source_name,
            "events": self.events,
            "alerts": self.alerts,
            "dead_letters": self.dead_letters.total,
            "problems": dict(self.health.problems),
        }

    def save_model(self) -> None:
        """Save what the model has learned beside the alerts; the older version is replaced when
        the new one is complete."""
        self.saved = time.monotonic()
        try:
            self.detector.save(self.folder / MODEL_FOLDER)
            with self.store.transaction():
                self.store.finish_accepted(self.learned)
                self.store.set_fact(STATUS_FACT, self.status())
            self.learned = []
        except OSError as error:
            self.report(f"The model could not be saved: {explain_os_error(error)}")


def entity_share(event: Event, processes: int) -> int:
    """The process, from 0, that scores the entity of an event."""
    name = f"{event.tenant}\0{event.entity}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") % processes


def repeated_alert(detector: Detector, scored: ScoredEvent) -> Alert:
    """A short alert for a finding that was reported often enough today: without an explanation."""
    event = scored.event
    return Alert(
        id=detector.alert_id(event),
        time=event.time,
        source=event.source,
        tenant=event.tenant,
        entity=event.entity,
        endpoint=event.endpoint,
        p=scored.p,
        extrapolated=scored.extrapolated,
        severity="low",
        kind="repeated",
        findings=[],
        baseline=detector.baseline(),
        model=detector.model_id,
        status="repeated",
    )


def explain_os_error(error: OSError) -> str:
    """An error of the file system as a sentence."""
    import errno

    if error.errno == errno.ENOSPC:
        return f"The disk is full: cannot write {error.filename or 'the state folder'}."
    if error.errno == errno.EFBIG:
        return f"{error.filename or 'A file of the state folder'} has reached its largest size."
    text = str(error) if error.errno is None else f"{error.filename}: {error.strerror}"
    return text if text.endswith(".") else f"{text}."
