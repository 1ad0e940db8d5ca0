"""What was done already: a small database beside the runs, so that an interrupted comparison goes on where it stopped."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

DONE, FAILED, REFUSED, WAITING = "done", "failed", "refused", "waiting"
INTERRUPTED = "interrupted"  # what a run says last that was stopped and can go on

TABLE = """CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, status TEXT NOT NULL, words TEXT NOT NULL, result TEXT, why TEXT
)"""


class LedgerEntry(NamedTuple):
    """One run: where it stands, and what came of it."""

    key: str
    name: str
    status: str
    words: dict[str, Any]
    result: dict[str, Any] | None
    why: str


class Ledger:
    """A table of runs in a file; every change is on the disk when it returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.file = sqlite3.connect(path, isolation_level=None)
            self.file.execute("PRAGMA journal_mode=WAL")
            self.file.execute(TABLE)
            self.entries()  # where a later page is torn, or the table is another's, it shows only here
        except (sqlite3.DatabaseError, ValueError) as error:
            raise ValueError(f"{path} is not a ledger: {error}") from None

    def add(self, key: str, name: str, words: dict[str, Any], *, refusal: str = "") -> None:
        """Take a run in, unless it is there."""
        status = REFUSED if refusal else WAITING
        row = (key, name, status, json.dumps(words), refusal)
        self.file.execute(
            "INSERT OR IGNORE INTO runs (key, name, status, words, why) VALUES (?, ?, ?, ?, ?)", row
        )

    def finish(self, key: str, result: dict[str, Any]) -> None:
        """It is done."""
        self.file.execute(
            "UPDATE runs SET status = ?, result = ?, why = '' WHERE key = ?",
            (DONE, json.dumps(result), key),
        )

    def fail(self, key: str, why: str) -> None:
        """It ended badly; the next comparison tries it again."""
        self.file.execute("UPDATE runs SET status = ?, why = ? WHERE key = ?", (FAILED, why, key))

    def entries(self) -> list[LedgerEntry]:
        """All runs, in the order in which they came."""
        rows = self.file.execute(
            "SELECT key, name, status, words, result, why FROM runs ORDER BY rowid"
        ).fetchall()
        return [
            LedgerEntry(k, n, s, json.loads(w), None if r is None else json.loads(r), y or "")
            for k, n, s, w, r, y in rows
        ]

    def close(self) -> None:
        """Let the file go."""
        self.file.close()
