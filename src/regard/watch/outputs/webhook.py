"""Alerts by HTTP, signed as the Standard Webhooks specification says.

https://github.com/standard-webhooks/standard-webhooks: libraries in most languages verify the
signature. The headers are

    webhook-id: id of the alert, the same whenever it is sent again
    webhook-timestamp: seconds since 1970
    webhook-signature: v1,<base64 of HMAC-SHA256(key, "id.timestamp.body")>
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import regard
from regard.watch.outputs.documents import FORMATS
from regard.watch.outputs.files import to_line
from regard.watch.outputs.output import Output, OutputError

SECRET_PREFIX = "whsec_"
MIN_SECRET_BYTES = 16
REFUSED_STATUSES = (400, 413, 422)  # this alert cannot be taken; other errors may be mended
MAX_ANSWER = 2048  # bytes that are read of an answer


class WebhookOutput(Output):
    """Posts each alert as JSON to a URL.

    An answer of 200 to 299 means that the alert was received. After 400, 413 or 422 it is not sent
    again; all else, such as 404 or a redirect, which is not followed, is an error to be mended.

    Args:
        url: http:// or https:// address.
        format: One of `FORMATS`.
        secret: Key of the signature as text, or "whsec_" and its base64; None for no signature.
        timeout: Seconds to wait for the receiver.
    """

    batch = 1  # each alert has an answer of its own

    def __init__(
        self, url: str, format: str = "jsonl", *, secret: str | None = None, timeout: float = 10.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"A webhook needs a URL such as https://host/path, not {url!r}.")
        if parts.username or parts.password:
            raise ValueError("A webhook's URL must not contain a password: use a secret file.")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"The port of the webhook {url!r} is not a number.") from None
        self.secure, self.host, self.port = parts.scheme == "https", parts.hostname, port
        self.target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # the query of a URL is often a key, so it is not part of the name
        self.name = f"webhook+{format}:{parts.scheme}://{parts.netloc}{parts.path}"
        self.to_document, self.timeout = FORMATS[format], timeout
        self.key = None if secret is None else decode_secret(secret)

    def send(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        for alert in alerts:
            status, text = self._post(alert["id"], to_line(self.to_document(alert))[:-1])
            if not 200 <= status < 300:
                raise OutputError(
                    f"{self.name} answers {status}: {text[:200].strip()}",
                    permanent=status in REFUSED_STATUSES,
                )

    def _post(self, id: str, body: bytes) -> tuple[int, str]:
        """Send one request; returns the status and the beginning of the answer."""
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"regard/{regard.__version__}",
            "webhook-id": id,
            "webhook-timestamp": str(int(time.time())),
        }
        if self.key is not None:
            headers["webhook-signature"] = sign(self.key, id, headers["webhook-timestamp"], body)
        if self.secure:
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.host, self.port, timeout=self.timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request("POST", self.target, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise OutputError(f"{self.name} does not answer: {reason}") from None
        finally:
            connection.close()


def decode_secret(secret: str) -> bytes:
    """The key of a webhook: what follows "whsec_" in base64, or the text itself.

    Raises:
        ValueError: The key is not base64, or is too short to be a secret.
    """
    secret = secret.strip()
    key = secret.encode()
    if secret.startswith(SECRET_PREFIX):
        try:
            key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
        except binascii.Error:
            raise ValueError("The webhook's secret is not base64 after 'whsec_'.") from None
    if len(key) < MIN_SECRET_BYTES:
        raise ValueError(
            f"The webhook's secret has {len(key)} bytes, and at least {MIN_SECRET_BYTES} are "
            "needed: make one with `openssl rand -hex 32`."
        )
    return key


def sign(key: bytes, id: str, timestamp: str, body: bytes) -> str:
    """The signature of a message: "v1," and base64 of HMAC-SHA256(key, "id.timestamp.body")."""
    content = f"{id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
