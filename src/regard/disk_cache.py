"""The cache directory, for files that take long to make: $REGARD_CACHE, or ~/.cache/regard.

A file is used only if it is complete, as its checksum says, and belongs to this user: scripts from
here are written into pages. Everything else is made anew. The checksum finds damage, not an
attacker who can write files of this user.
"""

from __future__ import annotations

import hashlib
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
    """The text of a cached file; if there is none that is complete, it is created."""
    text = read_verified(cache_dir() / name)
    if text is None:
        text = create()
        write_verified(cache_dir() / name, text)
    return text


def read_verified(path: Path) -> str | None:
    """The text of a file that `write_verified` wrote; None if it is missing, changed or not ours.

    The first line is the checksum of the name and the rest.
    """
    try:
        with path.open("rb") as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read()
        checksum, _, body = content.partition(b"\n")
        ours = not hasattr(os, "getuid") or owner in (0, os.getuid())
        complete = checksum == _checksum(path.name, body)
        return body.decode("utf-8") if ours and complete else None
    except (OSError, UnicodeDecodeError):
        return None


def write_verified(path: Path, text: str) -> None:
    """Write a file for `read_verified`, atomically; in a directory that is read-only, nothing."""
    body = text.encode("utf-8")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a new name in the same directory: no other process reads or writes a partial file
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
            try:
                partial.write(_checksum(path.name, body) + b"\n" + body)
                partial.close()
                Path(partial.name).replace(path)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise
    except OSError:  # read-only or full: the next process creates it again
        pass


def _checksum(name: str, body: bytes) -> bytes:
    """The SHA-256 of a file, in which its name counts: a file that was renamed is another one."""
    return hashlib.sha256(name.encode() + b"\n" + body).hexdigest().encode()
