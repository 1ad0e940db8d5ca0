"""Alerts: what the detector says about an event that is not normal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from regard.watch.level import Finding

SEVERITIES = ("low", "medium", "high", "critical")


@dataclass
class Alert:
    """An event that is not normal, and why.

    Attributes:
        id: The same whenever the same event is scored by the same model, so that duplicates can be
            dropped.
        time: Time of the event, in seconds since 1970.
        source: Where the event is: its file and line, or its stream and offset.
        tenant: Tenant of the event.
        entity: Who acted.
        endpoint: What was called.
        p: Share of normal events that are at least as unusual.
        extrapolated: Whether p is beyond what the calibration sample can show.
        severity: One of `SEVERITIES`.
        kind: Kind of the first finding.
        findings: What is unusual, the most unusual first.
        nearest_normal: The normal event of this endpoint that is most alike: path -> value.
        what_if: For the first leaves found: {"path", "value", "bits_before", "bits_after",
            "p_before", "p_after"} with the expected value in its place.
        leaves: All leaves with their bits: {"path", "value", "bits"}.
        baseline: Number of normal events that p was calibrated on.
        model: Hash of the model.
        status: "alert", or "shadow" while an endpoint is new.
    """

    id: str
    time: float
    source: str
    tenant: str
    entity: str
    endpoint: str
    p: float
    extrapolated: bool
    severity: str
    kind: str
    findings: list[Finding]
    nearest_normal: dict[str, Any] = field(default_factory=dict)
    what_if: list[dict[str, Any]] = field(default_factory=list)
    leaves: list[dict[str, Any]] = field(default_factory=list)
    baseline: int = 0
    model: str = ""
    status: str = "alert"

    def to_json(self) -> dict[str, Any]:
        """The alert as JSON values."""
        return asdict(self)
