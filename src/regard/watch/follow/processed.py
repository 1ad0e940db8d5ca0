"""Ids of records that are done, so that a record that comes twice is counted once."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from regard.watch.follow.database import Database


class ProcessedIds:
    """The ids of the latest records, in memory and in the file.

    A broker delivers a record again when it was not acknowledged in time, because the process was
    killed or the acknowledgement was lost. An id is added in the transaction that stores what was
    made of the record, so the record has either left all of its traces or none.

    Args:
        database: Where ids are stored.
        capacity: How many ids are kept, at least; at most twice as many.
    """

    def __init__(self, database: Database, capacity: int = 100_000) -> None:
        self.database, self.capacity = database, capacity
        self.newer: set[str] = set()
        self.older: set[str] = set()
        self.number = 0
        for number, ids in database.rows("SELECT number, ids FROM processed ORDER BY number"):
            self.number = int(number)  # type: ignore[call-overload]
            self._remember(orjson.loads(ids))  # type: ignore[arg-type]

    def __contains__(self, id: str) -> bool:
        return id in self.newer or id in self.older

    def _remember(self, ids: Sequence[str]) -> None:
        self.newer.update(ids)
        if len(self.newer) >= self.capacity:
            self.older, self.newer = self.newer, set()

    def write(self, ids: Sequence[str]) -> None:
        """Write ids; part of a transaction. Call `remember` when it is on the disk."""
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT INTO processed VALUES (?, ?, ?)",
                (self.number + 1, len(ids), orjson.dumps(ids)),
            )
            connection.execute(
                "DELETE FROM processed WHERE number <= coalesce((SELECT max(number) FROM (SELECT "
                "number, sum(count) OVER (ORDER BY number DESC) AS total FROM processed) "
                "WHERE total > ?), 0)",
                (self.capacity + len(ids),),
            )

    def remember(self, ids: Sequence[str]) -> None:
        """Remember ids that were written."""
        self.number += 1
        self._remember(ids)
