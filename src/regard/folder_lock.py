"""A lock on a folder: one process at a time works in it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from regard.sqlite_files import NOT_A_DATABASE, error_code, to_os_error

LOCK_FILE = "lock"
PID_BYTES = slice(60, 64)  # where SQLite stores `user_version`, big-endian

# POSIX drops the locks of a process when it closes any descriptor of the file, so a process must
# not open a lock file that it has locked itself.
_held: set[Path] = set()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; ValueError if one already works in it.

    SQLite locks files on every system, and the lock of a process that was killed is gone with it.
    The file itself stays. It stores the process id as SQLite's `user_version`.
    """
    path = folder.resolve() / LOCK_FILE
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link, not a lock file: delete it.")
    if path in _held:
        raise ValueError(f"This process is already working in {folder}.")
    try:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    except sqlite3.Error as error:
        raise to_os_error(error, path) from None
    with closing(connection):
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # keep the lock after COMMIT
            connection.execute("PRAGMA journal_mode = MEMORY")  # no second file
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN EXCLUSIVE")
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise ValueError(f"{path} is not a lock file but a database: use another folder.")
            connection.execute(f"PRAGMA user_version = {os.getpid()}")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if error_code(error) == sqlite3.SQLITE_BUSY:
                pid = int.from_bytes(path.read_bytes()[PID_BYTES], "big")
                raise ValueError(
                    f"Another process{f' ({pid})' if pid else ''} is working in {folder}. "
                    "Wait for it to end, or use another folder."
                ) from None
            if error_code(error) in NOT_A_DATABASE:
                raise ValueError(
                    f"{path} is not a lock file: delete it if no other process is working "
                    f"in {folder}."
                ) from None
            raise to_os_error(error, path) from None
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)
