"""HTML as values: text is escaped unless it is marked as HTML. Control characters are replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
VOID = frozenset({"meta", "br", "img"})  # elements without content and closing tag


class SafeHtml(str):
    """Text that is already HTML."""

    __slots__ = ()


Content = str | Iterable["Content"]


def tag(name: str, /, *content: Content, **attributes: str | int | float | bool) -> SafeHtml:
    """Return an element.

    In attribute names a trailing _ is dropped and any other becomes a hyphen (`class_`,
    `aria_label`). The value True gives an attribute without a value, False leaves it out.
    """
    opening = name
    for key, value in attributes.items():
        if value is not False:
            opening += " " + key.rstrip("_").replace("_", "-")
            opening += "" if value is True else f'="{escape_text(str(value))}"'
    return SafeHtml(f"<{opening}>" if name in VOID else f"<{opening}>{join(*content)}</{name}>")


def join(*content: Content) -> SafeHtml:
    """Concatenate, escaping all that is not HTML."""
    text = ""
    for each in content:
        if isinstance(each, str):
            text += each if isinstance(each, SafeHtml) else escape_text(each)
        else:
            text += join(*each)
    return SafeHtml(text)


def escape_text(text: str) -> str:
    """Escape HTML; control characters that HTML does not allow become U+FFFD."""
    return escape(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
