"""How fast one core parses, scores, learns and stores events."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.environment import peak_bytes
from regard.watch.detector import Detector
from regard.watch.events import EventParser
from regard.watch.follow.entities import EntityStore
from regard.watch.follow.processed import ProcessedIds
from regard.watch.follow.store import AlertEntry, WatchStore, event_to_json
from regard.watch.sources import Record, open_source

STAGES = ("parse", "score", "explain alerts", "learn", "commit")


@dataclass
class StageTimes:
    """Processor time of each stage.

    Attributes:
        seconds: CPU seconds per event, by stage.
        events: Number of events.
        leaves: Mean number of leaves.
        alerts: Number of events that were alerts.
        p50_ms: Median wall time of a batch, all stages.
        p99_ms: Its 99th percentile.
        peak_mb: Peak resident memory of the process; None where the system does not tell.
    """

    seconds: dict[str, float]
    events: int
    leaves: float
    alerts: int
    p50_ms: float
    p99_ms: float
    peak_mb: float | None

    @property
    def total(self) -> float:
        """CPU seconds per event."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"events_per_second": 1 / self.total}


def measure_stages(detector: Detector, data: str, *, events: int, batch_size: int) -> StageTimes:
    """Run the stages of `follow` on the first events of a file, in this thread.

    CPU time is measured, so that other work on the machine counts less. Each batch is committed, as
    when every batch has an alert.
    """
    source = open_source(data, settings=detector.settings)
    records: list[Record] = []
    while len(records) < events and not source.exhausted:
        records += source.read(events - len(records), 1.0)
    source.close()
    if not records:
        raise ValueError(f"{data} has no records.")
    spent = dict.fromkeys(STAGES, 0.0)
    counts = {"events": 0, "leaves": 0, "alerts": 0}
    batches = []
    parser = EventParser(detector.settings)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        spent[name] += time.process_time() - start

    with tempfile.TemporaryDirectory() as folder:
        store = WatchStore(Path(folder), create=True)
        states = EntityStore(store.database)
        processed = ProcessedIds(store.database)
        for start in range(0, len(records), batch_size):
            batch = records[start : start + batch_size]
            began = time.perf_counter()
            with stage("parse"):
                parsed = parser.parse(batch)
            with stage("score"):
                states.prefetch({(event.tenant, event.entity) for event in parsed})
                scored = detector.score(parsed, states)
            with stage("explain alerts"):
                entries = [
                    AlertEntry(detector.alert(each).to_json(), event=event_to_json(each.event))
                    for each in scored
                    if each.status == "alert"
                ]
            with stage("learn"):
                detector.update(scored)
            with stage("commit"):
                ids = [record.id for record in batch]
                with store.transaction():
                    store.add_alerts(entries)
                    states.write()
                    processed.write(ids)
                states.evict()
                processed.remember(ids)
            batches.append(time.perf_counter() - began)
            counts["events"] += len(parsed)
            counts["leaves"] += sum(len(event.paths) for event in parsed)
            counts["alerts"] += len(entries)
        store.close()
    if not counts["events"]:
        raise ValueError(f"No record of {data} could be parsed: {parser.dead_letters.summary()}")
    peak = peak_bytes()
    return StageTimes(
        seconds={stage: seconds / counts["events"] for stage, seconds in spent.items()},
        events=counts["events"],
        leaves=counts["leaves"] / counts["events"],
        alerts=counts["alerts"],
        p50_ms=float(np.quantile(batches, 0.5) * 1e3),
        p99_ms=float(np.quantile(batches, 0.99) * 1e3),
        peak_mb=None if peak is None else peak / 1e6,
    )
