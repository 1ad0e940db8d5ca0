"""OpenTelemetry in the JSON of OTLP: each span and each log record is an event.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.watch.events.formats.format import Content, Format

BATCHES = ("resourceSpans", "resourceLogs")
SCOPES = {"scopeSpans": "spans", "scopeLogs": "logRecords"}
MAX_DEPTH = 16  # of attributes that are lists of attributes


def matches(content: Any) -> bool:
    """Whether an object is an export of spans or logs, or one resource of it."""
    return isinstance(content, dict) and any(key in content for key in (*BATCHES, *SCOPES))


def unpack(content: Content) -> list[Content]:
    """The spans and log records of an object, each with its resource and scope; the object itself
    if it has none."""
    resources = [content]
    for key in BATCHES:
        resources += objects(content.get(key))
    events = [event for resource in resources for event in records_of(resource)]
    return events or [content]


def records_of(resource: Content) -> Iterator[Content]:
    """The spans and log records of one resource."""
    described = resource.get("resource")
    attributes = described.get("attributes") if isinstance(described, dict) else None
    for scopes, records in SCOPES.items():
        for scope in objects(resource.get(scopes)):
            for record in objects(scope.get(records)):
                yield {
                    "resource": attributes_to_object(attributes),
                    "scope": scope.get("scope"),
                    **decode_record(record),
                }


def decode_record(record: Content) -> Content:
    """A span or a log record with objects in place of lists of attributes."""
    content = dict(record)
    if "attributes" in content:
        content["attributes"] = attributes_to_object(content["attributes"])
    if isinstance(content.get("body"), dict):
        content["body"] = decode_value(content["body"])
    for key in ("events", "links"):
        if key in content:
            content[key] = [decode_record(item) for item in objects(content[key])]
    return content


def attributes_to_object(attributes: Any, depth: int = 0) -> Content:
    """An object of a list of `{"key", "value"}`."""
    return {
        str(item["key"]): decode_value(item.get("value"), depth)
        for item in objects(attributes)
        if "key" in item
    }


def decode_value(value: Any, depth: int = 0) -> Any:
    """The value of an AnyValue: `{"stringValue": "a"}` is "a". Others are returned as they are."""
    if not isinstance(value, dict) or len(value) != 1 or depth > MAX_DEPTH:
        return value
    ((kind, content),) = value.items()
    if kind == "intValue" and isinstance(content, str) and content.lstrip("-").isdecimal():
        return int(content) if len(content) < 20 else content
    if kind == "arrayValue" and isinstance(content, dict):
        return [decode_value(item, depth + 1) for item in objects(content.get("values"))]
    if kind == "kvlistValue" and isinstance(content, dict):
        return attributes_to_object(content.get("values"), depth + 1)
    return content if kind.endswith("Value") else value


def objects(items: Any) -> list[Content]:
    """The objects in a list; nothing if it is no list."""
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


FORMAT = Format(
    name="otlp",
    title="OpenTelemetry spans and logs (OTLP JSON)",
    entity="attributes.enduser.id|attributes.user.id|attributes.user.name|attributes.client.address"
    "|attributes.http.client_ip|attributes.net.peer.ip|attributes.net.sock.peer.addr"
    "|resource.service.name",
    endpoint="attributes.http.request.method attributes.http.route"
    "|attributes.http.method attributes.http.route"
    "|attributes.http.request.method attributes.url.path"
    "|attributes.http.request.method attributes.url.full"
    "|attributes.http.method attributes.http.target|attributes.http.method attributes.http.url"
    "|attributes.rpc.service attributes.rpc.method|name|eventName|attributes.event.name|body",
    time="startTimeUnixNano|timeUnixNano|observedTimeUnixNano",
    matches=matches,
    unpack=unpack,
)
