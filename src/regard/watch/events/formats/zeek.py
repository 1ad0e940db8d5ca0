"""Zeek's logs as JSON: conn, http, dns and the others.

https://docs.zeek.org/en/master/log-formats.html#zeek-json-format-logs
"""

from __future__ import annotations

from typing import Any

from regard.watch.events.formats.format import Format


def matches(content: Any) -> bool:
    """Whether an object is an entry of a Zeek log about a connection, a file or a certificate."""
    if not isinstance(content, dict) or "ts" not in content:
        return False
    return "id.orig_h" in content or "_path" in content or ("uid" in content and "id" in content)


FORMAT = Format(
    name="zeek",
    title="Zeek, JSON",
    entity="id.orig_h|tx_hosts|host|src|peer",
    endpoint="method uri|_path qtype_name|qtype_name|_path service|_path|proto service|proto|note",
    time="ts",
    matches=matches,
)
