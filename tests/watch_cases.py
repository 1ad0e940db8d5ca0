"""A store of a watch with alerts, series, clusters and shapes, for tests of the server and its
page."""

import math

from regard.watch.follow.store import (
    AlertEntry,
    ClusterPlace,
    Drift,
    Mute,
    SeriesPoint,
    Shape,
    WatchStore,
)

START = 1_788_800_000.0
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m"


def make_finding(kind="value", path="request.query.limit", observed=50000, **changes):
    """A finding as JSON values."""
    finding = {
        "level": "leaf",
        "kind": kind,
        "path": path,
        "observed": observed,
        "bits": 18.2,
        "p": 1e-6,
        "expected": [[24, 0.51], [20, 0.26], [48, 0.21]],
        "text": f"{path} is {observed}; 24 (51 %), 20 (26 %) and 48 (21 %) are usual.",
        "context": [],
    }
    return finding | changes


def make_content(number, **changes):
    """An alert as JSON values."""
    leaves = {
        "request.method": ("GET", 0.2),
        "request.path": ("/v2/products", 1.1),
        "request.query.limit": (50000, 18.2),
        "request.query.category": ("garden", 3.4),
        "request.headers.Authorization": ("Bearer abcdefghijkl", 4.0),
        "request.headers.User-Agent": ("ShopApp/5.2.0 (iPhone15,2)", 3.0),
        "response.status": (200, 0.1),
        "response.bytes": (327741, 9.4),
    }
    content = {
        "id": f"{number:016x}",
        "time": START + 600 * number,
        "source": f"traffic.jsonl:{17 * number}",
        "tenant": "",
        "entity": f"u{10000 + number % 3}",
        "endpoint": "GET /v2/products",
        "p": 2e-6 * (number + 1),
        "extrapolated": True,
        "severity": ("critical", "high", "medium", "low")[number % 4],
        "kind": "value",
        "findings": [make_finding()],
        "nearest_normal": {path: value for path, (value, _) in leaves.items()}
        | {"request.query.limit": 24, "request.query.page": 1, "response.bytes": 18900},
        "what_if": [
            {
                "path": "request.query.limit",
                "value": 24,
                "bits_before": 31.2,
                "bits_after": 12.9,
                "p_before": 2e-6,
                "p_after": 0.31,
            }
        ],
        "leaves": [
            {"path": path, "value": value, "bits": bits} for path, (value, bits) in leaves.items()
        ],
        "baseline": 50000,
        "model": "8f3a11",
        "status": "alert",
    }
    return content | changes


def fill_store(folder):
    """A store with 12 alerts, one of them hostile and one with an odd path."""
    store = WatchStore(folder, create=True)
    event = {"time": START, "entity": "u1", "endpoint": "GET /", "paths": [], "values": []}
    event |= {"source": "a:1", "tenant": ""}
    contents = [make_content(number) for number in range(10)]
    path = "GET /v2/basket → POST /v2/checkout → POST /v2/orders/{id}/confirm"
    odd = make_finding("path", "(endpoint)", path, level="path", expected=[], text="Odd path.")
    contents.append(
        make_content(
            10, kind="path", endpoint="POST /v2/orders/{id}/confirm", findings=[odd], p=1e-8
        )
    )
    hostile = make_finding("value", HOSTILE, HOSTILE, text=HOSTILE, expected=[[HOSTILE, 0.5]])
    contents.append(
        make_content(
            11,
            entity=HOSTILE,
            endpoint=HOSTILE,
            source=HOSTILE,
            findings=[hostile],
            leaves=[{"path": HOSTILE, "value": HOSTILE, "bits": 30.0}],
            nearest_normal={HOSTILE: HOSTILE},
            p=1e-9,
        )
    )
    store.add_alerts(
        [
            AlertEntry(content, priority=-math.log10(content["p"]), event=event)
            for content in contents
        ],
        outputs=["jsonl:alerts.jsonl"],
    )
    for subject in ("all", "endpoint GET /v2/products"):
        points = []
        for i in range(96):
            expected = 40 + 30 * math.sin(i / 15)
            value = expected + 6 * math.sin(i * 1.7) + (60 if i == 70 else 0)
            band = (expected - 14, expected + 14)
            points.append(SeriesPoint("", subject, "events", START + 900 * i, value, *band))
            share = 0.01 + 0.005 * math.sin(i)
            points.append(SeriesPoint("", subject, "error_share", START + 900 * i, share))
        store.add_series(points)
    places = []
    for i in range(90):
        cluster, angle = i % 3, 2.4 * i
        x, y = 3 * math.cos(2.1 * cluster), 3 * math.sin(2.1 * cluster)
        x, y = x + math.cos(angle) * (i % 7) / 6, y + math.sin(angle) * (i % 7) / 6
        home = cluster if i % 30 else (cluster + 1) % 3
        places.append(ClusterPlace("", f"u{10000 + i}", cluster, home, x, y, 20 + i, START))
    store.set_clusters(places)
    shape = Shape("5hape1", "", "POST /v2/basket/items", [("request.body.gift", "boolean")], [])
    store.add_shape_events(shape, ["u1", "u2"])
    store.add_mute(Mute(endpoint="GET /v2/health", reason="monitoring", expires=START + 9e9))
    store.add_drifts([Drift(START, "", "GET /v2/search", 4.1, 6.3, 800)])
    return store
