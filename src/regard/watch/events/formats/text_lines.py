"""What the formats of text lines share: escapes, numbers, fields in quotes."""

from __future__ import annotations

import re

Scalar = str | int | float | None

ESCAPE = re.compile(rb'\\x([0-9A-Fa-f]{2})|\\(["\\nrtbfv])')
CONTROLS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})(\.\d{1,9})?", re.ASCII)
FIELD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
REQUEST_LINE = re.compile(r"([A-Z_-]{1,32}) (.*?)(?: (HTTP/[\d.]+))?")


def unescape(text: str) -> str:
    r"""A field of an access log without the escapes of nginx and Apache, such as `\x22`."""
    if "\\" not in text:
        return text

    def byte(match: re.Match[bytes]) -> bytes:
        return bytes.fromhex(match[1].decode()) if match[1] else CONTROLS.get(match[2], match[2])

    return ESCAPE.sub(byte, text.encode()).decode(errors="replace")


def parse_scalar(text: str) -> Scalar:
    """A number, None for "-", and other texts without escapes."""
    if text == "-":
        return None
    match = NUMBER.fullmatch(text)
    if match:
        return float(text) if match[1] else int(text)
    return unescape(text)


def quoted_fields(text: str) -> list[str]:
    """The fields of a text: in quotes, or separated by white space."""
    return [quoted or bare for quoted, bare in FIELD.findall(text)]


def parse_request_line(text: str) -> dict[str, Scalar]:
    """Method, URL and protocol of a request line; the whole line as `request` if it is none."""
    line = unescape(text)
    match = REQUEST_LINE.fullmatch(line)
    if match is None:
        return {"request": line}
    method, url, protocol = match.groups()
    return {"method": method, "url": url, "protocol": protocol}
