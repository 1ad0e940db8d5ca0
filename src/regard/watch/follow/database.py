"""The SQLite file of a watch: its tables, and errors in clear words.

`follow`, the page and the commands `mute`, `label`, `accept` and `drift` open the same file, each
in its own process. It is in WAL mode, so readers never wait, and writers wait for each other for a
few seconds. Every commit is flushed to the disk before it returns.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.sqlite_files import NOT_A_DATABASE, error_code, to_os_error

DATABASE_FILE = "watch.db"
VERSION = 1  # stored as SQLite's user_version
APPLICATION_ID = 0x52574348  # "RWCH": a file of ours
BUSY_SECONDS = 10.0

TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE alerts (
    id TEXT PRIMARY KEY,
    time REAL NOT NULL,
    stored REAL NOT NULL,
    tenant TEXT NOT NULL,
    entity TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    kind TEXT NOT NULL,
    path TEXT NOT NULL,
    severity TEXT NOT NULL,
    p REAL NOT NULL,
    priority REAL NOT NULL,
    status TEXT NOT NULL,
    reason TEXT NOT NULL,
    content TEXT NOT NULL,
    event TEXT
);
CREATE INDEX alerts_by_time ON alerts (time);
CREATE INDEX alerts_by_endpoint ON alerts (endpoint, time);
CREATE INDEX alerts_by_entity ON alerts (entity, time);

CREATE TABLE deliveries (
    output TEXT NOT NULL, alert TEXT NOT NULL, PRIMARY KEY (output, alert)
) WITHOUT ROWID;

CREATE TABLE mutes (
    id INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    path TEXT NOT NULL,
    value_class TEXT NOT NULL,
    reason TEXT NOT NULL,
    created REAL NOT NULL,
    expires REAL,
    alerts INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE labels (
    alert TEXT PRIMARY KEY, label TEXT NOT NULL, note TEXT NOT NULL, time REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE accepted (alert TEXT PRIMARY KEY, time REAL NOT NULL, learned REAL) WITHOUT ROWID;

CREATE TABLE shapes (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    added TEXT NOT NULL,
    missing TEXT NOT NULL,
    status TEXT NOT NULL,
    first_seen REAL NOT NULL,
    last_seen REAL NOT NULL,
    events INTEGER NOT NULL,
    entities INTEGER NOT NULL,
    example TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE shape_entities (
    shape TEXT NOT NULL, entity TEXT NOT NULL, PRIMARY KEY (shape, entity)
) WITHOUT ROWID;

CREATE TABLE drifts (
    time REAL NOT NULL, tenant TEXT NOT NULL, endpoint TEXT NOT NULL,
    before REAL NOT NULL, after REAL NOT NULL, events INTEGER NOT NULL
);

CREATE TABLE series (
    tenant TEXT NOT NULL, subject TEXT NOT NULL, name TEXT NOT NULL, time REAL NOT NULL,
    value REAL NOT NULL, low REAL, high REAL,
    PRIMARY KEY (tenant, subject, name, time)
) WITHOUT ROWID;
CREATE INDEX series_by_time ON series (time);

CREATE TABLE clusters (
    tenant TEXT NOT NULL, entity TEXT NOT NULL, cluster INTEGER NOT NULL, home INTEGER NOT NULL,
    x REAL NOT NULL, y REAL NOT NULL, events INTEGER NOT NULL, time REAL NOT NULL,
    PRIMARY KEY (tenant, entity)
) WITHOUT ROWID;

CREATE TABLE entities (
    tenant TEXT NOT NULL, entity TEXT NOT NULL, stored REAL NOT NULL, state BLOB NOT NULL,
    PRIMARY KEY (tenant, entity)
) WITHOUT ROWID;
CREATE INDEX entities_by_time ON entities (stored);

CREATE TABLE processed (number INTEGER PRIMARY KEY, count INTEGER NOT NULL, ids BLOB NOT NULL);
"""


class Database:
    """A connection to the SQLite file of a watch.

    Args:
        path: The file; its folder exists.
        create: Create the file if it does not exist; otherwise that is an error.
        check: Read every page of the file, to find damage now and not weeks later.
    """

    def __init__(self, path: Path, *, create: bool = False, check: bool = False) -> None:
        self.path = path
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link: give the folder that it points to.")
        if not path.exists():
            if not create:
                raise ValueError(
                    f"There is no {path}: start `regard watch follow` with --state {path.parent}, "
                    "or give the folder of one that was started."
                )
            # only this user may read values of requests
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        with self.errors():
            self.connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            with self.errors():
                self._prepare(check)
        except BaseException:
            self.connection.close()
            raise

    def _prepare(self, check: bool) -> None:
        """Create the tables of an empty file, or check that the file is ours and intact."""
        execute = self.connection.execute
        if not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            execute("PRAGMA journal_mode=WAL")
            with self.transaction():
                if not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in TABLES.split(";"):
                        execute(statement)
                    execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    execute(f"PRAGMA user_version = {VERSION}")
        ours = execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
        version = execute("PRAGMA user_version").fetchone()[0]
        if not ours:
            raise ValueError(f"{self.path} is a database of another program: use another folder.")
        if version != VERSION:
            raise ValueError(
                f"{self.path} has version {version}, and this version of Regard reads {VERSION}: "
                "use another folder, or the version of Regard that wrote it."
            )
        execute("PRAGMA synchronous=FULL")  # a commit is on the disk when it returns
        if check:
            found = execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise self._damage_error(str(found))

    def _damage_error(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.path} is damaged ({' '.join(reason.split())}). Move it away and restore a "
            "backup, or start with a new folder: events that were not acknowledged come again."
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of SQLite into ValueError (damaged) or OSError (full, not writable)."""
        try:
            yield
        except sqlite3.Error as error:
            code = error_code(error)
            if code in NOT_A_DATABASE:
                raise self._damage_error(str(error)) from None
            if code == sqlite3.SQLITE_BUSY:
                raise OSError(
                    f"{self.path} is locked by another process for more than {BUSY_SECONDS:.0f} s."
                ) from None
            if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                raise OSError(f"{self.path} cannot be written: check its permissions.") from None
            raise to_os_error(error, self.path) from None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; on the disk when the block ends. Blocks may be nested."""
        if self.connection.in_transaction:
            yield self.connection
            return
        with self.errors():
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def rows(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        """All rows of a query."""
        with self.errors():
            return self.connection.execute(query, values).fetchall()

    def change_count(self) -> int:
        """A number that changes when another process has changed the file."""
        with self.errors():
            return int(self.connection.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        self.connection.close()
