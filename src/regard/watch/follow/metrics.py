"""Prometheus metrics of `follow`, and what says whether it is alive and ready, over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STALLED_SECONDS = 60.0  # without a round of the main loop: not alive
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class FollowMetrics:
    """Counters, gauges and histograms, in a registry of their own."""

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
            from prometheus_client.process_collector import ProcessCollector
        except ImportError:
            raise ImportError(
                "Metrics need the package prometheus-client: pip install 'regard[watch]'"
            ) from None
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return Counter(f"regard_watch_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return Gauge(f"regard_watch_{name}", text, labels, registry=registry)

        self.records = counter("records", "Records read from the source.")
        self.duplicates = counter("duplicate_records", "Records that came again and were done.")
        self.events = counter("events", "Events scored.", ("status",))
        self.dead_letters = counter("dead_letters", "Records that could not be parsed.")
        self.alerts = counter("alerts", "Alerts stored.", ("status", "severity"))
        self.drifts = counter("drifts", "Drifts of the surprise of an endpoint.")
        self.commits = counter("commits", "Commits of alerts and states to the disk.")
        self.failed_commits = counter("failed_commits", "Commits that failed, such as disk full.")
        self.waiting = gauge("queue_records", "Records read and not scored yet.")
        self.lag = gauge("source_lag", "Records that wait in the source, where it says so.")
        self.entities = gauge("entities_in_memory", "Entities whose states are in memory.")
        self.undelivered = gauge("undelivered_alerts", "Alerts for an output.", ("output",))
        self.latency = Histogram(
            "regard_watch_latency_seconds",
            "From the read of a record to the commit of what was made of it.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.scoring = Histogram(
            "regard_watch_batch_seconds",
            "Time to score a micro-batch.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def text(self) -> bytes:
        """All metrics in the format of Prometheus."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class HealthState:
    """Whether the main loop is alive, and why it is not ready.

    Attributes:
        problems: What is wrong now, by part: {"source": "redis://... does not answer"}.
        beat: When the main loop last went round, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.problems: dict[str, str] = {"start": "is starting"}
        self.beat = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether the main loop went round in the last minute."""
        return time.monotonic() - self.beat < STALLED_SECONDS


def serve_metrics(
    host: str, port: int, metrics: FollowMetrics, health: HealthState
) -> ThreadingHTTPServer:
    """Answer GET /metrics, /health and /ready in a thread; port 0 takes a free one.

    /health is 200 while the main loop runs, /ready while events can be read and alerts stored;
    otherwise they are 503, with the reasons.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers: dict[str, Callable[[], tuple[int, str, bytes]]] = {
                "/metrics": lambda: (200, "text/plain; version=0.0.4", metrics.text()),
                "/health": lambda: self._state(health.alive, {}),
                "/ready": lambda: self._state(
                    health.alive and not health.problems, health.problems
                ),
            }
            answer = answers.get(self.path.partition("?")[0])
            known = "GET /metrics, /health or /ready\n"
            code, kind, body = answer() if answer else (404, "text/plain", known.encode())
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _state(self, good: bool, problems: dict[str, str]) -> tuple[int, str, bytes]:
            content = {"ok": good, "alive": health.alive, "problems": dict(problems)}
            return (200 if good else 503), "application/json", json.dumps(content).encode() + b"\n"

        def log_message(self, format: str, *args: Any) -> None:
            pass  # a probe every few seconds is no news

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise OSError(
            f"Cannot listen on {host}:{port} for metrics ({error.strerror}): choose another "
            "--metrics-port, or 'none'."
        ) from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
