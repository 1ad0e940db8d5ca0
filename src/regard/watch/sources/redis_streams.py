"""Redis Streams: a consumer group shares the records, and keeps those that are not acknowledged."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from time import monotonic, time
from typing import Any

from regard.watch.sources.broker_url import (
    BackOff,
    parse_broker_url,
    parse_seconds,
    starts_at_beginning,
    without_password,
)
from regard.watch.sources.source import Record, Source, SourceError

EXAMPLE = "redis://host:6379/requests?group=regard"
PAYLOADS = (b"data", b"event", b"message", b"json", b"body", b"value")
BATCH = 1_000  # entries of one command
MAX_BLOCK = 5.0  # seconds that one command waits for entries

Entry = tuple[bytes, dict[bytes, bytes] | None]


class RedisSource(Source):
    """Entries of a Redis stream, read in a consumer group.

    Entries of a consumer that died are claimed by the others after `idle` seconds (XAUTOCLAIM). If
    the server is away, `read` returns nothing, tries again with growing pauses, and goes on where
    it was.

    The record is the field `field` of an entry; by default `data`, `event`, `message`, `json`,
    `body` or `value`, or the only field. An entry of several other fields is read as an object.

    Args:
        url: `redis://user:password@host:6379/0/stream`, or `rediss:` for TLS. The number of the
            database may be left out. Options:
            `group`: consumer group, which is made if it is not there; "regard".
            `consumer`: name of this process in the group; by default its host and number.
            `start`: where a new group starts: "beginning" or "new".
            `idle`: seconds after which entries of another consumer are taken over; 60.
            `field`: field that holds the event.
        replay: Read again what was added in the last so many seconds.
    """

    def __init__(self, url: str, *, replay: float | None = None) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise SourceError(
                "Reading from Redis requires the package redis: pip install 'regard[watch]'"
            ) from None
        self.errors = redis.exceptions
        consumer = f"{socket.gethostname()}-{os.getpid()}"
        defaults = {
            "group": "regard",
            "consumer": consumer,
            "start": "beginning",
            "idle": "60",
            "field": "",
        }
        parsed = parse_broker_url(url, defaults, EXAMPLE)
        database, stream = (["0", *parsed.path])[-2:]
        if not database.isdecimal() or len(parsed.path) > 2:
            raise SourceError(
                f"{without_password(url)} must be {EXAMPLE}, or have the number of the database "
                "before the stream"
            )
        self.name = f"redis:{stream}"
        self.stream = stream
        self.group, self.consumer = parsed.options["group"], parsed.options["consumer"]
        self.field = parsed.options["field"].encode()
        self.idle = parse_seconds(parsed.options, "idle")
        self.start = "0" if starts_at_beginning(parsed.options) else "$"
        self.client: Any = redis.Redis.from_url(
            f"{parsed.server}/{database}",
            protocol=2,  # answers of version 3 have another shape
            socket_connect_timeout=5.0,
            socket_timeout=2 * MAX_BLOCK,
            retry=Retry(NoBackoff(), 0),  # `read` does that
        )
        self.back_off = BackOff()
        self.in_flight: set[bytes] = set()
        self.to_acknowledge: list[bytes] = []
        self.own_cursor: bytes | None = b"0"  # entries of this consumer from an earlier run
        self.claim_cursor: bytes = b"0-0"
        self.next_claim = 0.0
        try:
            self._make_group()
            self.replay_cursor, self.replay_end = self._replay_range(replay)
        except self.errors.RedisError as error:
            raise SourceError(f"Cannot read {without_password(url)}: {error}") from None

    def read(self, max_events: int, timeout: float) -> list[Record]:
        """The next records: replayed, left over, claimed, or new."""
        deadline = monotonic() + timeout
        while True:
            try:
                self._send_acknowledgements()
                entries = self._next_entries(max_events, max(0.0, deadline - monotonic()))
                self.back_off.reset()
                return [self._record(*entry) for entry in entries]
            except self.errors.ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise SourceError(f"Cannot read {self.name}: {error}") from None
                self._try_to_make_group()
            except (self.errors.ConnectionError, self.errors.TimeoutError, OSError):
                self.own_cursor = b"0"  # the answer may be lost, with entries that are ours now
            if monotonic() >= deadline:
                return []
            self.back_off.wait(deadline)

    def acknowledge(self, ids: Iterable[str]) -> None:
        """Acknowledge entries (XACK); those that fail are sent again with the next call."""
        for name in ids:
            entry = name.rpartition(":")[2].encode()
            if entry in self.in_flight:
                self.in_flight.discard(entry)
                self.to_acknowledge.append(entry)
        try:
            self._send_acknowledgements()
        except (self.errors.RedisError, OSError):
            return

    def close(self) -> None:
        """Close the connection."""
        self.client.close()

    def lag(self) -> int | None:
        """Entries that were added and not read by the group."""
        try:
            groups = self.client.xinfo_groups(self.stream)
        except (self.errors.RedisError, OSError):
            return None
        return next((g.get("lag") for g in groups if g["name"] == self.group.encode()), None)

    @property
    def problem(self) -> str:
        """That the server does not answer."""
        return f"{self.name} does not answer." if self.back_off.failures > 2 else ""

    def _make_group(self) -> None:
        """Make the stream and the group, unless they are there."""
        try:
            self.client.xgroup_create(self.stream, self.group, self.start, mkstream=True)
        except self.errors.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _try_to_make_group(self) -> None:
        """Make the group again on a server that has lost its data."""
        self.start = "0"  # what came since then must not be left out
        try:
            self._make_group()
        except (self.errors.RedisError, OSError):
            return

    def _replay_range(self, replay: float | None) -> tuple[bytes | None, bytes]:
        """First and last id of the entries to replay: the group was given all up to the last."""
        if replay is None:
            return None, b""
        first = f"{max(0, int((time() - replay) * 1_000))}-0".encode()
        groups = self.client.xinfo_groups(self.stream)
        last = next(g["last-delivered-id"] for g in groups if g["name"] == self.group.encode())
        return first, last

    def _next_entries(self, limit: int, timeout: float) -> list[Entry]:
        """The next entries from the first of the places that has some."""
        if self.replay_cursor is not None:
            entries = self.client.xrange(self.stream, self.replay_cursor, self.replay_end, limit)
            self.replay_cursor = b"(" + entries[-1][0] if entries else None
            if entries:
                return list(entries)
        while self.own_cursor is not None:
            entries = self._read_group(self.own_cursor, limit, None)
            self.own_cursor = entries[-1][0] if entries else None
            if fresh := self._deliver(entries):
                return fresh
        if monotonic() >= self.next_claim and (claimed := self._deliver(self._claim(limit))):
            return claimed
        block = int(min(timeout, self.idle, MAX_BLOCK) * 1_000)
        return self._deliver(self._read_group(b">", limit, block or None))

    def _deliver(self, entries: list[Entry]) -> list[Entry]:
        """Those of the entries that were not returned before."""
        fresh = [entry for entry in entries if entry[0] not in self.in_flight]
        self.in_flight.update(entry for entry, _ in fresh)
        return fresh

    def _read_group(self, first: bytes, limit: int, block: int | None) -> list[Entry]:
        """Entries that are new to the group (">"), or of this consumer after an id."""
        answer = self.client.xreadgroup(
            self.group, self.consumer, {self.stream: first}, count=min(limit, BATCH), block=block
        )
        return list(answer[0][1]) if answer else []

    def _claim(self, limit: int) -> list[Entry]:
        """Entries of consumers that have not acknowledged them for `idle` seconds."""
        answer = self.client.xautoclaim(
            self.stream,
            self.group,
            self.consumer,
            min_idle_time=int(self.idle * 1_000),
            start_id=self.claim_cursor,
            count=min(limit, BATCH),
        )
        self.claim_cursor = answer[0]
        if answer[0] == b"0-0":  # all were looked at
            self.next_claim = monotonic() + self.idle / 2
        return list(answer[1])

    def _send_acknowledgements(self) -> None:
        while self.to_acknowledge:
            batch = self.to_acknowledge[:BATCH]
            self.client.xack(self.stream, self.group, *batch)
            del self.to_acknowledge[: len(batch)]

    def _record(self, entry: bytes, fields: dict[bytes, bytes] | None) -> Record:
        """The record of an entry."""
        name = f"{self.name}:{entry.decode()}"
        if not fields:
            return Record(b"", name, "deleted from the stream before it was read")
        payloads = (self.field,) if self.field else PAYLOADS
        payload = next((key for key in payloads if key in fields), None)
        if payload is not None:
            return Record(fields[payload], name)
        if self.field:
            return Record(b"", name, f"the entry has no field {self.field.decode()!r}")
        if len(fields) == 1:
            return Record(next(iter(fields.values())), name)
        texts = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in fields.items()}
        return Record(json.dumps(texts).encode(), name)
