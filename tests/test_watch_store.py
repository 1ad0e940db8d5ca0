"""The store of `regard watch follow`: alerts, entities and ids in SQLite, and damage to it."""

import sqlite3
import subprocess
import sys

import pytest

from regard.watch.alert import Alert
from regard.watch.follow.database import DATABASE_FILE, Database
from regard.watch.follow.entities import EntityStore
from regard.watch.follow.processed import ProcessedIds
from regard.watch.follow.store import (
    AlertEntry,
    AlertQuery,
    ClusterPlace,
    Mute,
    SeriesPoint,
    Shape,
    WatchStore,
)


def make_entry(id, **changes):
    """An alert as the store takes it."""
    values = {
        "time": 1.0,
        "source": f"x:{id}",
        "tenant": "",
        "entity": "u1",
        "endpoint": "GET /",
        "p": 1e-5,
        "extrapolated": False,
        "severity": "high",
        "kind": "value",
        "findings": [],
    }
    status = changes.pop("status", "alert")
    alert = Alert(id=id, **(values | changes))
    return AlertEntry(alert.to_json(), status=status, priority=5.0, event={"time": 1.0})


@pytest.fixture
def store(tmp_path):
    store = WatchStore(tmp_path, create=True, check=True)
    yield store
    store.close()


def test_alerts_are_stored_once(store):
    """Fails if an id is stored or delivered twice, or a filter, an order or a count is wrong."""
    first, second = make_entry("aaaa1", time=1.0), make_entry("bbbb2", time=2.0, entity="u2")
    shadow = make_entry("cccc3", time=3.0, status="shadow")
    store.add_alerts([first, second, shadow], ["webhook"])
    store.add_alerts([make_entry("aaaa1", p=0.5)], ["webhook"])
    assert store.alert("aaaa1").content["p"] == 1e-5
    assert store.count_deliveries() == {"webhook": 2}  # not the shadow
    assert [each.content["id"] for each in store.next_deliveries("webhook", 1)] == ["aaaa1"]
    store.finish_deliveries("webhook", ["aaaa1"])
    store.add_alerts([first], ["webhook"])
    assert store.count_deliveries() == {"webhook": 1}

    query = AlertQuery(statuses=None, order="time")
    assert [each.content["id"] for each in store.alerts(query)] == ["cccc3", "bbbb2", "aaaa1"]
    assert store.count_alerts(AlertQuery(entity="u2")) == 1
    assert store.count_alerts(AlertQuery(since=2.0, until=3.0, statuses=None)) == 1
    assert store.alert_values("entity") == {"u1": 1, "u2": 1}
    assert store.alert_ids() == {"aaaa1", "bbbb2", "cccc3"}
    with pytest.raises(ValueError, match=r"status must be one of .*did you mean 'alert'"):
        store.alerts(AlertQuery(statuses=["alrt"]))


def test_alert_is_found_by_how_its_id_begins(store):
    """Fails if an unclear id is guessed, or the error does not help."""
    store.add_alerts([make_entry("aaaa1"), make_entry("aaaa2"), make_entry("bbbb1")])
    assert store.alert("bbbb").content["id"] == "bbbb1"
    with pytest.raises(ValueError, match="Several alerts begin with 'aaaa'"):
        store.alert("aaaa")
    with pytest.raises(ValueError, match=r"There is no alert 'bbbx1'.*did you mean 'bbbb1'"):
        store.alert("bbbx1")


def test_transaction_is_all_or_nothing(store):
    """Fails if a part of a failed transaction stays."""

    def write():
        with store.transaction():
            store.add_alerts([make_entry("aaaa1")])
            store.set_fact("a", 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert store.alert_ids() == set() and store.fact("a") is None


def test_prune_keeps_labelled_alerts(store):
    """Fails if old alerts stay, or one with a label is deleted."""
    store.add_alerts([make_entry(f"aaaa{i}") for i in range(9)])
    store.set_label("aaaa0", "attack")
    store.add_series([SeriesPoint("", "all", "events", t, 1.0) for t in (0.0, 1000.0)])
    assert store.prune(before=0.0, max_alerts=3, series_seconds=500.0) == 5
    assert [point.time for point in store.series("all")] == [1000.0]
    assert store.alert_ids() == {"aaaa0", "aaaa6", "aaaa7", "aaaa8"}
    assert store.prune(before=1e11, max_alerts=3, series_seconds=500.0) == 3
    assert store.alert_ids() == {"aaaa0"}


def test_mutes_shapes_series_and_clusters(store):
    """Fails if what is written is not what is read."""
    with pytest.raises(ValueError, match="needs an endpoint, a path or a class"):
        store.add_mute(Mute(reason="all"))
    number = store.add_mute(Mute(endpoint="GET /", expires=100.0))
    store.count_muted(number, 3)
    assert store.mutes(99.0)[0].alerts == 3 and store.mutes(101.0) == []
    with pytest.raises(ValueError, match=f"no mute 7: the mutes are {number}"):
        store.delete_mute(7)
    store.delete_mute(number)

    shape = Shape("s1234", "", "GET /", [("a.b", "string")], ["c"], events=2, last_seen=3.0)
    store.add_shape_events(shape, ["u1", "u2"])
    store.add_shape_events(shape, ["u2", "u3"])
    (found,) = store.shapes("new")
    assert (found.events, found.entities, found.added) == (4, 3, [("a.b", "string")])
    assert store.accept_shape("s123") == "s1234" and store.shapes("new") == []

    point = SeriesPoint("", "all", "events", 60.0, 3.0, 1.0, 5.0)
    store.add_series([point, point._replace(value=4.0)])
    assert store.series("all") == [point._replace(value=4.0)]
    assert store.series_subjects() == [("", "all", ["events"])]
    place = ClusterPlace("", "u1", 1, 2, 0.5, -0.5, 30, 9.0)
    store.set_clusters([place])
    assert store.clusters() == [place]


def test_other_process_is_noticed(store, tmp_path):
    """Fails if `follow` does not see what the page has written."""
    before = store.change_count()
    store.set_fact("own", 1)
    assert store.change_count() == before
    other = WatchStore(tmp_path)
    other.add_mute(Mute(path="a"))
    other.close()
    assert store.change_count() != before and len(store.mutes()) == 1


# -------------------------------------------------------------------------------------- entities
def test_entities_spill_to_the_file(tmp_path):
    """Fails if a state is lost when it leaves the memory, or memory is not bounded."""
    database = Database(tmp_path / "a.db", create=True)
    states = EntityStore(database, capacity=10, initial={("", "old"): {"level": 7}})
    assert states["", "old"] == {"level": 7}
    for i in range(100):
        states["", f"u{i}"] = {"level": [i, "é\ud7ff", 0.1]}
        if i % 7 == 0:
            states.write()
            states.evict()
            assert len(states.memory) <= 10
    states.prefetch(("", f"u{i}") for i in range(200))
    assert all(states["", f"u{i}"]["level"][0] == i for i in range(100))
    assert ("", "u150") not in states and states.get(("", "u150")) is None
    states["", "u3"]["level"] = "changed in place"
    states.write()
    states.evict()
    assert EntityStore(database)["", "u3"] == {"level": "changed in place"}
    assert len(states) == 101
    states.max_stored = 40
    assert states.prune() == 61
    del states["", "u3"]
    assert ("", "u3") not in EntityStore(database)
    database.close()


def test_snapshot_of_entities(tmp_path):
    """Fails if a batch that failed leaves a trace in the states."""
    states = EntityStore(Database(tmp_path / "a.db", create=True))
    states["", "a"] = {"level": 1}
    before = states.snapshot([("", "a"), ("", "b")])
    states["", "a"]["level"] = 2
    states["", "b"] = {"level": 3}
    states.restore(before)
    assert states["", "a"] == {"level": 1} and ("", "b") not in states
    states.database.close()


def test_processed_ids(tmp_path):
    """Fails if an id that was committed is forgotten too early, or the list grows for ever."""
    database = Database(tmp_path / "a.db", create=True)
    processed = ProcessedIds(database, capacity=100)
    for start in range(0, 1000, 10):
        ids = [f"s:{i}" for i in range(start, start + 10)]
        assert ids[0] not in processed
        processed.write(ids)
        processed.remember(ids)
    for again in (processed, ProcessedIds(database, capacity=100)):
        assert all(f"s:{i}" in again for i in range(900, 1000))
        assert "s:700" not in again
    assert len(database.rows("SELECT 1 FROM processed")) <= 11
    database.close()


# ----------------------------------------------------------------------------------------- files
def test_damaged_and_foreign_files(tmp_path):
    """Fails if a damaged file, another program's or another version's is read, or raises anything
    but a sentence."""
    path = tmp_path / DATABASE_FILE
    with pytest.raises(ValueError, match=r"There is no .*watch.db: start `regard watch follow`"):
        WatchStore(tmp_path)
    store = WatchStore(tmp_path, create=True)
    store.add_alerts([make_entry(f"{i:05}") for i in range(300)])
    store.close()
    assert path.stat().st_mode & 0o077 == 0  # values of requests are nobody else's business
    whole = path.read_bytes()

    path.write_bytes(whole[:9000] + bytes(20_000) + whole[29_000:])
    with pytest.raises(ValueError, match="is damaged"):
        WatchStore(tmp_path, check=True)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        WatchStore(tmp_path, check=True)
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match=r"is damaged .*not a database"):
        WatchStore(tmp_path)
    path.write_bytes(whole)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="has version 99"):
        WatchStore(tmp_path)
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (a)")
    with pytest.raises(ValueError, match="database of another program"):
        WatchStore(tmp_path)


FILL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from regard.watch.follow.store import WatchStore
from test_watch_store import make_entry
store = WatchStore(Path(sys.argv[1]), create=True)
store.add_alerts([make_entry("before")])
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
try:
    store.add_alerts([make_entry(f"{{i:05}}", source="x" * 1000) for i in range(1000)])
except OSError as error:
    print("refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert store.alert_ids() == {{"before"}}
store.add_alerts([make_entry("after")])
assert store.alert_ids() == {{"before", "after"}}
"""


def test_full_disk(tmp_path):
    """Fails if a write that does not fit raises something else, leaves a part, or breaks the
    store."""
    code = FILL.format(tests=str(__file__).rpartition("/")[0])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
