"""Splits JSON documents into events as they arrive, in bounded memory."""

from __future__ import annotations

import re

from regard.watch.sources.framing import MAX_KEPT, Part

TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\]]', re.DOTALL)
REST_OF_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)

# What stands before the bracket of an array of events.
LIST_KEY = re.compile(rb'"(?:Records|resourceSpans|resourceLogs)"\s*:\s*\Z')
LOG_KEY = re.compile(rb'"log"\s*:\s*\Z')
ENTRIES_KEY = re.compile(rb'"entries"\s*:\s*\Z')
LOOK_BACK = 256  # bytes before a bracket in which its key is looked for
SEPARATORS = b" \t\r\n,\x00\x1e\xef\xbb\xbf"  # RFC 7464 separates texts by 1E; a BOM may lead
MAX_BETWEEN = 1 << 16

BETWEEN, ELEMENT, OUTSIDE = "between", "element", "outside"


class JsonSplitter:
    """Splits JSON texts into the elements of their arrays of events.

    An array of events is the text itself, `Records` of CloudTrail, `log.entries` of HAR, or
    `resourceSpans` and `resourceLogs` of OTLP. A text without one is an event. Texts may follow
    each other, on lines or not. What is outside the arrays is left out.

    Args:
        max_bytes: Longest element. Of longer ones the beginning is returned, with a problem.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.buffer = b""
        self.scanned = 0  # bytes of the buffer that were scanned
        self.first = 0  # where the open element, or the text between elements, begins
        self.place = BETWEEN  # or ELEMENT, or OUTSIDE: beside the array of an object that has one
        self.depth = 0
        self.element_depth = 0
        self.in_string = False
        self.in_log = False
        self.too_long = False

    def feed(self, chunk: bytes) -> list[Part]:
        """The elements that end in the next bytes of the text."""
        self.buffer += chunk
        parts: list[Part] = []
        if self.in_string:
            match = REST_OF_STRING.match(self.buffer, self.scanned)
            assert match is not None
            self.in_string, self.scanned = not match.group(1), match.end()
        if not self.in_string:
            self._scan(parts)

        if self.place == ELEMENT and len(self.buffer) - self.first > self.max_bytes:
            self._add_too_long(parts)
        if self.place == BETWEEN and len(self.buffer) - self.first > MAX_BETWEEN:
            self._end_between(parts, self.scanned)
        drop = self.first
        if self.place == OUTSIDE or self.too_long:
            drop = max(0, self.scanned - LOOK_BACK)
        self.buffer = self.buffer[drop:]
        self.scanned -= drop
        self.first = max(0, self.first - drop)
        return parts

    def finish(self) -> list[Part]:
        """What is left when the text has ended: an element that is not complete."""
        parts: list[Part] = []
        if self.place == ELEMENT and not self.too_long:
            data = self.buffer[self.first : self.first + MAX_KEPT]
            parts.append(Part(data, "not JSON: the text ends inside an element"))
        elif self.place == BETWEEN:
            self._end_between(parts, len(self.buffer))
        self.buffer, self.place, self.depth = b"", OUTSIDE, 0
        return parts

    def _scan(self, parts: list[Part]) -> None:
        """Go through strings and brackets, and add the elements that end."""
        buffer, start = self.buffer, self.scanned
        self.scanned = len(buffer)
        for match in TOKEN.finditer(buffer, start):
            token = match.group()
            if token[:1] == b'"':
                if not match.group(1):
                    self.in_string, self.scanned = True, match.end()
            elif token in b"{[":
                if self.place == BETWEEN:
                    self._end_between(parts, match.start())
                    self.place = ELEMENT
                if token == b"[" and self._opens_list(match.start()):
                    self.place, self.too_long = BETWEEN, False
                    self.element_depth, self.first = self.depth + 1, match.end()
                if token == b"{" and self.depth == 1:
                    self.in_log = self._follows(LOG_KEY, match.start())
                self.depth += 1
            else:
                self.depth = max(0, self.depth - 1)
                if self.place == ELEMENT and self.depth == self.element_depth:
                    self._end_element(parts, match.end())
                elif self.place != ELEMENT and self.depth < self.element_depth:
                    if self.place == BETWEEN:
                        self._end_between(parts, match.start())
                    self.element_depth = 0
                    self.place = OUTSIDE if self.depth else BETWEEN
                    self.first = match.end()
                elif self.place == OUTSIDE and self.depth == 0:
                    self.place, self.first = BETWEEN, match.end()

    def _opens_list(self, bracket: int) -> bool:
        """Whether the bracket at a position of the buffer opens an array of events."""
        if self.element_depth > 0:
            return False
        if self.depth == 2:
            return self.in_log and self._follows(ENTRIES_KEY, bracket)
        return self.depth == 0 or (self.depth == 1 and self._follows(LIST_KEY, bracket))

    def _follows(self, key: re.Pattern[bytes], bracket: int) -> bool:
        """Whether a bracket at a position of the buffer opens the value of this key."""
        return key.search(self.buffer, max(0, bracket - LOOK_BACK), bracket) is not None

    def _end_element(self, parts: list[Part], end: int) -> None:
        """Add the element that ends at a position of the buffer."""
        if end - self.first > self.max_bytes:
            self._add_too_long(parts)
        if not self.too_long:
            parts.append(Part(self.buffer[self.first : end]))
        self.place, self.first, self.too_long = BETWEEN, end, False

    def _add_too_long(self, parts: list[Part]) -> None:
        """Add the beginning of an element that is too long, once."""
        if not self.too_long:
            data = self.buffer[self.first : self.first + MAX_KEPT]
            parts.append(Part(data, f"longer than {self.max_bytes:,} bytes"))
        self.too_long = True

    def _end_between(self, parts: list[Part], end: int) -> None:
        """Add what stands between two elements, unless it is white space or a comma."""
        data = self.buffer[self.first : end].strip(SEPARATORS)
        if data:
            parts.append(Part(data[:MAX_KEPT], "not a JSON object"))
        self.first = end


def split_json(data: bytes, max_bytes: int) -> list[Part]:
    """The elements of the arrays of events in JSON texts; see `JsonSplitter`."""
    splitter = JsonSplitter(max_bytes)
    return [*splitter.feed(data), *splitter.finish()]
