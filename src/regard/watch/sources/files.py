"""Files, plain or compressed, and folders of them, which may grow."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from regard.watch.sources.framing import HEAD, LineSplitter, Part, Splitter, is_document
from regard.watch.sources.json_splitter import JsonSplitter
from regard.watch.sources.source import Record, Source

CHUNK = 1 << 18  # bytes read at once
DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)


def open_bytes(path: Path) -> BinaryIO:
    """Open a file that may be compressed by gzip or xz, which its first bytes tell."""
    file = path.open("rb")
    magic = file.read(6)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(file)  # type: ignore[return-value]
    return lzma.open(file) if magic == b"\xfd7zXZ\x00" else file  # type: ignore[return-value]


class FileSource(Source):
    """The lines of one file.

    Args:
        path: Path of the file.
        max_bytes: Longest line.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.name = str(path)
        self.file = open_bytes(path)
        head = self.file.read(HEAD)
        self.splitter: Splitter = (JsonSplitter if is_document(head) else LineSplitter)(max_bytes)
        self.parts: list[Part] = self.splitter.feed(head)
        self.number = 0
        self.ended = False

    def read(self, max_events: int, timeout: float) -> list[Record]:
        """The next records."""
        while len(self.parts) < max_events and not self.ended:
            chunk = self.file.read(CHUNK)
            self.ended = not chunk
            self.parts += self.splitter.feed(chunk) if chunk else self.splitter.finish()
        taken, self.parts = self.parts[:max_events], self.parts[max_events:]
        first = self.number + 1
        self.number += len(taken)
        return [
            Record(part.data, f"{self.name}:{number}", part.problem)
            for number, part in enumerate(taken, first)
        ]

    def acknowledge(self, ids: Iterable[str]) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    @property
    def exhausted(self) -> bool:
        """Whether the end of the file was reached."""
        return self.ended and not self.parts
