"""`regard look --serve`: the page of a view, with a model behind it, on localhost only.

Who may ask is checked before anything is read: the address has a random token, the Host header must
name this server (so no other name leads here: DNS rebinding), a request from the page of another
origin is refused, and so is a body over a limit.
"""

from __future__ import annotations

import secrets
import socket
import webbrowser
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from regard.console import PlainConsole
from regard.errors import Unsupported
from regard.inspection.data import HeadEdit, InterventionData, TileData, ViewData
from regard.inspection.page import render_page

if TYPE_CHECKING:
    from fastapi import FastAPI

HOST = "127.0.0.1"
MAX_BODY = 4_000_000  # bytes of a question
MAX_CELLS = 512  # cells per side of a tile
MAX_TEXT = 1_000_000  # characters of an input
TOKEN_BYTES = 24

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Session(Protocol):
    """A model that the page can ask for more. Wrong questions raise ValueError, with the reason.

    Calls come from threads, one at a time.
    """

    def view(self) -> ViewData:
        """Return what the page shows at first; its `server` is True."""

    def tile(
        self,
        model: int,
        map: int,
        queries: tuple[int, int],
        keys: tuple[int, int],
        *,
        rows: int,
        columns: int,
    ) -> TileData:
        """Return a rectangle of a map, in at most `rows` x `columns` cells."""

    def intervene(self, model: int, edits: list[HeadEdit]) -> InterventionData:
        """Return the output of a model with some heads changed, beside the output without."""

    def look(self, texts: list[str]) -> ViewData:
        """Return a view of other texts, one for each text sequence; later calls are about it."""


Index = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class Question(BaseModel):
    """What a page asks; `revision` is that of the view it shows."""

    model_config = ConfigDict(extra="forbid", strict=True)
    revision: Index


class TileQuestion(Question):
    """A rectangle of a map, from and to a query and a key."""

    model: Index
    map: Index
    queries: Annotated[list[Index], Field(min_length=2, max_length=2)]
    keys: Annotated[list[Index], Field(min_length=2, max_length=2)]
    rows: Annotated[int, Field(ge=1, le=MAX_CELLS)]
    columns: Annotated[int, Field(ge=1, le=MAX_CELLS)]


class EditQuestion(BaseModel):
    """A `HeadEdit`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    map: Index
    head: Index | None
    replace: Literal["zero", "uniform", "identity", "example"]
    example: Text | None = None


class InterventionQuestion(Question):
    """Changes of the heads of a model."""

    model: Index
    edits: Annotated[list[EditQuestion], Field(max_length=4096)]


class LookQuestion(Question):
    """Other texts, one for each text sequence."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=8)]


def serve(
    session: Session,
    *,
    port: int = 0,
    open_browser: bool = False,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve the page on localhost until interrupted.

    Args:
        port: 0 takes a free one.
        on_start: Called with the address when the port is bound; None prints it.
    """
    try:
        import uvicorn
    except ImportError:
        raise ImportError(
            "Serving a page needs the packages fastapi and uvicorn: pip install 'regard[web]'"
        ) from None
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"Cannot listen on port {port}: {error}. --port 0 takes a free one."
            ) from None
        listener.listen()  # so that a browser that is opened now waits for the answer
        number = listener.getsockname()[1]
        app = build_app(session, token=token, port=number)
        url = f"http://{HOST}:{number}/{token}/"
        if on_start is None:
            PlainConsole().print(f"{url}\nPress Ctrl+C to stop.", soft_wrap=True)
        else:
            on_start(url)
        if open_browser:
            webbrowser.open(url)
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
        with suppress(KeyboardInterrupt):  # Ctrl+C, after the last answer
            uvicorn.Server(config).run(sockets=[listener])


def build_app(session: Session, *, token: str, port: int) -> Application:
    """Return the ASGI application of a page at http://127.0.0.1:port/token/."""
    return LocalOnly(page_app(session), token=token, port=port)


def page_app(session: Session) -> FastAPI:
    """Return the application without the checks of who may ask: the page and its questions."""
    try:
        from fastapi import FastAPI
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import HTMLResponse, JSONResponse
    except ImportError:
        raise ImportError(
            "Serving a page needs the packages fastapi and uvicorn: pip install 'regard[web]'"
        ) from None

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    lock = Lock()
    revision = 0
    current = session.view()

    def check_revision(question: Question) -> None:
        if question.revision != revision:
            raise ValueError("The input was changed in another window: reload this page.")

    def show(view: ViewData) -> ViewData:
        return {**view, "revision": revision}

    @app.get("/", response_model=None)
    def page() -> Any:
        with lock:
            return HTMLResponse(render_page(show(current)))

    @app.post("/api/tile", response_model=None)
    def tile(question: TileQuestion) -> Any:
        (q0, q1), (k0, k1) = question.queries, question.keys
        if q0 >= q1 or k0 >= k1:
            raise ValueError(
                f"A tile has at least one query and one key, not {q0}-{q1}, {k0}-{k1}."
            )
        rows, columns = min(question.rows, q1 - q0), min(question.columns, k1 - k0)
        with lock:
            check_revision(question)
            found = session.tile(
                question.model, question.map, (q0, q1), (k0, k1), rows=rows, columns=columns
            )
        return JSONResponse(found)

    @app.post("/api/intervene", response_model=None)
    def intervene(question: InterventionQuestion) -> Any:
        edits: list[Any] = [
            edit.model_dump(exclude_none=True) | {"head": edit.head} for edit in question.edits
        ]
        with lock:
            check_revision(question)
            return JSONResponse(session.intervene(question.model, edits))

    @app.post("/api/look", response_model=None)
    def look(question: LookQuestion) -> Any:
        nonlocal current, revision
        with lock:
            check_revision(question)
            current = session.look(question.texts)
            revision += 1
            return JSONResponse(show(current))

    def refuse(status: int) -> Callable[[Any, Exception], Any]:
        def answer(_: Any, error: Exception) -> Any:
            return JSONResponse({"error": str(error)}, status)

        return answer

    def refuse_form(_: Any, error: Exception) -> Any:
        assert isinstance(error, RequestValidationError)
        fields = "; ".join(
            f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()
        )
        return JSONResponse({"error": fields}, 422)

    app.add_exception_handler(RequestValidationError, refuse_form)
    for kind in (ValueError, Unsupported, ImportError):
        app.add_exception_handler(kind, refuse(400))
    return app


HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class LocalOnly:
    """ASGI middleware that lets the page of this server through, and nobody else."""

    def __init__(self, app: Application, *, token: str, port: int) -> None:
        self.app = app
        self.token = token
        self.hosts = (f"{HOST}:{port}", f"localhost:{port}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        refusal = self.refusal(scope)
        if refusal is None:
            path = "/" + scope["path"].split("/", 2)[2]
            inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
            await self.app(inner, receive, send_with_headers)
            return
        status, reason = refusal
        start = {"type": "http.response.start", "status": status}
        start["headers"] = [(b"content-type", b"text/plain; charset=utf-8")]
        await send_with_headers(start)
        await send({"type": "http.response.body", "body": reason.encode()})

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason if a request must not be answered, from its head alone."""
        names = [name.decode("latin-1").lower() for name, _ in scope["headers"]]
        values = [value.decode("latin-1") for _, value in scope["headers"]]
        headers = dict(zip(names, values, strict=True))
        host = headers.get("host", "")
        if host not in self.hosts or names.count("host") != 1:
            return 421, "This server answers as 127.0.0.1 and localhost only."
        if "origin" in headers and headers["origin"] != f"http://{host}":
            return 403, "Requests from other origins are refused."
        parts = scope["path"].split("/", 2)
        if len(parts) < 3 or not secrets.compare_digest(parts[1].encode(), self.token.encode()):
            return 404, "Not found. Use the address that `regard look --serve` printed."
        if scope["method"] != "POST":
            return None
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return 403, "Requests from other origins are refused."
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 415, "Questions are application/json."
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            return 411, "Questions need a Content-Length."
        if int(length[:12]) > MAX_BODY:
            return 413, f"A question has at most {MAX_BODY:,} bytes."
        return None
