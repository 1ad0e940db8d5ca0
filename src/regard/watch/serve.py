"""`regard watch serve`: score events by HTTP, and the page on which people judge alerts.

All questions but `/health` need the token; see `regard.watch.page.access`.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import prometheus_client
import uvicorn
from fastapi import FastAPI, Header, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

import regard
from regard.watch.detector import Detector
from regard.watch.events import DeadLetters, EventParser, UnknownFormat
from regard.watch.follow.store import (
    STATUSES,
    AlertEntry,
    AlertQuery,
    Mute,
    WatchStore,
    event_to_json,
)
from regard.watch.outputs import FORMATS, mask_alert
from regard.watch.page.access import AccessGuard, Application, signed_in_cookie
from regard.watch.page.graph import activity_graph, alert_path
from regard.watch.sources.framing import Part
from regard.watch.sources.json_splitter import split_json
from regard.watch.sources.source import Record

PAGE = Path(__file__).parent / "page"
D3 = Path(regard.__file__).parent / "inspection" / "page" / "vendor"
D3_MODULES = (
    "array",
    "color",
    "format",
    "interpolate",
    "path",
    "scale",
    "shape",
    "time",
    "time-format",
)
OPEN_PATHS = ("/", "/health", "/sign-in", "/assets/")  # without data; scripts ask for those
MAX_EVENTS = 10_000  # of one request
MAX_BODY = 5_000_000  # bytes of one request
MAX_ENTITIES = 100_000  # whose states are kept
HOUR = 3600.0


class RecentStates(OrderedDict[tuple[str, str], dict[str, Any]]):
    """States of the entities that were used last, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def forget_oldest(self, used: Sequence[tuple[str, str]]) -> None:
        """Move those that were used to the end, and drop the first beyond the capacity."""
        for key in used:
            if key in self:
                self.move_to_end(key)
        while len(self) > self.capacity:
            self.popitem(last=False)


class Watch:
    """What the server works with. Calls come from several threads; `lock` lets one in at a time.

    Args:
        store: Alerts, and what people said about them.
        detector: The model; None if the server only shows alerts.
        show_values: Whether sensitive values are shown.
    """

    def __init__(
        self, store: WatchStore, detector: Detector | None = None, *, show_values: bool = False
    ) -> None:
        self.store, self.detector, self.show_values = store, detector, show_values
        self.lock = threading.Lock()
        self.states = RecentStates(MAX_ENTITIES)
        if detector is not None:
            self.states.update(detector.initial_states())
        self.parser = None if detector is None else EventParser(detector.settings)
        self.registry = prometheus_client.CollectorRegistry()
        self.events = prometheus_client.Counter(
            "regard_watch_events", "Events scored.", ["status"], registry=self.registry
        )
        self.rejected = prometheus_client.Counter(
            "regard_watch_rejected", "Records that are no events.", registry=self.registry
        )
        self.seconds = prometheus_client.Histogram(
            "regard_watch_score_seconds", "Time to score a request.", registry=self.registry
        )
        self.stored = prometheus_client.Gauge(
            "regard_watch_stored_alerts", "Alerts stored.", ["status"], registry=self.registry
        )
        self.waiting = prometheus_client.Gauge(
            "regard_watch_waiting_deliveries",
            "Alerts that an output has not received.",
            ["output"],
            registry=self.registry,
        )

    def show(self, entry: AlertEntry) -> dict[str, Any]:
        """An alert with its status, label and note, masked unless `show_values`. The event itself
        is never shown."""
        content = entry.content if self.show_values else mask_alert(entry.content)
        return content | {
            "status": entry.status,
            "reason": entry.reason,
            "priority": entry.priority,
            "label": entry.label,
            "note": entry.note,
        }

    def score(self, body: bytes, request_id: str) -> dict[str, Any]:
        """Score the events of a body in order, and store the alerts among them."""
        if self.detector is None or self.parser is None:
            raise HTTPException(409, "The server was started without --model: it cannot score.")
        started = time.perf_counter()
        self.parser.dead_letters = DeadLetters()
        try:
            events = self.parser.parse(self._records(body, request_id))
        except UnknownFormat as error:
            raise HTTPException(422, str(error)) from None
        rejected = self.parser.dead_letters.counts
        if not events and not rejected:
            raise HTTPException(422, "The body has no events: send JSON objects, one on each line.")
        if len(events) > MAX_EVENTS:
            raise HTTPException(413, f"Send at most {MAX_EVENTS:,} events, not {len(events):,}.")
        scored = self.detector.score(events, self.states)
        self.states.forget_oldest([(event.tenant, event.entity) for event in events])
        results, entries = [], []
        for each in scored:
            alert = None
            if each.status not in ("normal", "learning"):
                entry = AlertEntry(
                    self.detector.alert(each).to_json(),
                    status=each.status,
                    event=event_to_json(each.event),
                )
                entries.append(entry)
                alert = self.show(entry)
            results.append(
                {
                    "source": each.event.source,
                    "entity": each.event.entity,
                    "endpoint": each.event.endpoint,
                    "p": each.p,
                    "extrapolated": each.extrapolated,
                    "status": each.status,
                    "alert": alert,
                }
            )
            self.events.labels(each.status).inc()
        self.store.add_alerts(entries)
        self.rejected.inc(rejected.total())
        self.seconds.observe(time.perf_counter() - started)
        return {"events": results, "rejected": dict(rejected)}

    def _records(self, body: bytes, request_id: str) -> list[Record]:
        """The records of a body: its JSON objects, or its lines if the format is one of lines."""
        assert self.parser is not None
        of_lines = self.parser.format is not None and self.parser.read_line is not None
        if of_lines or body.lstrip()[:1] not in (b"{", b"["):
            parts = [Part(line) for line in body.splitlines()]
        else:
            parts = split_json(body, self.parser.settings.max_bytes)
        return [
            Record(part.data, f"{request_id}:{i + 1}", part.problem) for i, part in enumerate(parts)
        ]

    def metrics(self) -> bytes:
        """The metrics of Prometheus, in its text format."""
        for status, count in self.store.alert_values("status", STATUSES).items():
            self.stored.labels(status).set(count)
        for output, count in self.store.count_deliveries().items():
            self.waiting.labels(output).set(count)
        return prometheus_client.generate_latest(self.registry)


class SignIn(BaseModel):
    """A token that was typed on the page."""

    model_config = ConfigDict(extra="forbid")
    token: str = Field(max_length=500)


class Judgement(BaseModel):
    """What someone says about an alert; "" takes the label back."""

    model_config = ConfigDict(extra="forbid")
    label: Literal["attack", "normal", ""]
    note: str = Field("", max_length=2000)


class NewMute(BaseModel):
    """Findings that are not to be reported for some time; "" matches anything."""

    model_config = ConfigDict(extra="forbid")
    tenant: str = Field("", max_length=500)
    endpoint: str = Field("", max_length=2000)
    path: str = Field("", max_length=2000)
    value_class: str = Field("", max_length=200)
    reason: str = Field("", max_length=2000)
    hours: float | None = Field(None, gt=0, le=24 * 3650, allow_inf_nan=False)


AlertId = Annotated[str, "Id of an alert, or its first characters."]


def create_app(
    watch: Watch, token: str, *, hosts: tuple[str, ...] = (), secure: bool = False
) -> Application:
    """The server as an ASGI application.

    Args:
        watch: What it works with.
        token: The secret that clients must know.
        hosts: Names by which the server may be called, beside localhost.
        secure: Whether browsers reach it by https, so that the cookie is never sent otherwise.
    """
    app = FastAPI(title="regard watch", version=regard.__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(ValueError)
    def wrong_value(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(OSError)
    def disk_trouble(request: Request, error: OSError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 503)

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code)

    # ------------------------------------------------------------------------------ the page
    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(PAGE / "page.html", media_type="text/html; charset=utf-8")

    @app.get("/sign-in", include_in_schema=False)
    def sign_in_page() -> FileResponse:
        return FileResponse(PAGE / "page.html", media_type="text/html; charset=utf-8")

    @app.post("/sign-in", include_in_schema=False)
    def sign_in(given: SignIn) -> Response:
        if not hmac.compare_digest(given.token.encode(), token.encode()):
            return JSONResponse({"error": "This is not the token of this server."}, 401)
        answer = JSONResponse({"signed_in": True})
        answer.headers["set-cookie"] = signed_in_cookie(token, secure=secure)
        return answer

    @app.get("/assets/{name}", include_in_schema=False)
    def asset(name: str) -> FileResponse:
        if name not in ASSETS:
            raise HTTPException(404, f"There is no file {name}.")
        return FileResponse(ASSETS[name], headers={"cache-control": "no-cache"})

    # ----------------------------------------------------------------------------- operation
    @app.get("/health")
    def health() -> dict[str, Any]:
        with watch.lock:
            watch.store.change_count()
        return {"status": "ok", "version": regard.__version__, "model": watch.detector is not None}

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        with watch.lock:
            text = watch.metrics()
        return PlainTextResponse(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.post("/v1/score")
    async def score(
        request: Request, idempotency_key: Annotated[str | None, Header(max_length=200)] = None
    ) -> Response:
        """Score events: a JSON object, an array of them, or one on each line. With the header
        `Idempotency-Key`, a request that is sent again makes no new alerts."""
        body = await request.body()
        request_id = f"http:{idempotency_key or secrets.token_hex(8)}"

        def run() -> dict[str, Any]:
            with watch.lock:
                return watch.score(body, request_id)

        return JSONResponse(await run_in_threadpool(run))

    # -------------------------------------------------------------------------------- alerts
    @app.get("/v1/alerts")
    def alerts(
        status: Annotated[list[str], Query()] = ["alert"],  # noqa: B006
        tenant: str | None = None,
        endpoint: str | None = None,
        entity: str | None = None,
        kind: str | None = None,
        severity: str | None = None,
        label: Literal["attack", "normal", "none"] | None = None,
        since: float | None = None,
        until: float | None = None,
        order: Literal["priority", "time"] = "priority",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, Any]:
        """Alerts that match, the most urgent first, without their leaves."""
        query = AlertQuery(
            statuses=status,
            tenant=tenant,
            endpoint=endpoint,
            entity=entity,
            kind=kind,
            severity=severity,
            label="" if label == "none" else label,
            since=since,
            until=until,
            order=order,
            limit=limit,
            offset=offset,
        )
        with watch.lock:
            found, total = watch.store.alerts(query), watch.store.count_alerts(query)
        left_out: dict[str, Any] = {"leaves": [], "nearest_normal": {}, "what_if": []}
        return {"total": total, "alerts": [watch.show(entry) | left_out for entry in found]}

    @app.get("/v1/alerts/{id}")
    def alert(id: AlertId, format: Literal["jsonl", "ecs", "ocsf"] = "jsonl") -> dict[str, Any]:
        """One alert with all that explains it, or as a document of another schema."""
        with watch.lock:
            entry = watch.store.alert(id)
        shown = watch.show(entry)
        return shown | {"steps": alert_path(shown)} if format == "jsonl" else FORMATS[format](shown)

    @app.get("/v1/filters")
    def filters(
        status: Annotated[list[str], Query()] = ["alert"],  # noqa: B006
    ) -> dict[str, dict[str, int]]:
        """How many alerts there are by endpoint, entity, kind, severity and tenant."""
        with watch.lock:
            return {
                name: watch.store.alert_values(name, status)
                for name in ("endpoint", "entity", "kind", "severity", "tenant")
            } | {"status": watch.store.alert_values("status", STATUSES)}

    @app.post("/v1/alerts/{id}/label")
    def label(id: AlertId, judgement: Judgement) -> dict[str, str]:
        """Say that an alert was an attack, or normal; `follow` ranks later ones by it."""
        with watch.lock:
            return {"id": watch.store.set_label(id, judgement.label, judgement.note)}

    @app.post("/v1/alerts/{id}/accept")
    def accept(id: AlertId) -> dict[str, str]:
        """Ask `follow` to learn the event as normal."""
        with watch.lock:
            return {"id": watch.store.accept_alert(id)}

    # --------------------------------------------------------------------- mutes and shapes
    @app.get("/v1/mutes")
    def mutes() -> list[dict[str, Any]]:
        """All mutes, also those that have expired."""
        with watch.lock:
            return [mute._asdict() for mute in watch.store.mutes()]

    @app.post("/v1/mutes")
    def add_mute(new: NewMute) -> dict[str, int]:
        """Do not report such findings any more, until the mute expires."""
        now = time.time()
        expires = None if new.hours is None else now + new.hours * HOUR
        content = new.model_dump(exclude={"hours"})
        with watch.lock:
            number = watch.store.add_mute(Mute(**content, created=now, expires=expires))
        return {"id": number}

    @app.delete("/v1/mutes/{number}")
    def delete_mute(number: int) -> dict[str, int]:
        """End a mute."""
        with watch.lock:
            watch.store.delete_mute(number)
        return {"id": number}

    @app.get("/v1/shapes")
    def shapes(status: Literal["new", "accepted"] | None = None) -> list[dict[str, Any]]:
        """New shapes of requests, the latest first."""
        with watch.lock:
            return [vars(shape) for shape in watch.store.shapes(status)]

    @app.post("/v1/shapes/{id}/accept")
    def accept_shape(id: str) -> dict[str, str]:
        """Accept a shape as normal."""
        with watch.lock:
            return {"id": watch.store.accept_shape(id)}

    # ------------------------------------------------------------------------------ pictures
    @app.get("/v1/series")
    def series(
        subject: str | None = None,
        tenant: str = "",
        since: float = 0.0,
        limit: Annotated[int, Query(ge=1, le=20_000)] = 5000,
    ) -> dict[str, Any]:
        """The subjects that have series, and the points of one of them."""
        with watch.lock:
            known = watch.store.series_subjects()
            points = (
                []
                if subject is None
                else watch.store.series(subject, tenant=tenant, since=since, limit=limit)
            )
        return {
            "subjects": [
                {"tenant": each, "subject": about, "names": names} for each, about, names in known
            ],
            "points": [point._asdict() for point in points],
        }

    @app.get("/v1/clusters")
    def clusters(limit: Annotated[int, Query(ge=1, le=5000)] = 2000) -> list[dict[str, Any]]:
        """Where entities are among the clusters of users."""
        with watch.lock:
            return [place._asdict() for place in watch.store.clusters(limit)]

    @app.get("/v1/drifts")
    def drifts(since: float = 0.0) -> list[dict[str, Any]]:
        """Changes of the mean surprise of endpoints."""
        with watch.lock:
            return [drift._asdict() for drift in watch.store.drifts(since=since)]

    @app.get("/v1/graph")
    def graph(tenant: str = "", limit: Annotated[int, Query(ge=2, le=200)] = 40) -> dict[str, Any]:
        """Which endpoint usually follows which, as the model has learned it."""
        with watch.lock:
            return activity_graph(watch.detector, tenant, limit)

    return AccessGuard(app, token=token, hosts=hosts, open_paths=OPEN_PATHS, max_body=MAX_BODY)


def list_assets() -> dict[str, Path]:
    """Name in the address -> file: the scripts and styles of the page, and the parts of D3."""
    own = [PAGE / "style.css", *sorted((PAGE / "scripts").glob("*.js"))]
    shared = [D3 / f"d3-{name}.min.js" for name in D3_MODULES]
    return {path.name: path for path in (*own, *shared)}


ASSETS = list_assets()


class Server:
    """An HTTP server in this process.

    Attributes:
        url: Its address.

    Args:
        app: What it serves; see `create_app`.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        certificate: File with the TLS certificate, and `key` with its key; None: no TLS.
    """

    def __init__(
        self,
        app: Application,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except OSError as error:
            self.socket.close()
            raise ValueError(
                f"Cannot listen on {host} port {port}: {error.strerror}. --port 0 takes a free one."
            ) from None
        name = f"[{host}]" if ":" in host else host
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://{name}:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            timeout_keep_alive=30,
        )
        try:
            config.load()
        except OSError as error:  # of the certificate
            self.socket.close()
            raise ValueError(f"Cannot read the TLS certificate or its key: {error}.") from None
        self.server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C."""
        try:
            self.server.run(sockets=[self.socket])
        finally:
            self.socket.close()

    def start(self) -> None:
        """Serve in a thread of its own, until `stop`."""
        self.thread = threading.Thread(target=self.run, name="server", daemon=True)
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """End the thread."""
        self.server.should_exit = True
        self.thread.join()
