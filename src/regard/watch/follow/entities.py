"""States of entities: the most recent in memory, all of them in SQLite."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import orjson

from regard.watch.follow.database import Database

Key = tuple[str, str]
KEYS_PER_QUERY = 400  # SQLite takes at least 999 values


class EntityStore(MutableMapping[Key, dict[str, Any]]):
    """(tenant, entity) -> {name of a level: state}, as `Detector.score` takes it.

    What was used since the last `write` stays in memory until the next one; beyond that, the
    `capacity` entities that were used last. An entity that is not in memory is read from the file.

    Args:
        database: Where states are stored.
        capacity: Entities in memory.
        max_stored: Entities in the file; those that were seen least recently are deleted.
        initial: States of entities that are not stored yet, such as those at the end of learning.
    """

    def __init__(
        self,
        database: Database,
        *,
        capacity: int = 20_000,
        max_stored: int = 1_000_000,
        initial: Mapping[Key, dict[str, Any]] | None = None,
    ) -> None:
        self.database, self.capacity, self.max_stored = database, capacity, max_stored
        self.initial = initial or {}
        self.memory: OrderedDict[Key, dict[str, Any]] = OrderedDict()
        self.used: set[Key] = set()
        self.unknown: set[Key] = set()
        self.loads = 0

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Read the states of entities that are not in memory, in few queries."""
        missing = [key for key in dict.fromkeys(keys) if key not in self.memory]
        self.unknown = set(missing)
        for start in range(0, len(missing), KEYS_PER_QUERY):
            part = missing[start : start + KEYS_PER_QUERY]
            places = ", ".join(["(?, ?)"] * len(part))
            rows = self.database.rows(
                "SELECT tenant, entity, state FROM entities WHERE (tenant, entity) IN "
                f"(VALUES {places})",
                tuple(name for key in part for name in key),
            )
            for tenant, entity, state in rows:
                key = (str(tenant), str(entity))
                self.memory[key] = orjson.loads(state)  # type: ignore[arg-type]
                self.unknown.discard(key)
                self.loads += 1
        for key in [*self.unknown]:
            if key in self.initial:
                self.memory[key] = dict(self.initial[key])
                self.unknown.discard(key)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        if key not in self.memory:
            if key not in self.unknown:
                self.prefetch([key])
            if key not in self.memory:
                raise KeyError(key)
        self.memory.move_to_end(key)
        self.used.add(key)  # its value may be changed in place
        return self.memory[key]

    def __setitem__(self, key: Key, state: dict[str, Any]) -> None:
        self.memory[key] = state
        self.memory.move_to_end(key)
        self.used.add(key)
        self.unknown.discard(key)

    def __delitem__(self, key: Key) -> None:
        self[key]
        del self.memory[key]
        self.used.discard(key)
        with self.database.transaction() as connection:
            connection.execute("DELETE FROM entities WHERE tenant = ? AND entity = ?", key)

    def __iter__(self) -> Iterator[Key]:
        stored = self.database.rows("SELECT tenant, entity FROM entities")
        return iter({(str(tenant), str(entity)) for tenant, entity in stored} | {*self.memory})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def snapshot(self, keys: Iterable[Key]) -> dict[Key, dict[str, Any] | None]:
        """The states of entities now; levels replace states and do not change them."""
        return {key: dict(state) if (state := self.get(key)) is not None else None for key in keys}

    def restore(self, snapshot: dict[Key, dict[str, Any] | None]) -> None:
        """Go back to a snapshot."""
        for key, state in snapshot.items():
            if state is not None:
                self[key] = state
            else:
                self.memory.pop(key, None)
                self.used.discard(key)

    def write(self) -> int:
        """Write the states that were used since the last write; part of a transaction. Returns
        their number. Call `evict` when the transaction is on the disk."""
        now = time.time()
        with self.database.transaction() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO entities VALUES (?, ?, ?, ?)",
                [
                    (*key, now, orjson.dumps(self.memory[key], option=orjson.OPT_SERIALIZE_NUMPY))
                    for key in self.used
                ],
            )
        return len(self.used)

    def evict(self) -> None:
        """Forget what is on the disk, beyond the capacity, the least recently used first."""
        self.used.clear()
        self.unknown.clear()
        while len(self.memory) > self.capacity:
            self.memory.popitem(last=False)

    def prune(self) -> int:
        """Delete the entities beyond `max_stored` from the file; returns their number."""
        with self.database.transaction() as connection:
            return connection.execute(
                "DELETE FROM entities WHERE (tenant, entity) IN (SELECT tenant, entity "
                "FROM entities ORDER BY stored DESC LIMIT -1 OFFSET ?)",
                (self.max_stored,),
            ).rowcount
