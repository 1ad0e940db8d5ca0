"""What takes long to make and is the same each time, kept in the user's cache: in REGARD_CACHE, or ~/.cache/regard."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def read_or_create(name: str, make: Callable[[], str]) -> str:
    """The text of this name; it is made where it is not there."""
    path = cache_dir() / name
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return _keep(path, make())


def cache_dir() -> Path:
    """Where the cache is."""
    given = os.environ.get("REGARD_CACHE")
    if given:
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
    except RuntimeError:  # somebody without a home
        return Path(tempfile.gettempdir()) / f"regard-{os.getuid()}"


def _keep(path: Path, text: str) -> str:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # at once: another process never reads half of it
    except OSError:  # a read-only home is no reason to stop: it is made again next time
        pass
    return text
