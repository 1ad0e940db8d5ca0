"""Elastic Common Schema, with nested keys or keys with dots.

https://www.elastic.co/docs/reference/ecs
"""

from __future__ import annotations

from typing import Any

from regard.watch.events.formats.format import Format

KEYS = ("ecs", "ecs.version", "event.category", "event.kind", "event.action", "event.dataset")


def matches(content: Any) -> bool:
    """Whether an object is a document of ECS."""
    if not isinstance(content, dict) or "@timestamp" not in content:
        return False
    return any(key in content for key in KEYS) or isinstance(content.get("event"), dict)


FORMAT = Format(
    name="ecs",
    title="Elastic Common Schema",
    entity="user.id|user.name|user.email|client.user.name|source.user.name|client.ip|source.ip"
    "|client.address|source.address|host.name",
    endpoint="http.request.method url.path|http.request.method url.original"
    "|event.provider event.action|event.dataset event.action|event.action|event.code"
    "|event.dataset|event.category",
    time="@timestamp|event.created|event.ingested",
    matches=matches,
)
