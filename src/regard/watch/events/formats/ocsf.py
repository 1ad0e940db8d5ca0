"""Open Cybersecurity Schema Framework.

https://schema.ocsf.io
"""

from __future__ import annotations

from typing import Any

from regard.watch.events.formats.format import Format


def matches(content: Any) -> bool:
    """Whether an object is an event of OCSF."""
    if not isinstance(content, dict) or "class_uid" not in content:
        return False
    return any(key in content for key in ("category_uid", "activity_id", "type_uid"))


FORMAT = Format(
    name="ocsf",
    title="Open Cybersecurity Schema Framework",
    entity="actor.user.uid|actor.user.name|actor.user.email_addr|user.uid|user.name"
    "|actor.session.uid|src_endpoint.ip|src_endpoint.hostname|device.hostname",
    endpoint="http_request.http_method http_request.url.path"
    "|http_request.http_method http_request.url.url_string|api.service.name api.operation"
    "|api.operation|class_name activity_name|type_name|class_uid activity_id|class_uid",
    time="time|metadata.original_time|metadata.logged_time",
    matches=matches,
)
