"""The interface of sources: where records come from, and how a reader says what it is done with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple


class SourceError(ValueError):
    """A source that cannot be opened or read. The message says what to do."""


class Record(NamedTuple):
    """Bytes from a source: a line, a message, or an element of a JSON document.

    Attributes:
        data: The bytes, which hold one event or several. Only their beginning if there is a
            `problem`.
        id: Name of the record, unique in its source and equal when it is read again, such as
            "traffic.jsonl:17".
        problem: Why the record cannot be parsed, such as "longer than 1,048,576 bytes"; "" if it
            can.
    """

    data: bytes
    id: str
    problem: str = ""


class Source(ABC):
    """A stream of records with at-least-once delivery.

    A record that was not acknowledged is delivered again when the source is opened the next time.
    Acknowledge records when what was made of them is stored. They may be acknowledged in any order:

        while not source.exhausted:
            records = source.read(1000, timeout=1.0)
            ...                                          # score, and store the alerts
            source.acknowledge([record.id for record in records])
        source.close()

    A source belongs to one thread.
    """

    name: str

    @abstractmethod
    def read(self, max_events: int, timeout: float) -> list[Record]:
        """The next records, at most `max_events`. Waits up to `timeout` seconds for the first one,
        and not for more. An empty list says that there is nothing now; see `exhausted`."""

    @abstractmethod
    def acknowledge(self, ids: Iterable[str]) -> None:
        """Store that these records are done. Ids that are unknown or acknowledged are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. Records that were not acknowledged stay so."""

    @property
    def exhausted(self) -> bool:
        """Whether all records were read and no more can come: the end of files and of pipes."""
        return False

    def lag(self) -> int | None:
        """Records that wait in the source, or bytes of a file; None if that is not known."""
        return None

    @property
    def problem(self) -> str:
        """Why nothing can be read at present, such as a broker that does not answer; "" if nothing
        is wrong."""
        return ""
