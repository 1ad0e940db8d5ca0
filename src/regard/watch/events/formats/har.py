"""HAR: requests and responses that a browser or a proxy recorded.

http://www.softwareishard.com/blog/har-12-spec/
"""

from __future__ import annotations

from typing import Any

from regard.watch.events.formats.format import Content, Format

NAMED_LISTS = ("headers", "cookies", "params")


def matches(content: Any) -> bool:
    """Whether an object is an entry of a HAR file."""
    return (
        isinstance(content, dict)
        and "startedDateTime" in content
        and isinstance(content.get("request"), dict)
    )


def unpack(entry: Content) -> list[Content]:
    """An entry with objects in place of its lists of names and values.

    Names of headers are in lower case. The query string is left out, as it is in the URL.
    """
    content = dict(entry)
    for side in ("request", "response"):
        message = content.get(side)
        if isinstance(message, dict):
            content[side] = name_values(message)
            if side == "request":
                content[side].pop("queryString", None)
    return [content]


def name_values(message: Content) -> Content:
    """A message with objects in place of lists of `{"name", "value"}`."""
    content = dict(message)
    for key in NAMED_LISTS:
        if isinstance(content.get(key), list):
            content[key] = pairs_to_object(content[key], lower=key == "headers")
    if isinstance(content.get("postData"), dict):
        content["postData"] = name_values(content["postData"])
    return content


def pairs_to_object(items: list[Any], lower: bool) -> Content | list[Any]:
    """An object of a list of names and values; values of equal names become a list. A list that
    has other items is returned as it is."""
    content: Content = {}
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return items
        name = item["name"].lower() if lower else item["name"]
        if name in content:
            first = content[name]
            content[name] = [*(first if isinstance(first, list) else [first]), item.get("value")]
        else:
            content[name] = item.get("value")
    return content


FORMAT = Format(
    name="har",
    title="HAR, recorded by a browser or a proxy",
    entity="request.headers.x-user-id|request.headers.x-forwarded-for|clientIPAddress",
    endpoint="request.method request.url",
    time="startedDateTime",
    matches=matches,
    unpack=unpack,
)
