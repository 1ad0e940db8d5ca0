"""Events of `regard watch`: limits, leaves, duplicate keys, formats, fields, dead letters."""

import base64
import importlib
import importlib.util
import json
import math
import shutil
import socket
import subprocess
import sys
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from real import real
from regard.watch.event import Signal
from regard.watch.events import (
    FORMATS,
    DeadLetters,
    EventParser,
    FieldExpression,
    UnknownFormat,
    read_events,
)
from regard.watch.events.duplicates import count_keys, find_duplicate_keys
from regard.watch.events.ids import endpoint_text, id_class
from regard.watch.events.leaves import MAX_NODES, count_parsed_keys
from regard.watch.events.times import parse_time
from regard.watch.settings import WatchSettings
from regard.watch.sources import Record

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "watch_parsing.py"


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/watch_parsing.py, which makes lines of each format and hostile lines."""
    spec = importlib.util.spec_from_file_location("watch_parsing", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(*lines, letters=None, **options):
    """The events of lines; fails if there are dead letters and none are expected."""
    expected = letters is not None
    letters = DeadLetters() if letters is None else letters
    options = {"format": "jsonl", **options}
    parser = EventParser(WatchSettings(**options), letters)
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    events = parser.parse([Record(item, f"a:{n}") for n, item in enumerate(data, 1)])
    assert expected or not letters.total, letters.counts
    return events


def leaves(line, **options):
    """Path -> value of one event; values of equal paths in a list."""
    (event,) = parse(line, **options)
    found = {}
    for path, value in zip(event.paths, event.values, strict=True):
        found.setdefault(path, []).append(value)
    return {path: values if path.endswith("[]") else values[0] for path, values in found.items()}


def kinds(line, **options):
    """Signals of one event but that of the time, as (kind, path)."""
    (event,) = parse(line, **options)
    return [tuple(signal) for signal in event.signals if signal.kind != "time_missing"]


# ---------------------------------------------------------------------------------------- leaves
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"a": {"b": 1, "c": None}, "d": True}, {"a.b": 1, "a.c": None, "d": True}),
        ({"a": [{"b": 1}, {"b": "x"}]}, {"a[].b": 1}),
        ({"a": [1, [2, 3]]}, {"a[]": [1], "a[][]": [2, 3]}),
        ({"a": {}, "b": []}, {"a": None, "b[]": [None]}),
        (
            {"d2719a3c-0b1e-4b5e-8f53-4d0d6a0b1d60": {"x": 1}, "b": {"17": 2, "a@b.org": 3}},
            {"{id}.x": 1, "b.{id}": 2, "b.{email}": 3},
        ),
        ({"x" * 65: 1, "": 2, "a b": 3, 'q"[': 4}, {"{other}": 1, '""': 2, "a b": 3, '"q\\"["': 4}),
        ({"body": '{"id": 7, "tags": ["a"]}'}, {"body.id": 7, "body.tags[]": ["a"]}),
        ({"body": "[not JSON]", "x": "{}"}, {"body": "[not JSON]", "x": "{}"}),
        ({"body": json.dumps({"in": json.dumps({"a": 1})})}, {"body.in.a": 1}),
        (
            {"url": "https://shop.example/orders/17/x?page=2&sort=a%20b&ref#end"},
            {
                **{"url": "/orders/17/x", "url.host": "shop.example", "url.ids[]": [17]},
                **{"url.query.page": 2, "url.query.sort": "a b", "url.query.ref": ""},
                "url.fragment": "end",
            },
        ),
        ({"path": "/etc/passwd", "url": "no url"}, {"path": "/etc/passwd", "url": "no url"}),
        ({"path": '/a?filter={"b":1}'}, {"path": "/a", "path.query.filter.b": 1}),
        (
            {"body": "user=anna&age=7&zip=007", "text": "a = b & c"},
            {"body.user": "anna", "body.age": 7, "body.zip": "007", "text": "a = b & c"},
        ),
        ({"Cookie": "id=1; theme=dark"}, {"Cookie.id": 1, "Cookie.theme": "dark"}),
        (
            {"request": "GET /a/1 HTTP/1.1"},
            {
                **{"request.method": "GET", "request.url": "/a/1", "request.url.ids[]": [1]},
                "request.protocol": "HTTP/1.1",
            },
        ),
    ],
)
def test_leaves(content, expected):
    """Fails if a value is lost, is at another path, or a path grows with ids."""
    found = leaves(content)
    if "a[].b" in expected:
        (event,) = parse(content)
        assert event.paths == ["a[].b"] * 2 and event.values == [1, "x"]
    else:
        assert found == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text('ab{[\\":', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("ab.", max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@hypothesis_settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["k", "m", "n.o"]), json_values, max_size=3))
def test_each_scalar_is_one_leaf(content):
    """Fails if the leaves are not the scalars of an object and its empty containers, in any mix of
    shapes that share a parser."""

    def scalars(value):
        if isinstance(value, dict | list) and value:
            inner = value.values() if isinstance(value, dict) else value
            return [leaf for item in inner for leaf in scalars(item)]
        if isinstance(value, str):
            try:
                parsed = json.loads(value)
            except ValueError:
                return [value]
            if isinstance(parsed, dict | list) and parsed:
                return scalars(parsed)
            return [value]
        return [None if isinstance(value, dict | list) else value]

    (event,) = SHARED.parse([Record(json.dumps(content).encode(), "a")])
    assert sorted(map(repr, event.values)) == sorted(map(repr, scalars(content)))
    assert len(event.paths) == len(event.values)


SHARED = EventParser(WatchSettings(format="jsonl"))


def test_ignored_paths():
    """Fails if an ignored path, or one beneath it, is a leaf, or its keys count as duplicates."""
    content = {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": [1], "f": "x"}
    assert leaves(content, ignore=("a.c", "e[]")) == {"a.b": 1, "f": "x"}
    assert kinds(content, ignore=("a",)) == []
    content = {"url": "http://h/3?a=1&b=2#c", "cookie": "s=1; t=2", "request": "GET /7 HTTP/1.1"}
    ignored = ("url.host", "url.ids", "url.query", "cookie.s", "request.url", "body.x")
    assert leaves({**content, "body": '{"x": {"y": 1}, "z": 2}'}, ignore=ignored) == {
        **{"url": "/3", "url.fragment": "c", "cookie.t": 2, "request.method": "GET"},
        **{"request.protocol": "HTTP/1.1", "body.z": 2},
    }


def test_limits():
    """Fails if a limit does not hold, or what is cut gives no signal."""
    assert kinds({"a": {"b": {"c": {"d": 1}}}}, max_depth=2) == [("too_deep", "a.b")]
    assert leaves({"a": {"b": {"c": 1}}, "d": 2}, max_depth=2) == {"a.b": "{...}", "d": 2}
    assert kinds({"a": list(range(9))}, max_leaves=5) == [("too_many_leaves", "a[]")]
    assert len(leaves({"a": list(range(9))}, max_leaves=5)["a[]"]) == 5
    assert kinds({"a": "x" * 30, "b": "y"}, max_string=16) == [("truncated_value", "a")]
    assert leaves({"a": "x" * 30}, max_string=16) == {"a": "x" * 16}
    letters = DeadLetters()
    assert parse({"a": "x" * 100}, max_bytes=64, letters=letters) == []
    assert letters.counts == {"longer than 64 bytes": 1}
    letters = DeadLetters()
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert parse(deep, letters=letters) == []
    assert list(letters.counts) == ["not JSON"]
    (event,) = parse(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}")
    assert event.values == ["[...]"]


# --------------------------------------------------------------------------------- duplicate keys
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a":1,"b":{"a":2},"c":[{"a":3},{"a":4}]}', []),
        ('{"a" : ":", "b" :"\\":", "c\\\\":1, "d\\"":2}', []),
        ('{"a":1,"a":2}', ["a"]),
        ('{"a":1,"a" :2}', ["a"]),
        ('{"a":":","b":{"x":1,"y":2,"x":[{"k":1,"k":2}]}}', ["b.x", "b.x[].k"]),
        ('{"user":1,"\\u0075ser":2}', ["user"]),
        ('{"\\ud83d\\ude00":1,"😀":2}', ['"😀"']),
        ('{"a\\\\":1,"a\\\\":2,"a\\"":3}', ['"a\\\\"']),
        ('{"body":"{\\"a\\":1,\\"a\\":2}"}', ["body"]),
        ('{"17":1,"18":2,"17":3}', ["{id}"]),
    ],
)
def test_duplicate_keys(text, found):
    """Fails if a key that occurs twice is missed, in any notation, or a key is taken for one."""
    assert kinds(text.encode()) == [("duplicate_key", path) for path in found]


@st.composite
def json_texts(draw, depth=3):
    """JSON texts with white space, escapes and duplicate keys."""
    space = st.sampled_from(["", " ", "\t", "\r"])
    plain = st.sampled_from(["a", "b", ":", '\\"', "\\\\", "\\u0061", "\\u003a", "é", '\\":', "{"])
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(["1", "null", '":"', '"\\\\"', '"{\\"a\\":1}"', "-2.5e3"]))
    items = []
    for _ in range(draw(st.integers(0, 4))):
        inner = draw(json_texts(depth - 1))
        items.append((draw(plain), draw(space), draw(space), inner))
    if draw(st.booleans()):
        return "[" + ",".join(f"{a}{inner}{b}" for _, a, b, inner in items) + "]"
    return "{" + ",".join(f'{a}"{key}"{b}:{a}{inner}' for key, a, b, inner in items) + "}"


@hypothesis_settings(max_examples=300, deadline=None)
@given(json_texts())
def test_duplicate_keys_against_json(text):
    """Fails if the count of keys, or the keys that occur twice, differ from what Python's parser
    sees."""
    twice, total = [], 0

    def pairs(items):
        nonlocal total
        total += len(items)
        seen = set()
        twice.extend(key for key, _ in items if key in seen or seen.add(key))
        return dict(items)

    parsed = json.loads(text, object_pairs_hook=pairs)
    assert count_keys(text.encode()) == total
    assert sorted(path[-1] for path in find_duplicate_keys(text.encode())) == sorted(twice)
    assert (total != count_parsed_keys(parsed)) >= 0
    if twice:
        assert total > count_parsed_keys(json.loads(text))


# ---------------------------------------------------------------------------------- odd JSON texts
@pytest.mark.parametrize(
    ("line", "values", "signal"),
    [
        (b'{"a":"\xff\xc0\xaf"}', ["\ufffd\ufffd\ufffd"], "invalid_utf8"),
        (
            b'{"a":"x\\ud800","b":"\\ud83d\\ude00\\\\ud800"}',
            ["x\ufffd", "😀\\ud800"],
            "lone_surrogate",
        ),
        (b'{"a":NaN,"b":"NaN","c":-Infinity}', [None, "NaN", None], "not_finite"),
        (b'{"a":1e400,"b":[2,-1e999]}', [None, 2, None], "not_finite"),
        (b'{"a":123456789012345678901234567890}', [1.2345678901234568e29], None),
        (b'\xef\xbb\xbf{"a":1}\r\n', [1], None),
        (b'\x00\x00{"a":1}\x00', [1], None),
    ],
)
def test_repaired_json(line, values, signal):
    """Fails if what lenient parsers read is lost, changes another value, or gives no signal."""
    (event,) = parse(line)
    assert event.values == values
    assert [kind for kind, _ in event.signals if kind != "time_missing"] == (
        [signal] if signal else []
    )
    assert all(math.isfinite(v) for v in event.values if isinstance(v, float))


def test_missing_package(monkeypatch):
    """Fails if an installation without orjson is not told what to install."""
    for name in [name for name in sys.modules if name.startswith("regard.watch.events")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "orjson", None)
    with pytest.raises(ImportError, match=r"package orjson: pip install 'regard\[watch\]'"):
        importlib.import_module("regard.watch.events")


def test_several_events_on_a_line():
    """Fails if one of several texts or elements is lost, or two events have the same source."""
    letters = DeadLetters()
    events = parse(
        b'{"a":1}{"a":2}\x00',
        b'[{"a":3},{"a":4}, 5]',
        b'{"Records":[{"a":6},{"a":7}]}',
        b"",
        b"  \r\n",
        letters=letters,
    )
    assert [event.values[0] for event in events] == [1, 2, 3, 4, 6, 7]
    assert [event.source for event in events] == [
        "a:1#0",
        "a:1#1",
        "a:2#0",
        "a:2#1",
        "a:3#0",
        "a:3#1",
    ]
    assert letters.counts == {"not a JSON object": 1}


def test_dead_letters(tmp_path):
    """Fails if a bad line is lost, its reason or its bytes are not in the file, or blank lines are
    counted."""
    letters = DeadLetters(tmp_path / "dead" / "letters.jsonl")
    bad = [
        b"not json",
        b'{"a":"\x01"}',
        b"\xff\xfe\x00",
        b'["x"]',
        b"3",
        b"{" + b"\xc3\xa9" * 4_096,
    ]
    parse(*bad, b" ", {"ok": 1}, letters=letters)
    letters.close()
    rows = [json.loads(line) for line in (tmp_path / "dead/letters.jsonl").read_text().splitlines()]
    assert letters.total == len(rows) == len(bad)
    assert [row["source"].partition("#")[0] for row in rows] == [f"a:{n}" for n in range(1, 7)]
    assert all(row["reason"] for row in rows)
    assert rows[0]["text"] == "not json" and rows[0]["reason"].startswith("not JSON: ")
    assert base64.b64decode(rows[2]["base64"]) == bad[2]
    assert rows[5]["bytes"] == len(bad[5]) and len(rows[5]["text"].encode()) in (4_095, 4_096)
    assert letters.summary().startswith("6 records could not be parsed (")
    assert str(tmp_path) in letters.summary()


# ------------------------------------------------------------------------------------------ fields
@pytest.mark.parametrize(
    ("expression", "content", "value"),
    [
        ("user.name", {"user": {"name": "anna"}}, "anna"),
        ("user.name", {"user.name": "anna"}, "anna"),
        ("a.b.c", {"a": {"b.c": 1}}, 1),
        ("a.b.c", {"a.b": {"c": 0}}, 0),
        ("a b", {"a": "x", "b": 3}, "x 3"),
        ("a b|c", {"a": "x", "c": "y"}, "y"),
        ("a|b", {"a": None, "b": False}, False),
        ("items.id", {"items": [{"id": 4}, {"id": 5}]}, 4),
        ("items.1.id", {"items": [{"id": 4}, {"id": 5}]}, 5),
        ("items.2.id", {"items": []}, None),
        ("a.b", {"a": "text"}, None),
    ],
)
def test_field_expressions(expression, content, value):
    """Fails if a path, a join or an alternative finds another value."""
    read = FieldExpression(expression)
    assert read(content) == value
    assert read({}) is None and read(content) == value


def test_field_settings():
    """Fails if a field of the settings is ignored, or a wrong one gives no clear error."""
    line = {"who": {"id": 7}, "m": "GET", "p": "/a/3?x=1", "when": 1_790_000_000, "org": "acme"}
    (event,) = parse(line, entity="who.id", endpoint="m p", time="when", tenant="org")
    assert (event.entity, event.endpoint, event.time, event.tenant) == (
        *("7", "GET /a/{id}", 1_790_000_000.0),
        "acme",
    )
    assert event.signals == ()
    before = time.time()
    (event,) = parse(line, time="never")
    assert before <= event.time <= time.time()
    assert event.signals == (Signal("time_missing", ""),)
    with pytest.raises(ValueError, match="has an empty alternative"):
        FieldExpression("a||b")


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("/orders/17/items/9f8c1e77", "/orders/{id}/items/{id}"),
        ("/v2/users/anna@example.org?x=/9", "/v2/users/{email}"),
        ("https://host/a/2026-04-15/10.0.0.1#f", "/a/{date}/{ip}"),
        ("/api/d2719a3c-0b1e-4b5e-8f53-4d0d6a0b1d60/", "/api/{id}/"),
        ("/files/../../../etc/passwd", "/files/{other}/etc/passwd"),
        ("/a/%2e%2e%2f/<script>/x", "/a/{other}/x"),
        ("/" + "/".join(["a"] * 99), "/" + "/".join(["a"] * 11) + "/..."),
        ("/s3/AKIATFQR7NSCUXC3DDDP/i-0a1b2c3d4e", "/s3/{id}/{id}"),
        ("order.paid", "order.paid"),
        ("4688", "4688"),
        ("\x16\x03\x01 \x00", "{other}"),
        ("/users/{id}/<int:page>/:name", "/users/{id}/<int:page>/:name"),
    ],
)
def test_endpoints(text, endpoint):
    """Fails if an id makes an endpoint of its own, or a name is taken for an id."""
    assert endpoint_text(text) == endpoint


def test_id_classes():
    """Fails if a name of a field is taken for an id, or an id for a name."""
    names = "user user_id v2 utf8 sha256 x-amz-id-2 line1 eventTime address2 s3 us-east-1 deadbeef"
    assert [name for name in names.split() if id_class(name)] == []
    ids = "17 -3 ORD-1234 user_17 0x1f2e3d4c5b 550e8400-e29b-41d4-a716-446655440000 i-0a1b2c3d"
    assert [text for text in ids.split() if id_class(text) != "{id}"] == []
    started = time.process_time()
    for text in ("a1" * 128, "1" * 255 + "!", "a" * 250 + "1b2", ":" * 250, "@." * 128):
        id_class(text)
    assert time.process_time() - started < 1  # no pattern backtracks without end


NOON = datetime(2026, 4, 15, 12, 0, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2026-04-15T12:00:00Z", NOON),
        ("2026-04-15T14:00:00.250+02:00", NOON + 0.25),
        ("2026-04-15 12:00:00,5", NOON + 0.5),
        ("2026-04-15T12:00:00.123456789Z", NOON + 0.123456),
        ("15/Apr/2026:05:00:00 -0700", NOON),
        ("Wed, 15 Apr 2026 12:00:00 GMT", NOON),
        *((int(NOON) * unit, NOON) for unit in (1, 10**3, 10**6, 10**9)),
        (str(int(NOON) * 10**9), NOON),
        (f"{NOON:.3f}", NOON),
        *((value, None) for value in ("", "soon", "99999999", "0001-01-01", "9" * 99, True, None)),
        *((value, None) for value in (-1, 0, 1e300, float("nan"), {}, [])),
    ],
)
def test_times(value, seconds):
    """Fails if a notation of time is read wrongly, or what is no time is taken for one."""
    assert parse_time(value) == (None if seconds is None else pytest.approx(seconds, abs=1e-5))


# ----------------------------------------------------------------------------------------- formats
HAR = {
    "log": {
        "version": "1.2",
        "pages": [{"id": "p", "pageTimings": {}}],
        "entries": [
            {
                "startedDateTime": "2026-04-15T12:00:00Z",
                "request": {
                    "method": "POST",
                    "url": "https://shop.example/cart/7?x=1",
                    "headers": [
                        {"name": "X-User-Id", "value": "anna"},
                        {"name": "Accept", "value": "a"},
                        {"name": "accept", "value": "b"},
                    ],
                    "queryString": [{"name": "x", "value": "1"}],
                    "postData": {"mimeType": "application/json", "text": '{"qty": 2}'},
                },
                "response": {"status": 201, "headers": [], "content": {"text": "ok"}},
            }
        ],
    }
}
OTLP = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]},
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "name": "GET /cart/{id}",
                            "startTimeUnixNano": str(int(NOON) * 10**9),
                            "attributes": [
                                {"key": "http.request.method", "value": {"stringValue": "GET"}},
                                {"key": "http.route", "value": {"stringValue": "/cart/{id}"}},
                                {"key": "user.id", "value": {"intValue": "7"}},
                                {
                                    "key": "tags",
                                    "value": {"arrayValue": {"values": [{"boolValue": True}]}},
                                },
                            ],
                        }
                    ]
                }
            ],
        }
    ]
}
SAMPLES = {
    "jsonl": (
        {"timestamp": NOON, "user": "anna", "method": "GET", "path": "/cart/7", "status": 200},
        ("anna", "GET /cart/{id}"),
        {"path": "/cart/7", "status": 200},
    ),
    "cloudtrail": (
        {
            "eventVersion": "1.08",
            "userIdentity": {"arn": "arn:aws:iam::1:user/anna"},
            "eventTime": "2026-04-15T12:00:00Z",
            "eventSource": "s3.amazonaws.com",
            "eventName": "GetObject",
        },
        ("arn:aws:iam::1:user/anna", "s3.amazonaws.com GetObject"),
        {"eventVersion": "1.08"},
    ),
    "har": (
        HAR,
        ("anna", "POST /cart/{id}"),
        {
            **{"request.url": "/cart/7", "request.url.query.x": 1, "response.status": 201},
            **{"request.headers.accept[]": ["a", "b"], "request.postData.text.qty": 2},
        },
    ),
    "otlp": (
        OTLP,
        ("7", "GET /cart/{id}"),
        {"resource.service.name": "shop", "attributes.user.id": 7, "attributes.tags[]": [True]},
    ),
    "ecs": (
        {
            "@timestamp": "2026-04-15T12:00:00Z",
            "event": {"action": "login"},
            "user.name": "anna",
            "http": {"request.method": "GET"},
            "url": {"path": "/cart/7", "query": "x=1"},
        },
        ("anna", "GET /cart/{id}"),
        {"url.path": "/cart/7", "url.query.x": 1},
    ),
    "ocsf": (
        {
            **{"class_uid": 6003, "category_uid": 6, "time": int(NOON) * 1_000},
            "actor": {"user": {"name": "anna"}},
            "api": {"operation": "GetObject", "service": {"name": "s3"}},
        },
        ("anna", "s3 GetObject"),
        {"class_uid": 6003},
    ),
    "zeek": (
        {
            **{"ts": NOON, "uid": "CaB3x", "id.orig_h": "192.0.2.7", "id.resp_p": 80},
            **{"method": "GET", "uri": "/cart/7?x=1", "status_code": 200},
        },
        ("192.0.2.7", "GET /cart/{id}"),
        {"uri": "/cart/7", "uri.query.x": 1},
    ),
    "access": (
        b"shop.example 192.0.2.7 - anna [15/Apr/2026:12:00:00 +0000] "
        b'"GET /cart/7?q=\\x22a HTTP/1.1" 200 0 "-" "curl/8 \\"x\\"" "10.0.0.1" 0.012',
        ("anna", "GET /cart/{id}"),
        {
            **{"url": "/cart/7", "url.query.q": '"a', "status": 200, "http_referer": None},
            **{"http_user_agent": 'curl/8 "x"', "extra1": "10.0.0.1", "extra2": 0.012},
        },
    ),
    "envoy": (
        b'[2026-04-15T12:00:00.000Z] "GET /cart/7 HTTP/2" 204 - 154 0 226 100 "10.0.35.28" "curl/8"'
        b' "cc21d9b0-cf5c-432b-8c7e-98aeb7988cd2" "shop" "10.0.2.1:80"',
        ("10.0.35.28", "GET /cart/{id}"),
        {"response_code": 204, "response_flags": None, "duration": 226, "authority": "shop"},
    ),
}


def test_every_format_has_a_sample():
    """Fails if a format is added without a test."""
    assert set(SAMPLES) == set(FORMATS)


@pytest.mark.parametrize("name", SAMPLES)
def test_formats(name):
    """Fails if a format is not told from the others, or its fields are read wrongly."""
    line, (entity, endpoint), expected = SAMPLES[name]
    found = []
    parser = EventParser(WatchSettings(), on_format=found.append)
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    (event,) = parser.parse([Record(b"\n", "a:1"), Record(data, "a:2")])
    assert parser.format.name == name and found == [FORMATS[name]]
    assert (event.entity, event.endpoint, event.time) == (entity, endpoint, NOON)
    assert event.signals == ()
    assert leaves(line, format=name).items() >= expected.items()
    assert parse(line, format=name)[0].paths == event.paths


def test_common_logs_and_garbage_requests():
    """Fails if a common log line, a request that is no HTTP or an Istio line is not read, or an
    endpoint is made of garbage."""
    events = parse(
        b'::1 - - [15/Apr/2026:12:00:00 +0000] "GET / HTTP/1.0" 304 -',
        rb'192.0.2.9 - - [15/Apr/2026:12:00:00 +0000] "\x16\x03\x01\x00\xEE" 400 157 "-" "-"',
        b'192.0.2.9 - - [15/Apr/2026:12:00:00 +0000] "" 400 0 "-" "-"',
        b'192.0.2.9 - a b [15/Apr/2026:12:00:00 +0000] "GET /\xff HTTP/1.1" 400 0 "-" "-"',
        format="access",
    )
    assert [event.endpoint for event in events] == ["GET /", "{other}", "", "GET /{other}"]
    assert [event.entity for event in events] == ["::1", "192.0.2.9", "192.0.2.9", "a b"]
    assert "invalid_utf8" in [signal.kind for signal in events[3].signals]
    istio = (
        b'[2026-04-15T12:00:00.000Z] "GET /status/418 HTTP/1.1" 418 - via_upstream - "-" 0 135 5 4'
        b' "-" "curl/8" "84961386-6d84-929d-98bd-c5aee93b5c88" "httpbin:8000" "127.0.0.1:80"'
        b" inbound|8000|| 127.0.0.1:41854 10.44.1.27:80 10.44.1.23:37652 - default"
    )
    (event,) = parse(istio, format="envoy")
    assert dict(zip(event.paths, event.values, strict=True))["route_name"] == "default"
    assert event.entity == "10.44.1.23:37652"


def test_unknown_formats():
    """Fails if a format that cannot be told, or an unknown name, gives no list to choose from."""
    with pytest.raises(UnknownFormat, match=r"starts with 'Apr 15 12:00:00.*--format: cloudtrail"):
        EventParser(WatchSettings()).parse([Record(b"Apr 15 12:00:00 host sshd[1]: x", "a:1")])
    with pytest.raises(UnknownFormat, match="no format 'cloudtrial'; did you mean 'cloudtrail'"):
        EventParser(WatchSettings(format="cloudtrial"))


def test_format_is_found_after_blank_and_overlong_records():
    """Fails if records that tell nothing stop the search for the format, or are lost."""
    letters = DeadLetters()
    parser = EventParser(WatchSettings(), letters)
    assert parser.parse([Record(b" ", "a:1"), Record(b'{"a', "a:2", "longer than 9 bytes")]) == []
    assert parser.format is None and letters.total == 1
    blank = [Record(b"", f"a:{n}") for n in range(200)]
    (event,) = parser.parse([*blank, Record(b'{"user":"anna"}', "b:1")])
    assert event.entity == "anna" and letters.total == 1


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.data())
def test_formats_take_anything(data):
    """Fails if an object with any part replaced by any JSON raises, or is neither an event nor a
    dead letter."""
    name = data.draw(st.sampled_from(["har", "otlp", "ecs", "ocsf", "zeek", "cloudtrail", "jsonl"]))
    content = json.loads(json.dumps(SAMPLES[name][0]))
    node, key = {"x": content}, "x"
    while isinstance(node[key], dict | list) and node[key] and data.draw(st.integers(0, 9)):
        node = node[key]
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
    node[key] = data.draw(json_values)
    parser = EventParser(WatchSettings(format=name))
    parser.parse([Record(json.dumps(content).encode(), "a:1")])


# -------------------------------------------------------------------------------- hostile and real
def test_hostile_lines(benchmark, tmp_path):
    """Fails if a hostile line raises, gives neither an event nor a dead letter, leaves a value that
    is not finite, or memory grows with the input. benchmarks/watch_parsing.py takes 10⁶ lines."""
    parser = EventParser(WatchSettings(format="jsonl"), DeadLetters(tmp_path / "dead.jsonl"))
    tracemalloc.start()
    for number, line in enumerate(benchmark.hostile_lines(1_500, 1, long_every=750)):
        problem = "longer" if len(line) > 1_000_000 else ""
        record = Record(line[:4_096] if problem else line, f"a:{number}", problem)
        before = parser.dead_letters.total
        events = parser.parse([record])
        assert events or parser.dead_letters.total > before or line in (b"[]", b""), line[:200]
        for event in events:
            assert math.isfinite(event.time)
            assert len(event.paths) == len(event.values) <= 1_024
            assert all(math.isfinite(v) for v in event.values if isinstance(v, float))
            assert len(event.endpoint) <= 512 and len(event.entity) <= 512
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6
    assert parser.flattener.nodes < MAX_NODES + 20_000


def test_caches_are_bounded():
    """Fails if keys that never repeat make the parser grow without end."""
    parser = EventParser(WatchSettings(format="jsonl"))
    digits = str.maketrans("0123456789", "abcdefghij")
    for start in range(0, 130_000, 1_000):
        content = {str(n).translate(digits): 1 for n in range(start, start + 1_000)}
        parser.parse([Record(json.dumps(content).encode(), "a")])
        assert parser.flattener.nodes <= MAX_NODES + 2_001
        assert len(parser.entity.possible) <= 1_000


@pytest.mark.parametrize(
    ("name", "format_name", "number", "per_event"),
    [
        ("api-security-atrdf", "jsonl", 4_282, 60),
        ("aws-cloudtrail-stratus", "cloudtrail", 2_900, 29),
        ("mordor", "jsonl", 9_211, 20),
    ],
)
def test_real_events(name, format_name, number, per_event):
    """Fails if an event of a real data set is lost, or its fields are not found."""
    found, letters, events = [], DeadLetters(), []
    for path in sorted((real(name) / name).glob("*.jsonl.xz")):
        if "val" not in path.name:
            events += read_events(
                path, WatchSettings(), dead_letters=letters, on_format=found.append
            )
    assert len(events) == number and not letters.total
    assert {known.name for known in found} == {format_name}
    assert sum(len(event.paths) for event in events) / number > per_event
    assert all(event.endpoint for event in events)
    assert not any(signal.kind == "time_missing" for event in events for signal in event.signals)
    assert len({event.endpoint for event in events}) < number / 8
    paths = {path for event in events for path in event.paths}
    assert len(paths) < number / 2 and not any(id_class(path.rpartition(".")[2]) for path in paths)


def test_real_nginx(tmp_path):
    """Fails if a line that nginx itself writes, for ordinary or hostile requests, is not read."""
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is None:
        pytest.skip("nginx is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    temporary = " ".join(
        f"{kind}_temp_path {tmp_path}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}} http {{ "
        f'{temporary} log_format timed \'$remote_addr - $remote_user [$time_local] "$request" '
        '$status $body_bytes_sent "$http_referer" "$http_user_agent" "$http_x_forwarded_for" '
        f"$request_time'; access_log {tmp_path}/combined.log; access_log {tmp_path}/timed.log "
        f"timed; server {{ listen 127.0.0.1:{port}; return 200 'ok'; }} }}"
    )
    server = subprocess.Popen([nginx, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)])
    token = base64.b64encode(b"anna:x").decode()
    requests = [
        b'GET /cart/7?x=1 HTTP/1.1\r\nUser-Agent: a "quoted" \\ agent',
        b"POST /login HTTP/1.1\r\nReferer: https://shop.example/?a=b",
        f"GET / HTTP/1.1\r\nAuthorization: Basic {token}".encode(),
        b"GET /%2e%2e/%00?q=<script>'\"\xc3\xa9 HTTP/1.1\r\nUser-Agent: \xff\xfe\t[x]",
        b"GET /a b HTTP/1.1",
        b"\x16\x03\x01\x02\x00",
        b"GET /" + b"a" * 5_000 + b" HTTP/1.1",
    ]
    try:
        for request in requests:
            for attempt in range(100):
                try:
                    client = socket.create_connection(("127.0.0.1", port), timeout=5)
                    break
                except OSError:
                    assert attempt < 99
                    time.sleep(0.05)
            with client:
                client.sendall(request + b"\r\nHost: shop\r\nConnection: close\r\n\r\n")
                while client.recv(65_536):
                    pass
    finally:
        server.terminate()
        server.wait()
    for name in ("combined.log", "timed.log"):
        letters, found = DeadLetters(), []
        events = list(
            read_events(
                tmp_path / name, WatchSettings(), dead_letters=letters, on_format=found.append
            )
        )
        assert len(events) == len(requests) and not letters.total, letters.counts
        assert found == [FORMATS["access"]]
        assert {"GET /cart/{id}", "POST /login", "GET /"} <= {event.endpoint for event in events}
        assert "anna" in {event.entity for event in events}
        agents = [dict(zip(e.paths, e.values, strict=True)).get("http_user_agent") for e in events]
        assert 'a "quoted" \\ agent' in agents
