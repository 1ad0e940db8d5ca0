"""How bytes are cut into records: at lines, or at the elements of JSON documents."""

from __future__ import annotations

import json
import re
from typing import NamedTuple, Protocol

HEAD = 1 << 16  # bytes that tell how a file is cut
MAX_KEPT = 4_096  # bytes of what is no event

# Documents that may be on one line: arrays of objects, files of CloudTrail, HAR and OTLP.
DOCUMENT_START = re.compile(
    rb'[\s\xef\xbb\xbf]*(?:\[\s*[\[{\]]|\{\s*"(?:Records|resourceSpans|resourceLogs)"\s*:\s*\['
    rb'|\{\s*"log"\s*:\s*\{)'
)
BLANK = b"\xef\xbb\xbf \t\r\n"


class Part(NamedTuple):
    """A piece of a text: an event or several, or the beginning of what is none, and the reason.

    Attributes:
        data: The bytes.
        problem: Why this is no event; "" if it may be one.
        size: Bytes of the text that a line takes, with its end.
    """

    data: bytes
    problem: str = ""
    size: int = 0


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
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.rest = b""
        self.dropped = 0  # bytes of the open line that are not in `rest`

    def feed(self, chunk: bytes) -> list[Part]:
        """The lines that end in the next bytes."""
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        parts = [self._part(line, len(line) + 1) for line in lines]
        if len(self.rest) > self.max_bytes:
            kept = self.rest[:MAX_KEPT]
            self.dropped += len(self.rest) - len(kept)
            self.rest = kept
        return parts

    def finish(self) -> list[Part]:
        """The last line, if it has no line feed."""
        line, self.rest = self.rest, b""
        return [self._part(line, len(line))] if line else []

    def _part(self, line: bytes, size: int) -> Part:
        size += self.dropped
        self.dropped = 0
        if size <= self.max_bytes + 1:
            return Part(line, "", size)
        return Part(line[:MAX_KEPT], f"longer than {self.max_bytes:,} bytes", size)


def is_document(head: bytes) -> bool:
    """Whether a file is a JSON document rather than lines, by its first bytes.

    It is if its first line is not complete JSON but the beginning of an object or of an array, as
    in files that are indented, or if it is a long line with an array of events.
    """
    line, newline, _ = head.lstrip(BLANK).partition(b"\n")
    line = line.rstrip()
    if newline or len(head) < HEAD:
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return line[:1] in (b"{", b"[") and line[-1:] in (b"{", b"[", b",")
        return False
    return DOCUMENT_START.match(line) is not None
