"""Standard input, and other pipes."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Iterable
from time import monotonic

from regard.watch.sources.framing import LineSplitter, Part, Splitter, is_document
from regard.watch.sources.json_splitter import JsonSplitter
from regard.watch.sources.source import Record, Source

CHUNK = 1 << 16


class PipeSource(Source):
    """The lines, or the elements of JSON documents, that come through a pipe.

    A pipe cannot be read twice, so nothing is stored when records are acknowledged.

    Args:
        descriptor: File descriptor of the pipe.
        name: Its name in ids of records.
        max_bytes: Longest line.
    """

    def __init__(self, descriptor: int, name: str, max_bytes: int) -> None:
        self.descriptor = descriptor
        self.name = name
        self.max_bytes = max_bytes
        self.splitter: Splitter | None = None
        self.parts: deque[Part] = deque()
        self.number = 0
        self.ended = False

    @property
    def exhausted(self) -> bool:
        """Whether the other end was closed and everything was read."""
        return self.ended and not self.parts

    def read(self, max_events: int, timeout: float) -> list[Record]:
        """The next records."""
        deadline = monotonic() + timeout
        while not self.parts and not self.ended:
            wait = max(0.0, deadline - monotonic())
            # Windows cannot wait for a pipe: there, the read itself waits
            if os.name != "nt" and not select.select([self.descriptor], [], [], wait)[0]:
                break
            self._add(os.read(self.descriptor, CHUNK))
        records: list[Record] = []
        while self.parts and len(records) < max_events:
            part = self.parts.popleft()
            self.number += 1
            records.append(Record(part.data, f"{self.name}:{self.number}", part.problem))
        return records

    def acknowledge(self, ids: Iterable[str]) -> None:
        """Nothing: what came through a pipe cannot be read again."""

    def close(self) -> None:
        """Nothing: the pipe belongs to who opened it."""

    def _add(self, chunk: bytes) -> None:
        """Split the next bytes; none are the end."""
        if self.splitter is None:
            self.splitter = (JsonSplitter if is_document(chunk) else LineSplitter)(self.max_bytes)
        self.parts.extend(self.splitter.feed(chunk) if chunk else self.splitter.finish())
        self.ended = not chunk
