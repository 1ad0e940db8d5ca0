"""`regard watch demo`: learn the shop's traffic, follow it as it comes, and say what was found."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from regard.output_folders import check_output_folder
from regard.watch.demo.attacks import ATTACKS, Label
from regard.watch.demo.shop import DAY, START
from regard.watch.demo.traffic import generate_labelled_traffic
from regard.watch.detector import OnProgress
from regard.watch.events import read_events
from regard.watch.follow.follower import Follower, FollowSettings
from regard.watch.follow.state_folder import POSITIONS_FOLDER, load_detector, prepare_folder
from regard.watch.follow.store import AlertQuery, WatchStore
from regard.watch.learning import Learned, learn_detector
from regard.watch.outputs.documents import title
from regard.watch.settings import WatchSettings
from regard.watch.sources import open_source
from regard.watch.users.shapes import describe_shape

LEARNED, LIVE, MODEL, STATE = "learn.jsonl", "live.jsonl", "shop.watch", "state"
FIELDS: dict[str, Any] = {
    "entity": "request.user",
    "endpoint": "request.method request.path",
    "time": "time",
    "format": "jsonl",
}
TICK = 0.1  # seconds between two writes of live traffic
REPORTED = ("alert",)  # statuses of alerts that someone is asked to judge


@dataclass
class DemoPlan:
    """What the demo does.

    Attributes:
        folder: Where its files go.
        users: Number of customers.
        learn_days: Days of normal traffic to learn from.
        days: Days of traffic with attacks to follow.
        seconds: Time in which those days pass.
        alerts_per_day: Budget of alerts.
        seed: Seed of the traffic and of the model.
    """

    folder: Path
    users: int = 200
    learn_days: float = 14.0
    days: float = 3.0
    seconds: float = 60.0
    alerts_per_day: float = 20.0
    seed: int = 0

    @property
    def settings(self) -> WatchSettings:
        """Settings of the model."""
        return WatchSettings(**FIELDS, alerts_per_day=self.alerts_per_day, seed=self.seed)

    def traffic(self) -> Iterator[tuple[dict[str, Any], Label | None]]:
        """The events of all days with their labels; there are no attacks in the first days."""
        return generate_labelled_traffic(
            self.learn_days + self.days, self.users, self.seed, attacks_from=self.learn_days
        )


@dataclass
class KindResult:
    """How attacks of one kind were found.

    Attributes:
        kind: The kind.
        owasp: What the OWASP list calls it.
        incidents: Number of incidents.
        found: Number of incidents with an alert, or whose event was reported as a new shape.
        events: Number of their events.
        seen_as: Title of the most urgent alert, or the new shape.
    """

    kind: str
    owasp: str
    incidents: int
    found: int
    events: int
    seen_as: str


@dataclass
class DemoResult:
    """What was found.

    Attributes:
        kinds: One entry for each kind of attack.
        days: Days that were followed.
        events: Events that were followed.
        alerts: Alerts in all.
        false_alerts: Alerts on normal events.
        shapes: New shapes of requests that were reported, each once.
        false_shapes: Those that a normal event was the first of.
        alerts_per_day: The budget.
    """

    kinds: list[KindResult]
    days: float
    events: int
    alerts: int
    false_alerts: int
    shapes: int
    false_shapes: int
    alerts_per_day: float

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)


def prepare_demo_folder(folder: Path) -> None:
    """Create the folder, or empty the one of an earlier demo."""
    check_output_folder(folder, "folder of regard watch demo", LEARNED)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MODEL, STATE):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (LEARNED, LIVE):
        (folder / name).unlink(missing_ok=True)


class LiveTraffic(threading.Thread):
    """Appends events to a file at the pace of their clocks, but faster.

    Attributes:
        labels: Label of each line that was written.
        day: Days of the traffic that have passed, since the first event.
        finished: Whether all was written.

    Args:
        path: The file.
        events: Events with labels.
        start: Time of the first, in seconds since 1970.
        speed: Seconds of the traffic in one second.
    """

    def __init__(
        self,
        path: Path,
        events: Iterator[tuple[dict[str, Any], Label | None]],
        start: float,
        speed: float,
    ) -> None:
        super().__init__(name="traffic", daemon=True)
        self.path, self.events, self.first, self.speed = path, events, start, speed
        self.labels: list[Label | None] = []
        self.day = 0.0
        self.finished = False
        self.stopping = threading.Event()
        path.touch()

    def run(self) -> None:
        began = time.monotonic()
        with self.path.open("a", encoding="utf-8") as file:
            for event, label in self.events:
                moment = event_time(event) - self.first
                ahead = moment / self.speed - (time.monotonic() - began)
                if ahead > TICK:
                    file.flush()
                    self.stopping.wait(ahead)
                if self.stopping.is_set():
                    break
                file.write(json.dumps(event) + "\n")
                self.labels.append(label)
                self.day = moment / DAY
        self.finished = True


class ShopDemo:
    """The demo, step by step: `learn`, then `follow`, then `result`."""

    def __init__(self, plan: DemoPlan) -> None:
        self.plan = plan
        self.model, self.state = plan.folder / MODEL, plan.folder / STATE
        self.source = plan.folder / LIVE
        self.rest = plan.traffic()

    def learn(self, on_progress: OnProgress) -> Learned:
        """Write the first days to a file and learn from it."""
        prepare_demo_folder(self.plan.folder)
        end = START + self.plan.learn_days * DAY
        path = self.plan.folder / LEARNED
        count = 0
        with path.open("w", encoding="utf-8") as file:
            for event, label in self.rest:
                if event_time(event) >= end:
                    break
                assert label is None
                file.write(json.dumps(event) + "\n")
                count += 1
                if count % 1000 == 0:
                    on_progress("make traffic", count, 0)
        learned = learn_detector(
            read_events(path, self.plan.settings), self.plan.settings, on_progress
        )
        learned.detector.save(self.model)
        prepare_folder(self.state)
        WatchStore(self.state, create=True).close()
        return learned

    def follow(
        self,
        on_tick: Callable[[float, int, int], None],
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Follow the traffic of the other days until they have passed.

        Args:
            on_tick: Called now and then with the days that have passed, events and alerts.
            report: Called with lines for people.
        """
        start = START + self.plan.learn_days * DAY
        speed = self.plan.days * DAY / self.plan.seconds
        self.live = LiveTraffic(self.source, self.rest, start, speed)
        detector = load_detector(self.model, self.state)
        follower = Follower(
            detector,
            lambda: open_source(
                self.source,
                settings=detector.settings,
                follow=True,
                state=self.state / POSITIONS_FOLDER,
            ),
            self.state,
            FollowSettings(batch_size=64),
            report=report,
        )
        failures: list[BaseException] = []

        def run() -> None:
            try:
                follower.run()
            except BaseException as error:  # reported by the caller's thread
                failures.append(error)

        thread = threading.Thread(target=run, name="follower", daemon=True)
        thread.start()
        self.live.start()
        try:
            while thread.is_alive():
                done = follower.events + follower.dead_letters.total
                on_tick(self.live.day, follower.events, follower.alerts)
                if self.live.finished and done >= len(self.live.labels):
                    break
                time.sleep(TICK)
        finally:
            self.live.stopping.set()
            follower.stopping.set()
            thread.join()
            self.live.join()
        if failures:
            raise failures[0]
        on_tick(self.live.day, follower.events, follower.alerts)

    def result(self) -> DemoResult:
        """Compare the alerts with the labels."""
        store = WatchStore(self.state)
        try:
            alerts = store.alerts(AlertQuery(statuses=REPORTED, limit=1_000_000))
            shapes = store.shapes()
        finally:
            store.close()
        labels = self.live.labels
        found: dict[Label | None, list[str]] = {}  # incident -> what was said, most urgent first
        for alert in alerts:
            label = labels[line_number(alert.content["source"]) - 1]
            found.setdefault(label, []).append(title(alert.content))
        false_alerts = len(found.get(None, []))
        for shape in shapes:
            label = labels[line_number(shape.example) - 1]
            found.setdefault(label, []).append(f"New shape: {describe_shape(shape)}")

        kinds = []
        for kind, attack in ATTACKS.items():
            of_kind = [label for label in labels if label is not None and label.kind == kind]
            incidents = dict.fromkeys(of_kind)
            said = [text for label in incidents for text in found.get(label, [])]
            kinds.append(
                KindResult(
                    kind=kind,
                    owasp=attack.owasp,
                    incidents=len(incidents),
                    found=sum(label in found for label in incidents),
                    events=len(of_kind),
                    seen_as=said[0] if said else "",
                )
            )
        return DemoResult(
            kinds=kinds,
            days=self.live.day,
            events=len(labels),
            alerts=len(alerts),
            false_alerts=false_alerts,
            shapes=len(shapes),
            false_shapes=len(found.get(None, [])) - false_alerts,
            alerts_per_day=self.plan.alerts_per_day,
        )


def line_number(source: str) -> int:
    """The line of an event in the file of the live traffic, from 1."""
    return int(source.rpartition(":")[2])


def event_time(event: dict[str, Any]) -> float:
    """The time of an event of the shop, in seconds since 1970."""
    return datetime.fromisoformat(event["time"]).timestamp()
