"""Public-domain text that comes with the package: State of the Union addresses of six presidents.

Source and licence are in README.md in this folder.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from regard.tasks.rows import read_json_lines

SPEECHES = Path(str(files(__name__))) / "speeches.jsonl.xz"


class Speech(NamedTuple):
    """The beginning of a speech, or all of it."""

    year: int
    speaker: str
    text: str


@lru_cache(1)
def load_speeches() -> tuple[Speech, ...]:
    """The 48 speeches, eight of each speaker, by year."""
    rows = (row for _, row in read_json_lines(SPEECHES))
    return tuple(Speech(row["year"], row["speaker"], row["text"]) for row in rows)
