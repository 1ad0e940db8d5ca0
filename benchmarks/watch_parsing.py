"""How fast `regard watch` reads events, and what hostile lines do to it.

    python benchmarks/watch_parsing.py                      about five minutes on a free core
    python benchmarks/watch_parsing.py --lines 10000        fewer hostile lines

Speed: 5,000 events of each format through `EventParser`, in CPU time, one thread: from bytes to
paths, values, entity, endpoint and time, with the scan for duplicate keys. `orjson` is
`orjson.loads` alone on the same lines; the two take turns, and the best of seven is kept. The
CloudTrail events have 29 leaves.

Hostile lines: another process writes them into a pipe, and `PipeSource` and `EventParser` read
them, with a file of dead letters. Each line must give events or a dead letter. Peak memory is that
of the reading process.

Results go to benchmarks/results/watch_parsing.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from regard.json_files import write_json
from regard.watch.events import DeadLetters, EventParser
from regard.watch.settings import WatchSettings
from regard.watch.sources import Record
from regard.watch.sources.pipe import PipeSource

OUT = Path(__file__).parent / "results" / "watch_parsing.json"
EVENTS, TURNS = 5_000, 7
LONG_STRING = 10_000_000
DEEP = 100_000


def cloudtrail_event(rng: random.Random) -> dict[str, Any]:
    """An event with 29 leaves, shaped as those of AWS CloudTrail."""
    user = rng.choice(["anna", "ben", "carla", "deploy", "backup"])
    service = rng.choice(["s3", "ec2", "iam", "kms", "lambda"])
    name = rng.choice(["Get", "List", "Describe", "Put"]) + rng.choice(["Bucket", "Key", "Role"])
    bucket = f"{user}-{rng.randrange(40)}-logs"
    return {
        "eventVersion": "1.08",
        "userIdentity": {
            "type": "IAMUser",
            "principalId": f"AIDA{rng.randrange(10**12):016d}",
            "arn": f"arn:aws:iam::123456789012:user/{user}",
            "accountId": "123456789012",
            "accessKeyId": f"AKIA{rng.randrange(10**12):016d}",
            "userName": user,
        },
        "eventTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(rng.randrange(10**9))),
        "eventSource": f"{service}.amazonaws.com",
        "eventName": name,
        "awsRegion": rng.choice(["us-east-1", "eu-central-1"]),
        "sourceIPAddress": f"10.{rng.randrange(256)}.{rng.randrange(256)}.7",
        "userAgent": "[Boto3/1.26.165 Python/3.10.6 Linux/5.19.0-46-generic Botocore/1.29.165]",
        "requestParameters": {"bucketName": bucket, "Host": f"{bucket}.s3.amazonaws.com"},
        "responseElements": None,
        "additionalEventData": {
            "SignatureVersion": "SigV4",
            "CipherSuite": "ECDHE-RSA-AES128-GCM-SHA256",
            "bytesTransferredIn": 0,
            "x-amz-id-2": f"{rng.randrange(10**40):x}",
            "bytesTransferredOut": rng.randrange(1000),
        },
        "requestID": f"{rng.randrange(16**16):016X}",
        "eventID": str(random_uuid(rng)),
        "readOnly": True,
        "eventType": "AwsApiCall",
        "managementEvent": True,
        "recipientAccountId": "123456789012",
        "resources": [{"type": "AWS::S3::Bucket", "ARN": f"arn:aws:s3:::{bucket}"}],
    }


def random_uuid(rng: random.Random) -> str:
    """A UUID of seeded random digits."""
    digits = f"{rng.randrange(16**32):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def request_line(rng: random.Random) -> str:
    """A request of a shop, with ids and a query."""
    path = rng.choice(["/orders", "/items", "/users"])
    return f"GET {path}/{rng.randrange(10**6)}?page={rng.randrange(9)}&sort=price HTTP/1.1"


def access_line(rng: random.Random) -> str:
    """A line of nginx's combined log."""
    size, address = rng.randrange(9_999), rng.randrange(256)
    return (
        f'192.0.2.{address} - anna [10/Oct/2026:13:55:36 +0000] "{request_line(rng)}" 200 {size} '
        '"https://shop.example/start" "Mozilla/5.0 (X11; Linux x86_64; rv:109.0) Firefox/115.0"'
    )


def envoy_line(rng: random.Random) -> str:
    """A line of Envoy's default log."""
    return (
        f'[2026-04-15T20:17:00.310Z] "{request_line(rng)}" 200 - 154 0 {rng.randrange(300)} 100 '
        f'"10.0.35.{rng.randrange(256)}" "curl/8.0" "{random_uuid(rng)}" "shop" "10.0.2.1:80"'
    )


def har_entry(rng: random.Random) -> dict[str, Any]:
    """An entry of a HAR file."""
    method, url, version = request_line(rng).split(" ")
    headers = {"Host": "shop.example", "Accept": "application/json", "User-Agent": "Firefox/115.0"}
    listed = [{"name": name, "value": value} for name, value in headers.items()]
    content = json.dumps({"id": rng.randrange(10**6), "price": 3.5, "tags": ["a", "b"]})
    return {
        "startedDateTime": "2026-04-15T20:17:00.310Z",
        "time": rng.randrange(300),
        "request": {
            **{"method": method, "url": f"https://shop.example{url}", "httpVersion": version},
            **{"headers": listed, "queryString": [], "cookies": [], "headersSize": -1},
        },
        "response": {
            **{"status": 200, "headers": listed, "cookies": [], "redirectURL": ""},
            "content": {"size": len(content), "mimeType": "application/json", "text": content},
        },
        "timings": {"send": 1, "wait": rng.randrange(99), "receive": 2},
    }


def otlp_export(rng: random.Random) -> dict[str, Any]:
    """An export of ten spans."""

    def attributes(**values: object) -> list[dict[str, Any]]:
        return [
            {"key": key.replace("_", "."), "value": {"stringValue": str(value)}}
            for key, value in values.items()
        ]

    spans = [
        {
            **{"traceId": f"{rng.randrange(16**32):032x}", "spanId": f"{rng.randrange(16**16):x}"},
            **{"name": "GET /orders/{id}", "kind": 2, "startTimeUnixNano": "1790000000000000000"},
            "endTimeUnixNano": "1790000000000500000",
            "attributes": attributes(
                **{"http_request_method": "GET", "http_route": "/orders/{id}", "user_id": "anna"},
                url_path=f"/orders/{rng.randrange(10**6)}",
            ),
            "status": {},
        }
        for _ in range(10)
    ]
    resource_of = {"attributes": attributes(service_name="shop")}
    return {"resourceSpans": [{"resource": resource_of, "scopeSpans": [{"spans": spans}]}]}


def ecs_document(rng: random.Random) -> dict[str, Any]:
    """A document of the Elastic Common Schema."""
    return {
        "@timestamp": "2026-04-15T20:17:00.310Z",
        "ecs": {"version": "8.11.0"},
        "event": {"action": "login", "category": ["authentication"], "outcome": "success"},
        "user": {"name": rng.choice(["anna", "ben"]), "id": str(rng.randrange(99))},
        "source": {"ip": f"192.0.2.{rng.randrange(256)}", "port": rng.randrange(65_536)},
        "http": {"request": {"method": "POST"}, "response": {"status_code": 200}},
        "url": {"path": f"/login/{rng.randrange(10**6)}", "domain": "shop.example"},
    }


def json_line(make: Callable[[random.Random], Any]) -> Callable[[random.Random], str]:
    """Makes compact JSON of what a function makes."""
    return lambda rng: json.dumps(make(rng), separators=(",", ":"))


LINES: dict[str, Callable[[random.Random], str]] = {
    "cloudtrail": json_line(cloudtrail_event),
    "jsonl": json_line(cloudtrail_event),
    "har": json_line(har_entry),
    "otlp": json_line(otlp_export),
    "ecs": json_line(ecs_document),
    "access": access_line,
    "envoy": envoy_line,
}


# ----------------------------------------------------------------------------------------- hostile
def hostile_lines(number: int, seed: int, long_every: int = 20_000) -> Iterator[bytes]:
    """Lines that a parser may stumble over, without their line feeds.

    Args:
        number: How many.
        seed: Seed of the random choices.
        long_every: Every so many lines one has a string of 10 MB, and one is nested 10⁵ deep.
    """
    rng = random.Random(seed)
    base = json.dumps(cloudtrail_event(rng), separators=(",", ":")).encode()
    embedded = json.dumps({"body": json.dumps({"body": json.dumps({"a": 1, "b": [1, {}]})})})
    fixed = [
        b'{"user":"a","user":"b","\\u0075ser":"c"}',
        b'{"a":{"b":1,"b":{"c":2,"c":3}},"a":4}',
        b'{"a":"\xff\xfe","b":"\xc0\xaf"}',
        b'{"a":"\\ud800","b":"\\ude00\\ud83d"}',
        b'{"a":NaN,"b":-Infinity,"c":[Infinity]}',
        b'{"a":1e400,"b":-1e999,"c":123456789012345678901234567890}',
        b'\xef\xbb\xbf{"bom":true}\r',
        b'\x00{"nul":1}\x00\x00',
        b'{"a":"\x00\x01"}',
        b'{"a":1}{"b":2} {"c":3}',
        b'[{"a":1},{"b":[2,{"c":[[]]}]},7]',
        b'{"Records":[{"eventName":1,"eventSource":[],"eventVersion":{}},3]}',
        b'{"log":{"entries":[{"startedDateTime":3,"request":{"url":7,"headers":"x"}}]}}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"attributes":{"a":1}},4]}]}]}',
        embedded.encode(),
        b'{"time":{"a":1},"user":["x"],"method":{},"path":[1]}',
        b'{"time":"9999999999999999999999","ts":-1,"user":null}',
        b'{"url":"/a?' + b"&".join(b"x=%d" % i for i in range(2_000)) + b'"}',
        b'{"url":"http://[::1]:99999/%ff%fe/../../x?a=%zz&a[]=1#?"}',
        b'{"cookie":"a=1; a=2; =; ;;b"}',
        b'"text"',
        b"17",
        b"null",
        b"[]]",
        b"}{",
        b'{"a":',
        b'{"a":1]',
        b'{"":{"":{"":1}}}',
        b'{"a.b":1,"a":{"b":2},"{id}":3,"[]":4,"a[]":[5]}',
    ]
    makers: list[Callable[[], bytes]] = [
        lambda: rng.choice(fixed),
        lambda: mutated(base, rng),
        lambda: rng.randbytes(rng.randrange(1, 400)).replace(b"\n", b"-"),
        lambda: base[: rng.randrange(1, len(base))],
        lambda: b'{"%s":{"%d":1}}' % (random_uuid(rng).encode(), rng.randrange(10**9)),
        lambda: b'{"%s":1}' % bytes(rng.choices(range(97, 123), k=rng.choice([3, 9, 300]))),
        lambda: b'{"s":"' + b"x" * rng.randrange(20_000) + b'"}',
    ]
    for index in range(number):
        if index % long_every == long_every // 3:
            yield b'{"a":"' + b"x" * LONG_STRING + b'"}'
        elif index % long_every == long_every // 2:
            yield rng.choice([b'{"a":', b"["]) * DEEP
        elif index % 1_000 == 999:
            yield b"{" + b",".join(b'"k%d":%d' % (i, i) for i in range(10_000)) + b"}"
        elif index % 1_000 == 499:
            yield b'{"a":' * 900 + b"1" + b"}" * 900
        else:
            yield rng.choice(makers)()


def mutated(text: bytes, rng: random.Random) -> bytes:
    """A text with some bytes changed, removed or doubled."""
    changed = bytearray(text)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(changed))
        what = rng.randrange(3)
        if what == 0:
            changed[place] = rng.choice(b'{}[]",:\\\x00\xff09ae')
        elif what == 1:
            del changed[place : place + rng.randrange(1, 20)]
        else:
            changed[place:place] = changed[place : place + rng.randrange(1, 40)]
    return bytes(changed).replace(b"\n", b" ") or b"?"


# ----------------------------------------------------------------------------------------- measure
def measure_format(name: str, make: Callable[[random.Random], str]) -> dict[str, Any]:
    """Events per second of CPU time for one format."""
    rng = random.Random(0)
    lines = [make(rng).encode() for _ in range(EVENTS)]
    records = [Record(line, f"a:{number}") for number, line in enumerate(lines)]
    parser = EventParser(WatchSettings(format=name))
    events = parser.parse(records)
    best = {"parse": float("inf"), "orjson": float("inf")}
    for _ in range(TURNS):
        started = time.process_time()
        parser.parse(records)
        best["parse"] = min(best["parse"], time.process_time() - started)
        if lines[0][:1] == b"{":
            started = time.process_time()
            for line in lines:
                orjson.loads(line)
            best["orjson"] = min(best["orjson"], time.process_time() - started)
    row = {
        "format": name,
        "bytes": sum(map(len, lines)) / len(events),
        "leaves": sum(len(event.paths) for event in events) / len(events),
        "events_per_second": len(events) / best["parse"],
        "orjson_per_second": len(events) / best["orjson"] or None,
    }
    print(
        f"{name:12} {row['leaves']:5.1f} leaves {row['bytes']:7.0f} bytes "
        f"{row['events_per_second']:9,.0f} events/s   orjson {row['orjson_per_second'] or 0:9,.0f}"
    )
    return row


def measure_hostile(number: int, seed: int) -> dict[str, Any]:
    """Read hostile lines from another process."""
    command = [sys.executable, __file__, "--write", str(number), "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        settings = WatchSettings(format="jsonl")
        source = PipeSource(process.stdout.fileno(), "hostile", settings.max_bytes)
        letters = DeadLetters(Path(folder) / "dead.jsonl")
        parser = EventParser(settings, letters)
        lines = events = unanswered = 0
        started = time.process_time()
        while not source.exhausted:
            for record in source.read(1_000, timeout=10.0):
                before = letters.total
                found = len(parser.parse([record]))
                lines += 1
                events += found
                answered = found or letters.total > before
                unanswered += not answered and bool(record.data.strip())
        seconds = time.process_time() - started
        letters.close()
        size = (Path(folder) / "dead.jsonl").stat().st_size
    assert process.wait() == 0
    row = {
        "lines": lines,
        "events": events,
        "dead_letters": letters.total,
        "reasons": len(letters.counts),
        "unanswered": unanswered,
        "dead_letter_bytes": size,
        "lines_per_second": lines / seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024,
    }
    print(
        f"{lines:,} hostile lines: {events:,} events, {letters.total:,} dead letters, "
        f"{unanswered:,} without an answer; {row['lines_per_second']:,.0f} lines/s, peak "
        f"{row['peak_mib']:.0f} MiB"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1_000_000, help="hostile lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        for line in hostile_lines(options.write, options.seed):
            sys.stdout.buffer.write(line + b"\n")
        return
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
    hostile = measure_hostile(options.lines, options.seed)
    formats = [measure_format(name, make) for name, make in LINES.items()]
    load = os.getloadavg()[0]
    write_json(OUT, {"load": load, "start_mib": start, "formats": formats, "hostile": hostile})
    print(f"saved to {OUT}")


if __name__ == "__main__":
    main()
