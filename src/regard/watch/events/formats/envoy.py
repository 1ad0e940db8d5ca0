"""Envoy's access log in its default text format, and in that of Istio.

https://www.envoyproxy.io/docs/envoy/latest/configuration/observability/access_log/usage
"""

from __future__ import annotations

import re

from regard.watch.events.formats.format import Content, Format
from regard.watch.events.formats.text_lines import (
    parse_request_line,
    parse_scalar,
    quoted_fields,
)

LINE = re.compile(r'\[(\d{4}-\d\d-\d\dT[^\]]{8,24})\] "((?:[^"\\]|\\.)*)" (\d{1,3}|-) (.*)')

START = ("response_flags",)
ISTIO = ("response_code_details", "connection_termination_details", "transport_failure_reason")
COMMON = (
    *("bytes_received", "bytes_sent", "duration", "upstream_service_time"),
    *("x_forwarded_for", "user_agent", "request_id", "authority", "upstream_host"),
)
ISTIO_END = (
    *("upstream_cluster", "upstream_local_address", "downstream_local_address"),
    *("downstream_remote_address", "requested_server_name", "route_name"),
)
DEFAULT_NAMES = START + COMMON
ISTIO_NAMES = START + ISTIO + COMMON + ISTIO_END


def read_line(line: str) -> Content | None:
    """The fields of a line, by the names of Envoy's command operators."""
    match = LINE.fullmatch(line)
    if match is None:
        return None
    time, request, status, rest = match.groups()
    fields = quoted_fields(rest)
    names = DEFAULT_NAMES if len(fields) == len(DEFAULT_NAMES) else ISTIO_NAMES
    if len(fields) != len(names):
        return None
    values = map(parse_scalar, fields)
    return {
        "start_time": time,
        **parse_request_line(request),
        "response_code": parse_scalar(status),
        **dict(zip(names, values, strict=True)),
    }


FORMAT = Format(
    name="envoy",
    title="access log of Envoy or Istio",
    entity="x_forwarded_for|downstream_remote_address",
    endpoint="method url|request",
    time="start_time",
    matches=lambda line: isinstance(line, str) and read_line(line) is not None,
    read_line=read_line,
)
