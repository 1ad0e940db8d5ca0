"""The cache directory, for files that take long to make: $REGARD_CACHE, or ~/.cache/regard."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """The cache directory."""
    path = os.environ.get("REGARD_CACHE")
    if path:
        return Path(path)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
    except RuntimeError:  # no home directory
        user = str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
        return Path(tempfile.gettempdir()) / f"regard-{user}"


def read_or_create(name: str, create: Callable[[], str]) -> str:
    """The text of a cached file; if it does not exist, it is created."""
    path = cache_dir() / name
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = create()
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # atomic: no other process reads a partial file
    except OSError:  # a read-only directory: the next process creates it again
        pass
    return text
