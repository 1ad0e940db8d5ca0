"""How bytes are cut into records: at lines, or at the elements of JSON documents."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

import orjson

HEAD = 1 << 16  # bytes that tell how a file is cut

# Documents that may be on one line: arrays of objects, files of CloudTrail, HAR and OTLP.
DOCUMENT_START = re.compile(
    rb'[\s\xef\xbb\xbf]*(?:\[\s*[\[{\]]|\{\s*"(?:Records|resourceSpans|resourceLogs)"\s*:\s*\['
    rb'|\{\s*"log"\s*:\s*\{)'
)
BLANK = b"\xef\xbb\xbf \t\r\n"


class Part(NamedTuple):
    """A piece of a text: an event or several, or the beginning of what is none, and the reason."""

    data: bytes
    problem: str = ""


class Splitter(Protocol):
    """Cuts bytes into parts as they arrive."""

    def feed(self, chunk: bytes) -> list[Part]:
        """The parts that end in the next bytes."""

    def finish(self) -> list[Part]:
        """What is left at the end."""


class LineSplitter:
    """Cuts bytes at line feeds. Blank lines are parts too, so that lines can be counted.

    Args:
        max_bytes: Longest line. Of longer ones the beginning is returned, with a problem.
        kept: Bytes of a line that is too long that are returned.
    """

    def __init__(self, max_bytes: int, kept: int = 4_096) -> None:
        self.max_bytes = max_bytes
        self.kept = kept
        self.rest = b""
        self.dropped = 0  # bytes of the open line that are not in `rest`

    def feed(self, chunk: bytes) -> list[Part]:
        """The lines that end in the next bytes."""
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        parts = [Part(line) for line in lines]
        if lines:
            parts[0] = self._part(lines[0])
            self.dropped = 0
            for index, line in enumerate(lines[1:], 1):
                if len(line) > self.max_bytes:
                    parts[index] = self._part(line)
        if len(self.rest) > self.max_bytes:
            self.dropped += len(self.rest) - self.kept
            self.rest = self.rest[: self.kept]
        return parts

    def finish(self) -> list[Part]:
        """The last line, if it has no line feed."""
        line, self.rest = self.rest, b""
        return [self._part(line)] if line else []

    def _part(self, line: bytes) -> Part:
        if len(line) + self.dropped <= self.max_bytes:
            return Part(line)
        return Part(line[: self.kept], f"longer than {self.max_bytes:,} bytes")


def is_document(head: bytes) -> bool:
    """Whether a file is a JSON document rather than lines, by its first bytes.

    It is if its first line is not complete JSON but the beginning of an object or of an array, as
    in files that are indented, or if it is a long line with an array of events.
    """
    line, newline, _ = head.lstrip(BLANK).partition(b"\n")
    line = line.rstrip()
    if newline or len(head) < HEAD:
        try:
            orjson.loads(line)
        except orjson.JSONDecodeError:
            return line[:1] in (b"{", b"[") and line[-1:] in (b"{", b"[", b",")
        return False
    return DOCUMENT_START.match(line) is not None
