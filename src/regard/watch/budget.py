"""How many alerts a day: the threshold that keeps a budget, and what is reported only once."""

from __future__ import annotations

from math import exp
from typing import Any

from regard.watch.settings import WatchSettings

DAY = 86_400.0
STEP = 0.05  # change of the logarithm of the threshold for each alert
LOWEST, HIGHEST = -7.0, 1.0  # of the logarithm of the correction
MAX_CREDIT = 5.0
MAX_SHARE = 0.25  # of the budget of a day, for one kind of finding
MAX_FINDINGS = 20_000  # repeated findings that are counted at a time


class AlertBudget:
    """Keeps the number of alerts per day near a budget.

    The threshold of p is budget / volume, times a correction: each alert lowers it a little, each
    event without one raises it, so that the long-run rate is the budget also when normal traffic
    drifts (adaptive conformal inference, Gibbs and Candès 2021). The correction is bounded, so that
    a flood of alerts cannot close the eyes of the detector.

    Attributes:
        volume: Events per day, of about the last day.
    """

    def __init__(self, settings: WatchSettings, volume: float) -> None:
        self.settings = settings
        self.volume = settings.volume_per_day or volume
        self.correction = 0.0
        self.credit = 0.0
        self.clock: float | None = None
        self.day = 0
        self.reported: dict[str, int] = {}

    @property
    def rate(self) -> float:
        """Share of events that may be alerts."""
        return min(self.settings.alerts_per_day / max(self.volume, 1.0), 0.5)

    @property
    def threshold(self) -> float:
        """Largest p of an alert."""
        return min(self.rate * exp(self.correction), 0.5)

    def observe(self, times: list[float], alerts: int) -> None:
        """Count events that were scored, and the alerts among them."""
        if not times:
            return
        self.correction += STEP * (len(times) * self.rate - alerts)
        self.correction = min(max(self.correction, LOWEST), HIGHEST)
        self.credit = min(self.credit + len(times) * self.rate, MAX_CREDIT)
        if self.settings.volume_per_day is not None:
            return
        now = max(times)
        if self.clock is not None and now > self.clock:
            elapsed = min(now - self.clock, DAY)
            self.volume = self.volume * exp(-elapsed / DAY) + len(times)
        self.clock = now if self.clock is None else max(self.clock, now)

    def take_credit(self) -> bool:
        """Whether an alert may enter the calibration of event scores, as an event at the threshold.
        As many may as the budget expects of normal traffic: without them the sample would lose its
        tail, and with all of them an attack would teach that it is normal."""
        if self.credit < 1:
            return False
        self.credit -= 1
        return True

    def reports_of(self, findings: tuple[str, str], time: float) -> tuple[int, int]:
        """How often findings were reported on the day of `time`."""
        if int(time // DAY) > self.day:
            return 0, 0
        return self.reported.get(findings[0], 0), self.reported.get(findings[1], 0)

    def is_repeated(self, findings: tuple[str, str], time: float, extra: tuple[int, int]) -> bool:
        """Whether an alert was reported often enough today.

        Args:
            findings: Name of the entity, and of the finding; see `ScoredEvent.finding`.
            extra: How often they were reported since `observe_alert`.
        """
        own, everyone = self.reports_of(findings, time)
        limit = self.settings.repeats_per_day
        most = max(limit, self.settings.alerts_per_day * MAX_SHARE)
        return own + extra[0] >= limit or everyone + extra[1] >= most

    def observe_alert(self, findings: tuple[str, str], time: float) -> None:
        """Count an alert that was reported."""
        day = int(time // DAY)
        if day > self.day or len(self.reported) >= MAX_FINDINGS:
            self.day, self.reported = max(day, self.day), {}
        for finding in findings:
            self.reported[finding] = self.reported.get(finding, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "volume": self.volume,
            "correction": self.correction,
            "credit": self.credit,
            "clock": self.clock,
            "day": self.day,
            "reported": self.reported,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any], settings: WatchSettings) -> AlertBudget:
        """The inverse of `to_json`."""
        budget = cls(settings, content["volume"])
        budget.correction, budget.credit = content["correction"], content["credit"]
        budget.clock, budget.day = content["clock"], content["day"]
        budget.reported = content["reported"]
        return budget
