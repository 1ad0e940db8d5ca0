"""Errors of SQLite as errors of the file system."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

NOT_A_DATABASE = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR)
MIN_FREE_BYTES = 1 << 16  # below this, an unspecific write error is a full disk


def error_code(error: sqlite3.Error) -> int:
    """The primary result code of SQLite, such as `sqlite3.SQLITE_BUSY`."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def to_os_error(error: sqlite3.Error, path: Path) -> OSError:
    """The error of a disk that is full or cannot be written, with the path of the database."""
    full = error_code(error) == sqlite3.SQLITE_FULL
    if error_code(error) == sqlite3.SQLITE_IOERR:
        full = shutil.disk_usage(path.parent).free < MIN_FREE_BYTES
    if full:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return OSError(f"Cannot read or write {path}: {error}")
