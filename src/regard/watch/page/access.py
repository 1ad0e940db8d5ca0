"""Who may use the server: a token, a cookie for browsers, and limits on what they send.

`AccessGuard` wraps an ASGI application. It refuses, in this order,

- a `Host` header that is not one of the server's own names, so that another site whose name
  resolves to this machine cannot read answers (DNS rebinding);
- a body that is too long, before it is kept;
- a request without the token, in `Authorization: Bearer TOKEN` or in the cookie of a browser that
  has signed in;
- a request with the cookie that changes something and does not come from the page: it must have the
  header `X-Regard`, which a form or a script of another site cannot set, and no foreign `Origin`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "regard_watch"
COOKIE_SECONDS = 12 * 3600
PAGE_HEADER = b"x-regard"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
MIN_TOKEN = 16  # characters
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        b"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


def create_token() -> str:
    """A new token of 256 random bits."""
    return secrets.token_urlsafe(32)


def cookie_value(token: str) -> str:
    """The cookie of a browser that knows the token; the token cannot be computed from it."""
    return hmac.new(token.encode(), b"regard watch page", hashlib.sha256).hexdigest()


def signed_in_cookie(token: str, *, secure: bool) -> str:
    """The value of `Set-Cookie` after a sign-in."""
    only = "; Secure" if secure else ""
    return (
        f"{COOKIE}={cookie_value(token)}; HttpOnly; SameSite=Strict; Path=/; "
        f"Max-Age={COOKIE_SECONDS}{only}"
    )


class Refused(Exception):
    """A request that is not allowed: its status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class AccessGuard:
    """ASGI middleware; see the module.

    Args:
        app: The application.
        token: The secret that clients must know.
        hosts: Names by which the server may be called, beside localhost.
        open_paths: Paths that need no token; a path that ends with "/" stands for all beneath it.
        max_body: Longest body in bytes.
    """

    def __init__(
        self,
        app: Application,
        *,
        token: str,
        hosts: tuple[str, ...] = (),
        open_paths: tuple[str, ...] = (),
        max_body: int = 5_000_000,
    ) -> None:
        if len(token) < MIN_TOKEN:
            raise ValueError(
                f"The token has {len(token)} characters, and at least {MIN_TOKEN} are needed."
            )
        self.app, self.token, self.max_body = app, token.encode(), max_body
        self.cookie = cookie_value(token)
        self.hosts = {name.lower() for name in (*LOCAL_NAMES, *hosts)}
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets here
            return
        try:
            self._check(scope)
            body = await self._read_body(scope, receive)
        except Refused as refused:
            await self._answer(refused, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                added = [pair for pair in SECURITY_HEADERS if pair[0] not in own]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        sent = False

        async def receive_body() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_body, send_with_headers)

    def _check(self, scope: Scope) -> None:
        """Raise `Refused` unless the request is allowed."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if (urlsplit(f"//{host}").hostname or "") not in self.hosts:
            raise Refused(421, f"This server does not answer for the host {host!r}.")
        path = scope["path"]
        for open_path in self.open_paths:
            beneath = len(open_path) > 1 and open_path.endswith("/") and path.startswith(open_path)
            if path == open_path or beneath:
                return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.token):
            return
        if not hmac.compare_digest(read_cookie(headers).encode(), self.cookie.encode()):
            raise Refused(401, "A token is needed: Authorization: Bearer TOKEN.")
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get(b"origin", b"").decode("latin-1")
            foreign = origin and urlsplit(origin).netloc != host
            if foreign or PAGE_HEADER not in headers:
                raise Refused(403, "This request does not come from the page.")

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The body, if it is not too long."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        too_long = Refused(413, f"The body is longer than {self.max_body:,} bytes.")
        if length.isdigit() and int(length) > self.max_body:
            raise too_long
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Refused(400, "The client went away.")
            body += message.get("body", b"")
            if len(body) > self.max_body:
                raise too_long
            if not message.get("more_body", False):
                return bytes(body)

    async def _answer(self, refused: Refused, send: Send) -> None:
        """Answer with the reason as JSON."""
        body = json.dumps({"error": refused.reason}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *SECURITY_HEADERS,
        ]
        if refused.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="regard watch"'))
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def read_cookie(headers: dict[bytes, bytes]) -> str:
    """The cookie of the page; "" if there is none."""
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return ""
    found = cookies.get(COOKIE)
    return found.value if found is not None else ""
