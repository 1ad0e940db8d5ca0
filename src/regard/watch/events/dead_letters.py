"""Dead letters: what could not be parsed, and why."""

from __future__ import annotations

import base64
import codecs
from collections import Counter
from pathlib import Path
from time import time
from typing import BinaryIO

import orjson

from regard.json_files import name_file

MAX_BYTES = 4_096  # of a line that are kept


class DeadLetters:
    """Records that could not be parsed: counted by reason, and appended to a file of JSON lines.

    A line is {"time", "source", "reason", "bytes", "text"}: when it was found, the id of the record
    in its source, why it was not parsed, its length, and its beginning, at most 4,096 bytes. Bytes
    that are no UTF-8 are in "base64" instead of "text".

    Args:
        path: File to append to; None: letters are only counted.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.counts: Counter[str] = Counter()
        self.file: BinaryIO | None = None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("ab")

    @property
    def total(self) -> int:
        """Number of dead letters so far."""
        return self.counts.total()

    def add(self, source: str, reason: str, data: bytes) -> None:
        """Count a record that could not be parsed, and write it. What follows ": " in the reason
        is not counted apart."""
        self.counts[reason.partition(": ")[0]] += 1
        if self.file is None or self.path is None:
            return
        letter: dict[str, str | float] = {"time": time(), "source": source, "reason": reason}
        letter["bytes"] = len(data)
        kept = data[:MAX_BYTES]
        try:
            letter["text"] = codecs.getincrementaldecoder("utf-8")().decode(kept)
        except UnicodeDecodeError:
            letter["base64"] = base64.b64encode(kept).decode()
        with name_file(self.path):
            self.file.write(orjson.dumps(letter, option=orjson.OPT_APPEND_NEWLINE))

    def flush(self) -> None:
        """Write what is buffered, so that the records can be acknowledged."""
        if self.file is not None and self.path is not None:
            with name_file(self.path):
                self.file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        if self.file is not None:
            self.file.close()

    def summary(self) -> str:
        """One line for people: "3 lines could not be parsed (2 not JSON, 1 too long)"."""
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.counts.most_common())
        lines = "1 record" if self.total == 1 else f"{self.total:,} records"
        where = f"; see {self.path}" if self.path is not None else ""
        return f"{lines} could not be parsed ({reasons}){where}"
