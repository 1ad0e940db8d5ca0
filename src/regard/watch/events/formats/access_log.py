"""Access logs of nginx and Apache: common, combined, with a virtual host, or with more fields.

    192.0.2.7 - anna [10/Oct/2000:13:55:36 -0700] "GET /a?b=1 HTTP/1.1" 200 2326 "-" "curl/8.0"

https://nginx.org/en/docs/http/ngx_http_log_module.html
https://httpd.apache.org/docs/2.4/logs.html#accesslog
"""

from __future__ import annotations

import re

from regard.watch.events.formats.format import Content, Format
from regard.watch.events.formats.text_lines import (
    parse_request_line,
    parse_scalar,
    quoted_fields,
    unescape,
)

MAX_EXTRA = 16  # fields after the user agent
QUOTED = r'"((?:[^"\\]|\\.)*)"'
LINE = re.compile(
    r"(?:(\S+) (?=\S+ - ))?(\S+) (\S+) ([^\[\]]{1,256}) "  # host, address, ident, user
    r"\[([^\]]{20,30})\] "
    rf"{QUOTED} (\d{{3}}|-) (\d+|-)(?: {QUOTED} {QUOTED})?(.*)"
)


def read_line(line: str) -> Content | None:
    """The fields of a line, by the names of nginx."""
    match = LINE.fullmatch(line)
    if match is None:
        return None
    host, address, _, user, time, request, status, size, referer, agent, rest = match.groups()
    content: Content = {
        "remote_addr": address,
        "remote_user": None if user == "-" else unescape(user),
        "time_local": time,
        **parse_request_line(request),
        "status": parse_scalar(status),
        "body_bytes_sent": parse_scalar(size),
    }
    if host is not None:
        content["host"] = host
    if agent is not None:
        content["http_referer"] = parse_scalar(referer)
        content["http_user_agent"] = None if agent == "-" else unescape(agent)
    for index, field in enumerate(quoted_fields(rest)[:MAX_EXTRA], 1):
        content[f"extra{index}"] = parse_scalar(field)
    return content


FORMAT = Format(
    name="access",
    title="access log of nginx or Apache, common or combined",
    entity="remote_user|remote_addr",
    endpoint="method url|request",
    time="time_local",
    matches=lambda line: isinstance(line, str) and LINE.fullmatch(line) is not None,
    read_line=read_line,
)
