"""Duplicate keys of JSON objects.

A parser keeps the last value of a key that occurs twice, and says nothing. Two programs that read
such an object can see different values, which is a known way around checks (RFC 8259, section 4).

Finding them costs little, because keys need not be compared: a text has as many keys as it has
colons outside strings (`count_keys`), and the parsed object has fewer if some were equal. Equal
keys that are escaped in different ways are found too, since the parser has decoded them. Only texts
with duplicates are scanned token by token (`find_duplicate_keys`).
"""

from __future__ import annotations

import re

import orjson

TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]', re.DOTALL)

KeyPath = tuple[str | None, ...]  # None stands for an element of an array


def count_keys(text: bytes) -> int:
    """Number of keys in a valid JSON text: its colons outside strings."""
    if b"\\" in text:  # backslashes occur in strings only
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = text.split(b'"')[::2]
    return b"".join(outside_strings).count(b":")


def find_duplicate_keys(text: bytes) -> list[KeyPath]:
    """Paths of the keys that occur twice in an object of a valid JSON text, in their order."""
    found: list[KeyPath] = []
    path: list[str | None] = []  # of the container that is open; its own last part is its key
    seen: list[set[str] | None] = []  # keys of each open object, None for arrays
    key: str | None = None
    string = b""
    for match in TOKEN.finditer(text):
        token = match.group()
        if token[:1] == b'"':
            string = token
        elif token == b":":
            key = orjson.loads(string)
            keys = seen[-1]
            if keys is not None and key in keys:
                found.append((*path[1:], key))
            elif keys is not None and key is not None:
                keys.add(key)
        elif token in b"{[":
            path.append(key if seen and seen[-1] is not None else None)
            seen.append(set() if token == b"{" else None)
        elif token in b"}]":
            path.pop()
            seen.pop()
    return found
