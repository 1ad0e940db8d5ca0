"""JSON texts of events: parsed by orjson, and repaired where a lenient parser would read them."""

from __future__ import annotations

import re
from typing import Any

import orjson

from regard.watch.event import Signal

ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
NUMBER_OR_STRING = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"|(-?(?:NaN|Infinity|\d[\d.eE+-]*))', re.DOTALL
)
AROUND = b" \t\r\n\x00\x1e"
BOM = b"\xef\xbb\xbf"


class BadText(ValueError):
    """A text that is no JSON. The message is the reason."""


class SeveralTexts(BadText):
    """JSON that is followed by more."""


def parse_json(data: bytes) -> tuple[Any, bytes, list[Signal]]:
    """The value of a JSON text, the text that was parsed, and signals of what was repaired.

    Other parsers accept what the standard forbids, so such events occur: bytes that are no UTF-8
    and halves of surrogate pairs become U+FFFD; NaN, infinities and numbers beyond float64 become
    null; a byte order mark and NUL bytes around the text are left out.
    """
    try:
        return orjson.loads(data), data, []
    except orjson.JSONDecodeError:
        text, signals = repair_json(data)
    try:
        return orjson.loads(text), text, signals
    except orjson.JSONDecodeError as error:
        several = error.msg.startswith("unexpected content after document")
        raise (SeveralTexts if several else BadText)(f"not JSON: {error}") from None


def repair_json(data: bytes) -> tuple[bytes, list[Signal]]:
    """The repaired text, and a signal for each kind of repair; see `parse_json`."""
    signals = []
    text = data.strip(AROUND).removeprefix(BOM).strip(AROUND)
    try:
        text.decode()
    except UnicodeDecodeError:
        text = text.decode(errors="replace").encode()
        signals.append(Signal("invalid_utf8", ""))
    if b"\\u" in text:
        paired = ESCAPE.sub(lambda match: b"\\ufffd" if match[1] else match[0], text)
        if paired != text:
            text = paired
            signals.append(Signal("lone_surrogate", ""))
    finite = NUMBER_OR_STRING.sub(finite_or_null, text)
    if finite != text:
        text = finite
        signals.append(Signal("not_finite", ""))
    return text, signals


def finite_or_null(match: re.Match[bytes]) -> bytes:
    """The text of a match of `NUMBER_OR_STRING`, and null for a number that is not finite."""
    if match[1] is None:
        return match[0]
    try:
        return match[0] if abs(float(match[1])) < float("inf") else b"null"
    except ValueError:  # 1-2: no number, so the text stays wrong
        return match[0]
