"""How far files were read, in a small SQLite database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from time import time

from regard.sqlite_files import NOT_A_DATABASE, error_code, to_os_error
from regard.watch.sources.source import SourceError

FILE_NAME = "positions.sqlite"
KEPT_SECONDS = 30 * 86_400.0  # how long files that are gone are remembered


@dataclass
class FilePosition:
    """How far a file was read.

    Attributes:
        key: Device and inode, which a file keeps when it is renamed.
        folder: Folder of the file.
        path: Its path when it was last seen.
        label: Its name in ids of records; stays when the file is renamed.
        offset: Bytes that are done, after decompression; 0 for JSON documents.
        number: Lines or elements that are done.
        head: Hash of its first bytes, so that another file with the same inode is not taken for it.
        head_size: Number of these bytes.
        seen: When it was last seen, in seconds since 1970.
    """

    key: str
    folder: str
    path: str
    label: str
    offset: int = 0
    number: int = 0
    head: str = ""
    head_size: int = 0
    seen: float = 0.0


class PositionStore:
    """Stores positions of files, and how many files had the same name.

    Args:
        folder: Where to put the database; None: positions are in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / FILE_NAME
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self.database = sqlite3.connect(":memory:" if self.path is None else self.path)
            self.database.execute("PRAGMA journal_mode = WAL")
            self.database.execute(
                "CREATE TABLE IF NOT EXISTS positions (key TEXT PRIMARY KEY, folder TEXT,"
                " path TEXT, label TEXT, offset INTEGER, number INTEGER, head TEXT,"
                " head_size INTEGER, seen REAL)"
            )
            self.database.execute(
                "CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, files INTEGER)"
            )
            self.database.execute("DELETE FROM positions WHERE seen < ?", (time() - KEPT_SECONDS,))
            self.database.commit()
        except sqlite3.Error as error:
            raise self._error(error) from None

    def load(self) -> dict[str, FilePosition]:
        """All positions by key."""
        try:
            rows = self.database.execute("SELECT * FROM positions").fetchall()
        except sqlite3.Error as error:
            raise self._error(error) from None
        return {row[0]: FilePosition(*row) for row in rows}

    def save(self, positions: Iterable[FilePosition]) -> None:
        """Store positions durably."""
        try:
            self.database.executemany(
                "INSERT OR REPLACE INTO positions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [astuple(position) for position in positions],
            )
            self.database.commit()
        except sqlite3.Error as error:
            raise self._error(error) from None

    def new_label(self, name: str) -> str:
        """A label for a new file of this name: the name, then name~2, name~3 ..."""
        try:
            (files,) = self.database.execute(
                "INSERT INTO names VALUES (?, 1) ON CONFLICT DO UPDATE SET files = files + 1"
                " RETURNING files",
                (name,),
            ).fetchone()
        except sqlite3.Error as error:
            raise self._error(error) from None
        return name if files == 1 else f"{name}~{files}"

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def _error(self, error: sqlite3.Error) -> Exception:
        if self.path is None:
            return error
        if error_code(error) in NOT_A_DATABASE:
            return SourceError(
                f"{self.path} is not what Regard wrote ({error}). Delete it to read all files from "
                "their beginning."
            )
        return to_os_error(error, self.path)
