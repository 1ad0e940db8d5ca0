"""From a scored event to an alert: ranked findings, the nearest normal event, and what if."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.watch.alert import Alert
from regard.watch.event import Event, Value
from regard.watch.level import Finding, Level

if TYPE_CHECKING:
    from regard.watch.detector import Detector, ScoredEvent

MAX_FINDINGS = 5
FINDING_P = 0.02  # parts with a smaller p are findings, beside the most unusual one
MAX_WHAT_IF = 3
KEPT_EVENTS = 32  # normal events of each endpoint
MAX_ENDPOINTS = 1_024
SHOWN_CHARACTERS = 200
SEVERITY_P = (("critical", 1e-9), ("high", 1e-7), ("medium", 1e-5))


class NormalEvents:
    """Some normal events of each endpoint, to show what is usual.

    They are a sample of all that were added (Vitter 1985), stored as JSON, with long strings cut.

    Args:
        secret: If given, strings are stored as a keyed hash.
    """

    def __init__(self, seed: int = 0, secret: bytes | None = None) -> None:
        self.rng, self.secret = np.random.default_rng(seed), secret
        self.kept: dict[tuple[str, str], list[str]] = {}
        self.seen: dict[tuple[str, str], int] = {}

    def add(self, events: Sequence[Event]) -> None:
        """Offer normal events to the sample."""
        draws = self.rng.random(len(events))
        for event, draw in zip(events, draws.tolist(), strict=True):
            key = (event.tenant, event.endpoint)
            if key not in self.kept and len(self.kept) >= MAX_ENDPOINTS:
                continue
            kept = self.kept.setdefault(key, [])
            self.seen[key] = seen = self.seen.get(key, 0) + 1
            slot = len(kept) if len(kept) < KEPT_EVENTS else int(draw * seen)
            if slot < KEPT_EVENTS:
                values = [self._shorten(value) for value in event.values]
                content = json.dumps([event.paths, values])
                kept[slot : slot + 1] = [content]

    def _shorten(self, value: Value) -> Value:
        if not isinstance(value, str):
            return value
        if self.secret is not None:
            return hash_text(value, self.secret)
        return value if len(value) <= SHOWN_CHARACTERS else value[:SHOWN_CHARACTERS] + "…"

    def nearest(self, event: Event) -> dict[str, Any]:
        """The normal event of the same endpoint that shares most leaves: path -> value, or a list
        of values."""
        leaves = set(zip(event.paths, map(repr, map(self._shorten, event.values)), strict=True))
        best: list[list[Any]] = [[], []]
        most = -1.0
        for content in self.kept.get((event.tenant, event.endpoint), []):
            paths, values = json.loads(content)
            candidates = set(zip(paths, map(repr, values), strict=True))
            keys = {path for path, _ in candidates} & set(event.paths)
            same = len(leaves & candidates) + 0.5 * len(keys) - 0.1 * len(candidates)
            if same > most:
                best, most = [paths, values], same
        joined: dict[str, Any] = {}
        for path, value in zip(*best, strict=True):
            if path not in joined:
                joined[path] = value
            elif path.endswith("]") or "[]." in path:
                joined[path] = [*_as_list(joined[path]), value]
        return joined

    def to_json(self) -> list[Any]:
        """The sample as JSON values."""
        return [[*key, self.seen[key], kept] for key, kept in self.kept.items()]

    def restore(self, content: list[Any]) -> None:
        """Take a sample from `to_json`."""
        self.kept = {(tenant, endpoint): kept for tenant, endpoint, _, kept in content}
        self.seen = {(tenant, endpoint): seen for tenant, endpoint, seen, _ in content}


def hash_text(text: str, secret: bytes) -> str:
    """A keyed hash that stands for a text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=secret[:64])
    return f"hash:{digest.hexdigest()}"


def explain(detector: Detector, scored: ScoredEvent) -> Alert:
    """The alert of a scored event."""
    event = scored.event
    states = {level.name: state_before(level, scored) for level in detector.levels}
    findings = find_causes(detector, scored, states)
    return Alert(
        id=detector.alert_id(event),
        time=event.time,
        source=event.source,
        tenant=event.tenant,
        entity=event.entity,
        endpoint=event.endpoint,
        p=scored.p,
        extrapolated=scored.extrapolated,
        severity=next((name for name, p in SEVERITY_P if scored.p < p), "low"),
        kind=findings[0].kind if findings else "value",
        findings=findings,
        nearest_normal=detector.normal_events.nearest(event),
        what_if=try_expected_values(detector, scored, findings, states),
        leaves=list_leaves(scored),
        baseline=detector.baseline(),
        model=detector.model_id,
        status=scored.status,
    )


def state_before(level: Level, scored: ScoredEvent) -> Any:
    """State of the entity just before the event: the one before the batch, carried over the
    entity's earlier events of the batch."""
    state = scored.states.get(level.name)
    if not scored.earlier:
        return state
    key = (scored.event.tenant, scored.event.entity)
    states = {key: state}
    level.score(scored.earlier, states)
    return states[key]


def find_causes(detector: Detector, scored: ScoredEvent, states: dict[str, Any]) -> list[Finding]:
    """Findings about the parts with the smallest p-values, the smallest first."""
    parts = [
        (p, -bits, level, i)
        for level in detector.levels
        if level.name in scored.parts
        for i, (bits, p) in enumerate(
            zip(scored.parts[level.name].bits, scored.parts[level.name].p, strict=True)
        )
    ]
    parts.sort(key=lambda part: part[:2])
    findings: list[Finding] = []
    for p, negative_bits, level, i in parts:
        if len(findings) >= MAX_FINDINGS or (findings and p > FINDING_P):
            break
        finding = level.explain(scored.event, i, states[level.name])
        finding.p, finding.bits = float(p), float(-negative_bits)
        same = (finding.level, finding.kind, finding.path)
        if same not in {(each.level, each.kind, each.path) for each in findings}:
            findings.append(finding)
    return findings


def try_expected_values(
    detector: Detector, scored: ScoredEvent, findings: Sequence[Finding], states: dict[str, Any]
) -> list[dict[str, Any]]:
    """For the first findings about leaves: p and bits of the whole event before and after the
    expected value is put in the place of the observed one."""
    tried: list[dict[str, Any]] = []
    for finding in findings:
        changed = replace_leaf(scored.event, finding)
        if changed is None or len(tried) >= MAX_WHAT_IF:
            continue
        key = (changed.tenant, changed.entity)
        after = detector.score([changed], {key: dict(states)})[0]
        value = finding.expected[0][0] if finding.expected else None
        tried.append(
            {
                "path": finding.path,
                "value": value,
                "bits_before": -float(np.log2(scored.p)),
                "bits_after": -float(np.log2(after.p)),
                "p_before": scored.p,
                "p_after": after.p,
            }
        )
    return tried


def replace_leaf(event: Event, finding: Finding) -> Event | None:
    """The event with what a finding expects, or None if it expects nothing of a leaf."""
    path = finding.path
    if finding.kind == "missing_key" and finding.expected and path not in event.paths:
        return replace(
            event,
            paths=[*event.paths, path],
            values=[*event.values, finding.expected[0][0]],
        )
    if path not in event.paths:
        return None
    if finding.kind == "unseen_key":
        kept = [i for i, each in enumerate(event.paths) if each != path]
        return replace(
            event,
            paths=[event.paths[i] for i in kept],
            values=[event.values[i] for i in kept],
        )
    if finding.kind in ("value", "type") and finding.expected:
        values = [
            finding.expected[0][0] if each == path and value == finding.observed else value
            for each, value in zip(event.paths, event.values, strict=True)
        ]
        return replace(event, values=values)
    return None


def list_leaves(scored: ScoredEvent) -> list[dict[str, Any]]:
    """Every leaf with its bits and its p-value."""
    event, parts = scored.event, scored.parts.get("leaf")
    if parts is None:
        return [
            {"path": path, "value": value, "bits": 0.0}
            for path, value in zip(event.paths, event.values, strict=True)
        ]
    head = len(parts.bits) - len(event.paths)
    return [
        {"path": path, "value": value, "bits": float(bits), "p": float(p)}
        for path, value, bits, p in zip(
            event.paths, event.values, parts.bits[head:], parts.p[head:], strict=True
        )
    ]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
