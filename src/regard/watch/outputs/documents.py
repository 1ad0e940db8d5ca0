"""Alerts as documents of common schemas: plain JSON, Elastic Common Schema, OCSF."""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import regard

ECS_VERSION = "8.17.0"
OCSF_VERSION = "1.5.0"  # the first with `anomaly_analyses`
ECS_SEVERITIES = {"low": 21, "medium": 47, "high": 73, "critical": 99}  # as in Elastic's rules
OCSF_SEVERITIES = {"low": 2, "medium": 3, "high": 4, "critical": 5}
OCSF_LEARNING = 4  # type_id of an analytic
OCSF_USER_NAME, OCSF_ADDRESS = 4, 2  # type_id of an observable
MAX_FINDINGS = 20  # in a document

OBSERVATION_TYPES = {  # level -> the words that OCSF suggests for `observation_type`
    "leaf": "Distribution Analysis",
    "sequence": "Sequence Analysis",
    "path": "Sequence Analysis",
    "series": "Volume Analysis",
    "user": "Behavioral Clustering",
}


def to_plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """The alert as it is; see `Alert`."""
    return dict(content)


def to_ecs(content: Mapping[str, Any]) -> dict[str, Any]:
    """The alert in the Elastic Common Schema 8: an event of kind "alert".

    Values of any type are under one path, which an index cannot map, so they are written as text.
    What ECS has no field for is under `regard`.
    """
    entity = _ecs_entity(content["entity"])
    document: dict[str, Any] = {
        "@timestamp": iso_time(content["time"]),
        "ecs": {"version": ECS_VERSION},
        "message": summary(content),
        "event": {
            "id": content["id"],
            "kind": "alert",
            "category": ["intrusion_detection"],
            "type": ["info"],
            "action": content["endpoint"],
            "reason": reason(content),
            "module": "regard",
            "dataset": "regard.watch",
            "provider": "regard watch",
            "severity": ECS_SEVERITIES[content["severity"]],
            "risk_score": round(bits(content["p"]), 2),
        },
        "rule": {"name": title(content), "category": content["kind"], "ruleset": "regard watch"},
        "observer": {
            "vendor": "Regard",
            "product": "regard watch",
            "type": "ids",
            "version": regard.__version__,
        },
        **entity,
        "regard": {
            "p": content["p"],
            "extrapolated": content["extrapolated"],
            "status": content["status"],
            "entity": content["entity"],
            "source": content["source"],
            "baseline": content["baseline"],
            "model": content["model"],
            "findings": [
                {
                    "level": finding["level"],
                    "kind": finding["kind"],
                    "path": finding["path"],
                    "observed": as_text(finding["observed"]),
                    "bits": finding["bits"],
                    "p": finding["p"],
                    "expected": [
                        {"value": as_text(value), "probability": share}
                        for value, share in finding["expected"]
                    ],
                    "text": finding["text"],
                }
                for finding in content["findings"][:MAX_FINDINGS]
            ],
            "nearest_normal": [
                {"path": path, "value": as_text(value)}
                for path, value in content["nearest_normal"].items()
            ],
            "what_if": [
                {**entry, "value": as_text(entry["value"])} for entry in content["what_if"]
            ],
        },
    }
    if content["tenant"]:
        document["organization"] = {"id": content["tenant"]}
    return document


def _ecs_entity(entity: str) -> dict[str, Any]:
    """Fields about who acted: an address or a user."""
    if not entity:
        return {}
    if is_address(entity):
        return {"source": {"ip": entity}, "related": {"ip": [entity]}}
    return {"user": {"name": entity}, "related": {"user": [entity]}}


def to_ocsf(content: Mapping[str, Any], *, created: float | None = None) -> dict[str, Any]:
    """The alert as an OCSF 1.5 Detection Finding (class 2004).

    Args:
        content: The alert; see `Alert.to_json`.
        created: When the finding was created, in seconds since 1970; now if None.
    """
    moment = milliseconds(content["time"])
    now = milliseconds(datetime.now(UTC).timestamp() if created is None else created)
    findings = content["findings"][:MAX_FINDINGS]
    evidence: dict[str, Any] = {
        "api": {"operation": content["endpoint"] or "unknown"},
        "data": {"source": content["source"], "findings": findings},
    }
    observables = []
    if is_address(content["entity"]):
        evidence["src_endpoint"] = {"ip": content["entity"]}
        observables.append(
            {
                "name": "evidences.src_endpoint.ip",
                "type_id": OCSF_ADDRESS,
                "type": "IP Address",
                "value": content["entity"],
            }
        )
    elif content["entity"]:
        evidence["actor"] = {"user": {"name": content["entity"]}}
        observables.append(
            {
                "name": "evidences.actor.user.name",
                "type_id": OCSF_USER_NAME,
                "type": "User Name",
                "value": content["entity"],
            }
        )
    anomalies, baselines = [], []
    for finding in findings:
        about = {
            "observation_type": OBSERVATION_TYPES.get(finding["level"], "Deviation Analysis"),
            "observed_attribute": finding["path"] or finding["kind"],
        }
        anomalies.append(
            {
                **about,
                "observed_pattern": finding["kind"].upper(),
                "observations": [{"value": as_text(finding["observed"])}],
            }
        )
        if finding["expected"]:
            observations = [
                {"value": f"{as_text(value)} ({share:.2%})"} for value, share in finding["expected"]
            ]
            baselines.append({**about, "observations": observations})
    document: dict[str, Any] = {
        "activity_id": 1,
        "activity_name": "Create",
        "category_uid": 2,
        "category_name": "Findings",
        "class_uid": 2004,
        "class_name": "Detection Finding",
        "type_uid": 200401,
        "type_name": "Detection Finding: Create",
        "time": now,
        "start_time": moment,
        "end_time": moment,
        "severity_id": OCSF_SEVERITIES[content["severity"]],
        "severity": content["severity"].capitalize(),
        "status_id": 1,
        "status": "New",
        "is_alert": content["status"] == "alert",
        "message": summary(content),
        "metadata": {
            "version": OCSF_VERSION,
            "uid": content["id"],
            "original_time": iso_time(content["time"]),
            "product": {
                "name": "regard watch",
                "vendor_name": "Regard",
                "version": regard.__version__,
            },
        },
        "finding_info": {
            "uid": content["id"],
            "title": title(content),
            "desc": reason(content),
            "types": [content["kind"]],
            "created_time": now,
            "first_seen_time": moment,
            "last_seen_time": moment,
            "data_sources": [content["source"]],
            "analytic": {
                "name": "regard watch",
                "uid": content["model"] or "unknown",
                "type": "Learning (ML/DL)",
                "type_id": OCSF_LEARNING,
            },
        },
        "evidences": [evidence],
        "observables": observables,
        "unmapped": {
            "p": content["p"],
            "extrapolated": content["extrapolated"],
            "baseline": content["baseline"],
            "nearest_normal": content["nearest_normal"],
            "what_if": content["what_if"],
            "status": content["status"],
        },
    }
    if anomalies:
        target = {"name": content["entity"] or content["endpoint"] or "unknown"}
        target["type"] = "User" if content["entity"] else "Application component"
        analysis: dict[str, Any] = {"analysis_target": target, "anomalies": anomalies}
        if baselines:
            analysis["baselines"] = baselines
        document["anomaly_analyses"] = [analysis]
    if content["tenant"]:
        document["metadata"]["tenant_uid"] = content["tenant"]
    return document


FORMATS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "jsonl": to_plain,
    "ecs": to_ecs,
    "ocsf": to_ocsf,
}
"""Name of a format -> function of an alert as JSON values."""


def title(content: Mapping[str, Any]) -> str:
    """A short title: "Unusual value at request.query.limit"."""
    first = content["findings"][0] if content["findings"] else {"path": ""}
    where = f" at {first['path']}" if first["path"] else ""
    return f"Unusual {content['kind'].replace('_', ' ')}{where}"


def reason(content: Mapping[str, Any]) -> str:
    """Why the event is not normal: the sentences of the first findings."""
    sentences = [each["text"] for each in content["findings"][:3] if each["text"]]
    return " ".join(sentences) or f"{title(content)}."


def summary(content: Mapping[str, Any]) -> str:
    """One line: what is unusual, where, and who did it."""
    who = f" by {content['entity']}" if content["entity"] else ""
    beyond = ", extrapolated" if content["extrapolated"] else ""
    return f"{title(content)}: {content['endpoint']}{who} (p = {content['p']:.2g}{beyond})"


def bits(p: float) -> float:
    """-log2 p, at most 1,000 bits."""
    return min(1000.0, -math.log2(p)) if p > 0 else 1000.0


def as_text(value: Any) -> str:
    """A JSON value as text; a string stays as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_address(entity: str) -> bool:
    """Whether an entity is an IP address."""
    try:
        ipaddress.ip_address(entity)
    except ValueError:
        return False
    return True


def iso_time(seconds: float) -> str:
    """A time in ISO 8601, UTC, with milliseconds; times outside the years 1 to 9999 are 1970."""
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        moment = datetime.fromtimestamp(0, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def milliseconds(seconds: float) -> int:
    """Milliseconds since 1970; 0 for times that are not finite."""
    return round(seconds * 1000) if math.isfinite(seconds) else 0
