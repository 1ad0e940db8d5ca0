"""Which records were read but not acknowledged, and how far a reader is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Stream = TypeVar("Stream", bound=Hashable)
Position = TypeVar("Position")


class PendingRecords(Generic[Stream, Position]):
    """Records in the order in which they were read, in several streams such as files or partitions.

    Positions are stored, not ids, so a stream is done up to the last record before which all are
    acknowledged.
    """

    def __init__(self) -> None:
        self.streams: dict[Stream, deque[tuple[str, Position]]] = {}
        self.stream_of: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self.stream_of)

    def add(self, stream: Stream, record: str, position: Position) -> None:
        """Add a record that was read; `position` is the one after it."""
        self.streams.setdefault(stream, deque()).append((record, position))
        self.stream_of[record] = stream

    def acknowledge(self, records: Iterable[str]) -> dict[Stream, Position]:
        """The new position of each stream that is further than before."""
        touched = {self.stream_of.pop(record) for record in records if record in self.stream_of}
        moved: dict[Stream, Position] = {}
        for stream in touched:
            queue = self.streams[stream]
            while queue and queue[0][0] not in self.stream_of:
                moved[stream] = queue.popleft()[1]
            if not queue:
                del self.streams[stream]
        return moved

    def drop(self, stream: Stream) -> None:
        """Forget the records of a stream, such as a partition that another consumer got."""
        for record, _ in self.streams.pop(stream, ()):
            self.stream_of.pop(record, None)
