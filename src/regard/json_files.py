"""Read JSON files, and write them atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL_PREFIX = ".partial-"


class CorruptFile(ValueError):
    """A file of a run that is missing, truncated or not what its checksum says."""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise `CorruptFile` if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"Cannot read {path} as JSON: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: to a temporary name, flushed, then renamed."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False))
    flush_to_disk(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: to a temporary name, flushed, then renamed."""
    partial = path.with_name(f"{PARTIAL_PREFIX}{path.name}")
    if partial.is_symlink():
        partial.unlink()  # or its target would be written
    with name_file(path):
        partial.write_text(text, encoding="utf-8")
        flush_to_disk(partial)
        partial.replace(path)


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Add the path to errors that have none, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def flush_to_disk(path: Path) -> None:
    """Call fsync on a file or folder.

    Windows cannot flush folders, and files only if they are open for writing.
    """
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
