"""Alerts and what people said about them, in one SQLite file that several processes share.

`follow` writes alerts, shapes, drifts, series and clusters; the page and the commands read them and
write mutes, labels and what is accepted. Every method that writes is a transaction of its own,
unless `transaction()` joins several.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import check_choice, did_you_mean
from regard.watch.event import Event
from regard.watch.follow.database import DATABASE_FILE, Database

# The detector says "alert", "shadow" (the endpoint is new) or "repeated" (the finding was reported
# often enough today); the others are reasons of the store not to show an alert.
STATUSES = ("alert", "shadow", "repeated", "muted", "known_shape", "accepted")
LABELS = ("attack", "normal")
SHAPE_STATUSES = ("new", "accepted")
ORDERS = {"priority": "priority DESC, alerts.time DESC", "time": "alerts.time DESC"}
MAX_COUNTED_ENTITIES = 1000  # of a shape; beyond, the number is a lower bound
MAX_DRIFTS = 10_000  # that are kept
MIN_ID_LENGTH = 4  # characters that are enough to name an alert, if they are unique


class Mute(NamedTuple):
    """Findings that are not to be reported; "" matches anything.

    Attributes:
        tenant: A tenant.
        endpoint: An endpoint, or a pattern such as "GET /orders/*".
        path: Path of the leaf, or a pattern such as "request.headers.*".
        value_class: A class of values; see `regard.watch.users.mutes.value_class`.
        reason: Why, for people.
        created: When it was made, in seconds since 1970.
        expires: When it ends; None if never.
        alerts: Number of alerts that it muted.
        id: Number of the mute in its store; 0 if it is not stored.
    """

    tenant: str = ""
    endpoint: str = ""
    path: str = ""
    value_class: str = ""
    reason: str = ""
    created: float = 0.0
    expires: float | None = None
    alerts: int = 0
    id: int = 0


@dataclass
class AlertEntry:
    """An alert as it is stored.

    Attributes:
        content: The alert as JSON values; see `Alert.to_json`.
        status: One of `STATUSES`.
        reason: Why the status is "muted", "known_shape" or "accepted".
        priority: Rank for people, higher first: -log10 p, plus what labels have taught.
        label: One of `LABELS`, or "".
        note: What the person who labelled it wrote.
        event: The event, which `accept` needs; it is not masked, so it is never shown.
    """

    content: dict[str, Any]
    status: str = "alert"
    reason: str = ""
    priority: float = 0.0
    label: str = ""
    note: str = ""
    event: dict[str, Any] | None = None


@dataclass
class Shape:
    """A difference between requests and what an endpoint has had so far.

    Attributes:
        id: Hash of tenant, endpoint and difference.
        tenant: Its tenant.
        endpoint: Its endpoint.
        added: (path, JSON type) of leaves that the endpoint has not had.
        missing: Paths that every earlier event had.
        status: "new" or "accepted".
        first_seen: Time of the first event.
        last_seen: Time of the last event.
        events: Number of events.
        entities: Number of entities, at most `MAX_COUNTED_ENTITIES`.
        example: Source of the first event.
    """

    id: str
    tenant: str
    endpoint: str
    added: list[tuple[str, str]]
    missing: list[str]
    status: str = "new"
    first_seen: float = 0.0
    last_seen: float = 0.0
    events: int = 0
    entities: int = 0
    example: str = ""


class Drift(NamedTuple):
    """A change of the surprise of an endpoint, found by ADWIN.

    Attributes:
        time: When it was found, by the clock of the events.
        tenant: Its tenant.
        endpoint: The endpoint.
        before: Mean bits of the events until then.
        after: Mean bits of the latest events.
        events: Number of events that `before` is the mean of.
    """

    time: float
    tenant: str
    endpoint: str
    before: float
    after: float
    events: int


class SeriesPoint(NamedTuple):
    """A value of a series, and the band that was expected.

    Attributes:
        tenant: Its tenant.
        subject: What it is about: "endpoint GET /orders", "entity u17", "all".
        name: The quantity: "events", "alerts", "error_share" ...
        time: Start of the window, in seconds since 1970.
        value: What was measured.
        low: Lower end of the band; None if there is none.
        high: Upper end of the band.
    """

    tenant: str
    subject: str
    name: str
    time: float
    value: float
    low: float | None = None
    high: float | None = None


class ClusterPlace(NamedTuple):
    """Where an entity is among the clusters of users.

    Attributes:
        tenant: Its tenant.
        entity: The entity.
        cluster: The cluster that it is in now.
        home: The cluster that it usually is in.
        x: First coordinate on a map.
        y: Second coordinate on a map.
        events: Number of events of the entity.
        time: Time of its last event.
    """

    tenant: str
    entity: str
    cluster: int
    home: int
    x: float
    y: float
    events: int
    time: float


@dataclass
class AlertQuery:
    """Which alerts to read; None stands for any.

    Attributes:
        statuses: Some of `STATUSES`.
        tenant: A tenant.
        endpoint: An endpoint.
        entity: An entity.
        kind: Kind of the first finding.
        severity: A severity.
        label: A label; "" for those without one.
        since: Earliest time of the event.
        until: Latest time of the event, exclusive.
        order: "priority" or "time", the largest first.
        limit: Number of alerts.
        offset: Number of alerts to skip.
    """

    statuses: Sequence[str] | None = ("alert",)
    tenant: str | None = None
    endpoint: str | None = None
    entity: str | None = None
    kind: str | None = None
    severity: str | None = None
    label: str | None = None
    since: float | None = None
    until: float | None = None
    order: str = "priority"
    limit: int = 100
    offset: int = 0

    def conditions(self) -> tuple[str, list[Any]]:
        """The WHERE clause and its values."""
        clauses: list[str] = ["1"]
        values: list[Any] = []
        if self.statuses is not None:
            for status in self.statuses:
                check_choice("status", status, STATUSES)
            clauses.append(f"status IN ({', '.join('?' * len(self.statuses))})")
            values += self.statuses
        for name in ("tenant", "endpoint", "entity", "kind", "severity"):
            wanted = getattr(self, name)
            if wanted is not None:
                clauses.append(f"{name} = ?")
                values.append(wanted)
        if self.label is not None:
            clauses.append("coalesce(label, '') = ?")
            values.append(self.label)
        if self.since is not None:
            clauses.append("alerts.time >= ?")
            values.append(self.since)
        if self.until is not None:
            clauses.append("alerts.time < ?")
            values.append(self.until)
        return " AND ".join(clauses), values


@dataclass
class Accepted:
    """An alert whose event is to be learned as normal: its id and its event."""

    alert: str
    event: dict[str, Any] = field(default_factory=dict)


class WatchStore:
    """The store of a watch: alerts, mutes, labels, shapes, drifts, series and clusters.

    Args:
        folder: The state folder of `regard watch follow`.
        create: Create the file if it does not exist.
        check: Read every page of the file first, to find damage.
    """

    def __init__(self, folder: Path, *, create: bool = False, check: bool = False) -> None:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.database = Database(folder / DATABASE_FILE, create=create, check=check)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Join several writes: all or nothing, on the disk when the block ends."""
        with self.database.transaction():
            yield

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.database.rows(query, tuple(values))

    def _write(self, query: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run a statement for each row; returns the number of rows that it changed."""
        with self.database.transaction() as connection:
            return connection.executemany(query, rows).rowcount

    def change_count(self) -> int:
        """A number that changes when another process has written to the store."""
        return self.database.change_count()

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    # ------------------------------------------------------------------------------- facts
    def fact(self, name: str) -> Any:
        """A JSON value that was stored under a name; None if there is none."""
        found = self._rows("SELECT value FROM facts WHERE name = ?", [name])
        return json.loads(found[0][0]) if found else None

    def set_fact(self, name: str, value: Any) -> None:
        """Store a JSON value under a name."""
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, json.dumps(value))])

    # ------------------------------------------------------------------------------ alerts
    def add_alerts(self, entries: Sequence[AlertEntry], outputs: Sequence[str] = ()) -> None:
        """Store alerts; those whose id is stored already are left as they are.

        Args:
            outputs: Names of the outputs that each new alert of status "alert" is to be sent to;
                see `next_deliveries`.
        """
        now = time.time()
        with self.transaction():
            for entry in entries:
                content = entry.content
                findings = content["findings"]
                added = self._write(
                    "INSERT OR IGNORE INTO alerts (id, time, stored, tenant, entity, endpoint, "
                    "kind, path, severity, p, priority, status, reason, content, event) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        (
                            content["id"],
                            content["time"],
                            now,
                            content["tenant"],
                            content["entity"],
                            content["endpoint"],
                            content["kind"],
                            findings[0]["path"] if findings else "",
                            content["severity"],
                            content["p"],
                            entry.priority,
                            entry.status,
                            entry.reason,
                            json.dumps(content),
                            None if entry.event is None else json.dumps(entry.event),
                        )
                    ],
                )
                if added and entry.status == "alert":
                    self._write(
                        "INSERT OR IGNORE INTO deliveries VALUES (?, ?)",
                        [(output, content["id"]) for output in outputs],
                    )

    def alerts(self, query: AlertQuery | None = None) -> list[AlertEntry]:
        """Alerts that match a query; all with status "alert", the most urgent first, if None."""
        query = query or AlertQuery()
        check_choice("order", query.order, ORDERS)
        condition, values = query.conditions()
        return self._read_alerts(
            f"WHERE {condition} ORDER BY {ORDERS[query.order]} LIMIT ? OFFSET ?",
            [*values, query.limit, query.offset],
        )

    def _read_alerts(self, clause: str, values: Sequence[Any]) -> list[AlertEntry]:
        """Alerts with their labels; `clause` is what follows the FROM."""
        rows = self._rows(
            "SELECT content, status, reason, priority, coalesce(label, ''), coalesce(note, ''), "
            "event FROM alerts LEFT JOIN labels ON labels.alert = alerts.id " + clause,
            values,
        )
        return [
            AlertEntry(
                content=json.loads(content),
                status=status,
                reason=reason,
                priority=priority,
                label=label,
                note=note,
                event=None if event is None else json.loads(event),
            )
            for content, status, reason, priority, label, note, event in rows
        ]

    def count_alerts(self, query: AlertQuery | None = None) -> int:
        """Number of alerts that match a query, whatever its limit."""
        condition, values = (query or AlertQuery()).conditions()
        return int(
            self._rows(
                "SELECT count(*) FROM alerts LEFT JOIN labels ON labels.alert = alerts.id "
                f"WHERE {condition}",
                values,
            )[0][0]
        )

    def alert_values(self, name: str, statuses: Sequence[str] = ("alert",)) -> dict[str, int]:
        """How many alerts there are with each endpoint, entity, kind, severity, status or reason,
        the most frequent first; at most 1,000 values."""
        known = ("tenant", "endpoint", "entity", "kind", "severity", "status", "reason")
        check_choice("name", name, known)
        condition, values = AlertQuery(statuses=statuses).conditions()
        rows = self._rows(
            f"SELECT {name}, count(*) FROM alerts WHERE {condition} GROUP BY {name} "
            "ORDER BY count(*) DESC LIMIT 1000",
            values,
        )
        return {str(value): int(count) for value, count in rows}

    def alert(self, id: str) -> AlertEntry:
        """The alert with an id, or whose id begins with the characters given; ValueError if there
        is none, or more than one."""
        resolved = self.resolve_alert(id)
        return self._read_alerts("WHERE id = ?", [resolved])[0]

    def resolve_alert(self, id: str) -> str:
        """The full id of an alert, given its first characters."""
        if self._rows("SELECT 1 FROM alerts WHERE id = ?", [id]):
            return id
        end = id + "\U0010ffff"
        found = self._rows("SELECT id FROM alerts WHERE id >= ? AND id < ? LIMIT 3", [id, end])
        if len(found) == 1 and len(id) >= MIN_ID_LENGTH:
            return str(found[0][0])
        if found:
            shown = ", ".join(str(row[0]) for row in found)
            raise ValueError(
                f"Several alerts begin with {id!r}, such as {shown}: write more of it."
            )
        latest = [
            str(row[0]) for row in self._rows("SELECT id FROM alerts ORDER BY time DESC LIMIT 50")
        ]
        hint = did_you_mean(id, latest) if latest else "there are no alerts yet"
        raise ValueError(f"There is no alert {id!r} in {self.folder}: {hint}")

    def alert_ids(self) -> set[str]:
        """The ids of all alerts, whatever their status."""
        return {str(row[0]) for row in self._rows("SELECT id FROM alerts")}

    def set_priorities(self, priorities: dict[str, float]) -> None:
        """Set the priorities of alerts by id."""
        self._write(
            "UPDATE alerts SET priority = ? WHERE id = ?",
            [(priority, id) for id, priority in priorities.items()],
        )

    def prune(self, *, before: float, max_alerts: int, series_seconds: float) -> int:
        """Delete alerts that were stored before a time, and the oldest beyond `max_alerts`;
        labelled ones stay. Of series the last so many seconds stay, by the time of their points.
        Returns the number of alerts deleted."""
        unlabelled = "id NOT IN (SELECT alert FROM labels)"
        with self.transaction():
            deleted = self._write(
                f"DELETE FROM alerts WHERE stored < ? AND {unlabelled}", [(before,)]
            )
            deleted += self._write(
                f"DELETE FROM alerts WHERE {unlabelled} AND rowid IN "
                "(SELECT rowid FROM alerts ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                [(max_alerts,)],
            )
            if deleted:
                self._write(
                    "DELETE FROM deliveries WHERE alert NOT IN (SELECT id FROM alerts)", [()]
                )
            self._write(
                "DELETE FROM series WHERE time < (SELECT max(time) FROM series) - ?",
                [(series_seconds,)],
            )
            self._write(
                "DELETE FROM drifts WHERE rowid IN "
                "(SELECT rowid FROM drifts ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                [(MAX_DRIFTS,)],
            )
        return deleted

    # -------------------------------------------------------------------------- deliveries
    def next_deliveries(self, output: str, limit: int) -> list[AlertEntry]:
        """The oldest alerts that an output has not received."""
        return self._read_alerts(
            "WHERE id IN (SELECT alert FROM deliveries WHERE output = ?) "
            "ORDER BY alerts.rowid LIMIT ?",
            [output, limit],
        )

    def finish_deliveries(self, output: str, ids: Sequence[str]) -> None:
        """Mark alerts as received by an output."""
        self._write(
            "DELETE FROM deliveries WHERE output = ? AND alert = ?", [(output, id) for id in ids]
        )

    def count_deliveries(self) -> dict[str, int]:
        """Number of alerts that each output has not received yet."""
        rows = self._rows("SELECT output, count(*) FROM deliveries GROUP BY output")
        return {str(output): int(count) for output, count in rows}

    # ------------------------------------------------------------------------------- mutes
    def add_mute(self, mute: Mute) -> int:
        """Store a mute; returns its number."""
        if not (mute.endpoint or mute.path or mute.value_class):
            raise ValueError("A mute needs an endpoint, a path or a class of values.")
        with self.transaction():
            self._write(
                "INSERT INTO mutes (tenant, endpoint, path, value_class, reason, created, expires) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        mute.tenant,
                        mute.endpoint,
                        mute.path,
                        mute.value_class,
                        mute.reason,
                        mute.created or time.time(),
                        mute.expires,
                    )
                ],
            )
            return int(self._rows("SELECT last_insert_rowid()")[0][0])

    def mutes(self, now: float | None = None) -> list[Mute]:
        """All mutes; with `now`, only those that have not expired."""
        rows = self._rows(
            "SELECT tenant, endpoint, path, value_class, reason, created, expires, alerts, id "
            "FROM mutes ORDER BY id"
        )
        mutes = [Mute(*row) for row in rows]
        return [mute for mute in mutes if now is None or mute.expires is None or mute.expires > now]

    def count_muted(self, id: int, alerts: int = 1) -> None:
        """Add to the number of alerts that a mute has muted."""
        self._write("UPDATE mutes SET alerts = alerts + ? WHERE id = ?", [(alerts, id)])

    def delete_mute(self, id: int) -> None:
        """Delete a mute; ValueError if there is none with this number."""
        if not self._write("DELETE FROM mutes WHERE id = ?", [(id,)]):
            known = ", ".join(str(mute.id) for mute in self.mutes()) or "none"
            raise ValueError(f"There is no mute {id}: the mutes are {known}.")

    # ------------------------------------------------------------------ labels and accepted
    def set_label(self, id: str, label: str, note: str = "") -> str:
        """Label an alert; "" removes its label. Returns the full id."""
        id = self.resolve_alert(id)
        if not label:
            self._write("DELETE FROM labels WHERE alert = ?", [(id,)])
            return id
        check_choice("label", label, LABELS)
        self._write(
            "INSERT OR REPLACE INTO labels VALUES (?, ?, ?, ?)", [(id, label, note, time.time())]
        )
        return id

    def labelled_alerts(self) -> list[AlertEntry]:
        """The alerts that have a label."""
        return self._read_alerts("WHERE label IS NOT NULL ORDER BY alerts.rowid", [])

    def accept_alert(self, id: str) -> str:
        """Ask `follow` to learn the event of an alert as normal. Returns the full id."""
        id = self.resolve_alert(id)
        entry = self.alert(id)
        if entry.label == "attack":
            raise ValueError(f"Alert {id} is labelled attack: label it normal to accept it.")
        if entry.event is None:
            raise ValueError(f"The event of alert {id} was not kept, so it cannot be learned.")
        with self.transaction():
            self._write("INSERT OR IGNORE INTO accepted VALUES (?, ?, NULL)", [(id, time.time())])
            self._write("UPDATE alerts SET status = 'accepted' WHERE id = ?", [(id,)])
        return id

    def accepted_to_learn(self) -> list[Accepted]:
        """The accepted alerts that `follow` has not learned yet."""
        rows = self._rows(
            "SELECT alerts.id, event FROM accepted JOIN alerts ON alerts.id = accepted.alert "
            "WHERE learned IS NULL AND event IS NOT NULL"
        )
        return [Accepted(str(id), json.loads(event)) for id, event in rows]

    def finish_accepted(self, ids: Sequence[str]) -> None:
        """Mark accepted alerts as learned."""
        now = time.time()
        self._write("UPDATE accepted SET learned = ? WHERE alert = ?", [(now, id) for id in ids])

    # ------------------------------------------------------------------------------ shapes
    def add_shape_events(self, shape: Shape, entities: Iterable[str]) -> None:
        """Store a shape, or add events and entities to one that is stored."""
        with self.transaction():
            self._write(
                "INSERT INTO shapes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?) ON CONFLICT (id) DO "
                "UPDATE SET events = events + excluded.events, "
                "first_seen = min(first_seen, excluded.first_seen), "
                "last_seen = max(last_seen, excluded.last_seen)",
                [
                    (
                        shape.id,
                        shape.tenant,
                        shape.endpoint,
                        json.dumps(shape.added),
                        json.dumps(shape.missing),
                        shape.status,
                        shape.first_seen,
                        shape.last_seen,
                        shape.events,
                        shape.example,
                    )
                ],
            )
            self._write(
                "INSERT OR IGNORE INTO shape_entities SELECT ?, ? WHERE "
                "(SELECT count(*) FROM shape_entities WHERE shape = ?) < ?",
                [(shape.id, entity, shape.id, MAX_COUNTED_ENTITIES) for entity in entities],
            )
            self._write(
                "UPDATE shapes SET entities = "
                "(SELECT count(*) FROM shape_entities WHERE shape = id) WHERE id = ?",
                [(shape.id,)],
            )

    def shapes(self, status: str | None = None) -> list[Shape]:
        """Shapes, the latest first; all, or those that are "new" or "accepted"."""
        rows = self._rows(
            "SELECT * FROM shapes WHERE ?1 IS NULL OR status = ?1 ORDER BY last_seen DESC", [status]
        )
        return [
            Shape(
                id,
                tenant,
                endpoint,
                [(path, kind) for path, kind in json.loads(added)],
                json.loads(missing),
                *rest,
            )
            for id, tenant, endpoint, added, missing, *rest in rows
        ]

    def accept_shape(self, id: str) -> str:
        """Accept a shape as normal, given its id or the first characters of it. Returns the id."""
        known = [shape.id for shape in self.shapes()]
        found = [each for each in known if each == id] or [
            each for each in known if each.startswith(id) and len(id) >= MIN_ID_LENGTH
        ]
        if len(found) != 1:
            what = "Several shapes begin with" if found else "There is no shape"
            hint = did_you_mean(id, known) if known else "no new shape was reported."
            raise ValueError(f"{what} {id!r}: {hint}")
        self._write("UPDATE shapes SET status = 'accepted' WHERE id = ?", [(found[0],)])
        return found[0]

    # ------------------------------------------------------------------------------ drifts
    def add_drifts(self, drifts: Sequence[Drift]) -> None:
        """Store drifts."""
        self._write("INSERT INTO drifts VALUES (?, ?, ?, ?, ?, ?)", drifts)

    def drifts(self, *, since: float = 0.0, limit: int = 1000) -> list[Drift]:
        """Drifts, the latest first."""
        rows = self._rows(
            "SELECT * FROM drifts WHERE time >= ? ORDER BY time DESC LIMIT ?", [since, limit]
        )
        return [Drift(*row) for row in rows]

    # ------------------------------------------------------------------------------ series
    def add_series(self, points: Sequence[SeriesPoint]) -> None:
        """Store points of series; a point of the same time is replaced."""
        self._write("INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?, ?, ?, ?)", points)

    def series_subjects(self) -> list[tuple[str, str, list[str]]]:
        """(tenant, subject, names) of all series."""
        names: dict[tuple[str, str], list[str]] = {}
        for tenant, subject, name in self._rows(
            "SELECT DISTINCT tenant, subject, name FROM series ORDER BY tenant, subject, name"
        ):
            names.setdefault((tenant, subject), []).append(name)
        return [(tenant, subject, found) for (tenant, subject), found in names.items()]

    def series(
        self, subject: str, *, tenant: str = "", since: float = 0.0, limit: int = 10_000
    ) -> list[SeriesPoint]:
        """The latest points of all quantities of a subject, in order of time."""
        rows = self._rows(
            "SELECT * FROM series WHERE tenant = ? AND subject = ? AND time >= ? "
            "ORDER BY time DESC, name LIMIT ?",
            [tenant, subject, since, limit],
        )
        return [SeriesPoint(*row) for row in reversed(rows)]

    # ---------------------------------------------------------------------------- clusters
    def set_clusters(self, places: Sequence[ClusterPlace]) -> None:
        """Store where entities are; those that are not given stay where they are."""
        self._write("INSERT OR REPLACE INTO clusters VALUES (?, ?, ?, ?, ?, ?, ?, ?)", places)

    def clusters(self, limit: int = 5000) -> list[ClusterPlace]:
        """Where entities are, the latest first."""
        rows = self._rows("SELECT * FROM clusters ORDER BY time DESC LIMIT ?", [limit])
        return [ClusterPlace(*row) for row in rows]


def event_to_json(event: Event) -> dict[str, Any]:
    """An event as JSON values."""
    return {
        "time": event.time,
        "entity": event.entity,
        "endpoint": event.endpoint,
        "paths": event.paths,
        "values": event.values,
        "source": event.source,
        "tenant": event.tenant,
    }


def event_from_json(content: dict[str, Any]) -> Event:
    """The inverse of `event_to_json`."""
    return Event(**content)
