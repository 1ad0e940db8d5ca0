"""HTML as values: whatever is not marked as HTML is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = frozenset({"meta", "br", "img"})  # nothing stands inside them, and they are not closed


class SafeHtml(str):
    """Text that is HTML already."""

    __slots__ = ()


Inside = str | Iterable["Inside"]


def tag(name: str, /, *inside: Inside, **attributes: str | int | float | bool) -> SafeHtml:
    """An element.  A trailing _ of a name is dropped and another _ is a hyphen: `class_`, `aria_label`; False leaves it out."""
    words = "".join(
        f" {_name(key)}{_value(value)}" for key, value in attributes.items() if value is not False
    )
    opened = f"<{name}{words}>"
    return SafeHtml(opened if name in VOID else f"{opened}{join(*inside)}</{name}>")


def join(*inside: Inside) -> SafeHtml:
    """One after the other, each escaped unless it is HTML."""
    return SafeHtml("".join(_text(each) for each in inside))


def _text(inside: Inside) -> str:
    if isinstance(inside, SafeHtml):
        return inside
    return escape(inside) if isinstance(inside, str) else join(*inside)


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | int | float | bool) -> str:
    return "" if value is True else f'="{escape(str(value))}"'
