"""The ledger: an SQLite table of runs, so that an interrupted comparison can be resumed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from regard.sqlite_files import NOT_A_DATABASE, error_code, to_os_error

DONE, FAILED, REFUSED, WAITING = "done", "failed", "refused", "waiting"
INTERRUPTED = "interrupted"  # the reason of a run that was stopped and can be resumed

TABLE = """CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, status TEXT NOT NULL, settings TEXT NOT NULL,
    result TEXT, reason TEXT
)"""


class LedgerEntry(NamedTuple):
    """One run: its status and, once it is done, its result.

    Attributes:
        key: Hash of the run's settings.
        name: Readable name.
        status: DONE, FAILED, REFUSED or WAITING.
        settings: The mixer, task, length and seed.
        result: What `regard.train.run.run_training` returned, or None.
        reason: Why the run was refused or failed.
    """

    key: str
    name: str
    status: str
    settings: dict[str, Any]
    result: dict[str, Any] | None
    reason: str


def check_ledger(path: Path) -> None:
    """Raise ValueError if a file is a database of somebody else; it is not changed."""
    if path.is_symlink() or not path.is_file() or not path.stat().st_size:
        return
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error:
        return  # of its own tables, or not a database: opening it tells
    if tables and "runs" not in tables:
        raise ValueError(f"{path} is not a ledger: it has other tables.")


class Ledger:
    """A table of runs in a file. Every change is committed before the method returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link: move the file there, or use another folder."
            )
        check_ledger(path)
        try:
            self.connection = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise to_os_error(error, path) from None
        try:
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute(TABLE)
            self.entries()  # a corrupt page or a foreign table shows only when it is read
        except (sqlite3.Error, ValueError, TypeError, RecursionError) as error:
            self.connection.close()
            if isinstance(error, sqlite3.Error) and error_code(error) not in NOT_A_DATABASE:
                raise to_os_error(error, path) from None  # such as a full disk
            raise ValueError(f"{path} is not a ledger of this version of Regard: {error}") from None

    def add(self, key: str, name: str, settings: dict[str, Any], *, refusal: str = "") -> None:
        """Add a run, unless it is already in the table."""
        self.connection.execute(
            "INSERT OR IGNORE INTO runs (key, name, status, settings, reason) "
            "VALUES (?, ?, ?, ?, ?)",
            (key, name, REFUSED if refusal else WAITING, json.dumps(settings), refusal),
        )

    def finish(self, key: str, result: dict[str, Any]) -> None:
        """Store the result of a run and mark it done."""
        self.connection.execute(
            "UPDATE runs SET status = ?, result = ?, reason = '' WHERE key = ?",
            (DONE, json.dumps(result), key),
        )

    def fail(self, key: str, reason: str) -> None:
        """Mark a run failed. The next comparison tries it again."""
        self.connection.execute(
            "UPDATE runs SET status = ?, reason = ? WHERE key = ?", (FAILED, reason, key)
        )

    def entries(self) -> list[LedgerEntry]:
        """Return all runs in the order they were added."""
        rows = self.connection.execute(
            "SELECT key, name, status, settings, result, reason FROM runs ORDER BY rowid"
        )
        return [
            LedgerEntry(
                key,
                name,
                status,
                json.loads(settings),
                None if result is None else json.loads(result),
                reason or "",
            )
            for key, name, status, settings, result, reason in rows.fetchall()
        ]

    def close(self) -> None:
        """Close the file."""
        self.connection.close()
