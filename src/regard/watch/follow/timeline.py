"""Events a minute of each endpoint, for the page: what came in, and what was found."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from regard.watch.detector import ScoredEvent
from regard.watch.follow.store import SeriesPoint

MINUTE = 60.0
MAX_ENDPOINTS = 50  # with series of their own
ALL = "all"
DECAY = 0.95  # of the running mean and variance, a minute
BAND = 3.0  # standard deviations
MIN_MINUTES = 10  # before there is a band


@dataclass
class RunningBand:
    """A running mean and variance of a quantity, and so the band of its next value."""

    mean: float = 0.0
    variance: float = 0.0
    minutes: int = 0

    def ends(self) -> tuple[float | None, float | None]:
        """The band of the next value; (None, None) in the first minutes."""
        if self.minutes < MIN_MINUTES:
            return None, None
        width = BAND * self.variance**0.5
        return max(0.0, self.mean - width), self.mean + width

    def add(self, value: float) -> None:
        """Add the value of a minute."""
        self.minutes += 1
        weight = max(1 / self.minutes, 1 - DECAY)
        difference = value - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference**2)


class Timeline:
    """Counts events, alerts and mean surprise by endpoint and minute of the events' clocks.

    A minute ends when an event of a later one comes. Clocks that go back count into the current
    minute, and so do those that are ahead of this machine's.
    """

    def __init__(self) -> None:
        self.minute = 0.0
        self.counts: dict[tuple[str, str], list[float]] = {}
        self.bands: dict[tuple[str, str, str], RunningBand] = {}

    def add(self, scored: Iterable[ScoredEvent]) -> list[SeriesPoint]:
        """Add events; returns the points of the minutes that have ended."""
        points: list[SeriesPoint] = []
        now = time.time() // MINUTE * MINUTE
        for each in scored:
            event = each.event
            minute = min(event.time // MINUTE * MINUTE, now)
            if minute > self.minute:
                points += self._end_minute()
                self.minute = minute
            subjects = [(event.tenant, ALL), (event.tenant, f"endpoint {event.endpoint}")]
            for subject in subjects:
                if subject not in self.counts and len(self.counts) > MAX_ENDPOINTS:
                    continue
                counts = self.counts.setdefault(subject, [0.0, 0.0, 0.0])
                counts[0] += 1
                counts[1] += each.status == "alert"
                counts[2] -= log2(max(each.p, 1e-9))
        return points

    def _end_minute(self) -> list[SeriesPoint]:
        """The points of the current minute; its counts begin again."""
        points = []
        for (tenant, subject), (events, alerts, bits) in self.counts.items():
            values = {"events": events, "alerts": alerts, "bits": bits / max(events, 1.0)}
            for name, value in values.items():
                band = self.bands.setdefault((tenant, subject, name), RunningBand())
                low, high = band.ends() if name != "alerts" else (None, None)
                points.append(SeriesPoint(tenant, subject, name, self.minute, value, low, high))
                band.add(value)
        # an endpoint that was quiet this minute has none in the next one either: a gap, not a zero
        self.counts = {}
        if len(self.bands) > 3 * (MAX_ENDPOINTS + 1):
            self.bands = {key: band for key, band in self.bands.items() if key[1] == ALL}
        return points
