"""Ids in keys and URLs: classes take their place, so that paths and endpoints are few."""

from __future__ import annotations

import re
from urllib.parse import unquote

ID, EMAIL, ADDRESS, DATE, OTHER = "{id}", "{email}", "{ip}", "{date}", "{other}"

CLASSES = {
    DATE: r"(19|20)\d\d-?(0[1-9]|1[0-2])-?(0[1-9]|[12]\d|3[01])(T[\d:.]+(Z|[+-][\d:]+)?)?",
    ADDRESS: r"\d{1,3}(\.\d{1,3}){3}(:\d{1,5})?|(?=.*:.*:)[0-9a-fA-F:]{2,39}",
    EMAIL: r"[^@\s/]{1,64}@[^@\s/]+\.[^@\s/.]+",
    ID: r"[+-]?\d+|[+-]?\d+\.\d{3,}"  # but not 1.0, which is a version
    r"|\{?[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\}?"  # a UUID
    r"|([A-Za-z]{1,8}[-_:])?(0x)?(?=.*\d)[0-9a-fA-F]{8,}"  # hexadecimal, i-0a1b2c3d
    r"|[A-Za-z]{1,8}[-_:#]\d{2,}([-_:]\d+)*|\d+([-_:]\d+)+"  # ORD-1234, user_17, 12-34
    r"|[A-Z]{2,6}\d{4,}|[a-z]{1,4}\d{4,}|(?=.*\d)[A-Z0-9]{16,}"  # AB1234, u10414, AKIA7Q...
    r"|(?=(.*\d){3})(?=.*[A-Za-z])[\w+=-]{20,}",  # a token: letters and at least three digits
}
CLASS_NAMES = dict(zip(("date", "address", "email", "id"), CLASSES, strict=True))
CLASS = re.compile(
    "|".join(f"(?P<{group}>{CLASSES[name]})" for group, name in CLASS_NAMES.items()), re.ASCII
)

MAX_ID = 256  # characters; anything longer is OTHER
MAX_SEGMENTS = 12  # of a URL in an endpoint
MAX_WORDS = 8  # of an endpoint that is no URL
MAX_CODE = 12  # digits of an endpoint that is a number
# Names, and the parameters of routes: {id}, <int:id>.
SEGMENT = re.compile(r"[\w.~@:+,;=$!*'()-]{1,64}|\{[\w:.*]{1,40}\}|<[a-z]{1,12}:\w{1,40}>")


def id_class(text: str) -> str:
    """The class of an id, such as "{id}" for numbers, UUIDs and tokens; "" for a name.

    >>> id_class("42"), id_class("i-0a1b2c3d"), id_class("anna@example.org"), id_class("orders")
    ('{id}', '{id}', '{email}', '')
    """
    if text.isalpha():
        return ""
    match = CLASS.fullmatch(text) if len(text) <= MAX_ID else None
    return CLASS_NAMES[match.lastgroup] if match and match.lastgroup else ""


def path_template(path: str) -> str:
    """The path of a URL with classes in place of ids and of what no route is called.

    Its length is bounded, and so is the number of templates of an API whose ids have digits.

    >>> path_template("/orders/17/items/9f8c1e77?page=2")
    '/orders/{id}/items/{id}'
    >>> path_template("/static/../../etc/passwd")
    '/static/{other}/etc/passwd'
    """
    segments: list[str] = []
    for segment in path.partition("?")[0].partition("#")[0].split("/")[: MAX_SEGMENTS + 2]:
        if "%" in segment:
            segment = unquote(segment)
        if segment and (segment in (".", "..") or not SEGMENT.fullmatch(segment)):
            name = OTHER
        else:
            name = id_class(segment) or segment
        if name != OTHER or segments[-1:] != [OTHER]:
            segments.append(name)
    if len(segments) > MAX_SEGMENTS:
        segments[MAX_SEGMENTS:] = ["..."]
    return "/".join(segments) or "/"


def endpoint_text(text: str) -> str:
    """An endpoint without ids: the templates of its URLs, without hosts, and its other words.

    >>> endpoint_text("https://shop.example/orders/17?page=2"), endpoint_text("order.paid")
    ('/orders/{id}', 'order.paid')
    """
    if text.startswith("/") or text == "*":
        return path_template(text)
    if "://" in text[:16]:
        return path_template("/" + text.partition("://")[2].partition("/")[2])
    if text.isdecimal():
        return text[:MAX_CODE]  # a code, such as 4688 of Windows
    words: list[str] = []
    for word in text.split()[:MAX_WORDS]:
        name = id_class(word) or word if SEGMENT.fullmatch(word) else OTHER
        if name != OTHER or words[-1:] != [OTHER]:
            words.append(name)
    return " ".join(words)
