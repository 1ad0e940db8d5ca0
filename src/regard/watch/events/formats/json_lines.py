"""JSON Lines: any JSON objects, such as the logs of an application or of a gateway."""

from __future__ import annotations

from regard.watch.events.formats.format import Format

# The names that logs use, the most specific first.
ENTITY = (
    "user_id|userId|user.id|request.user|request.user_id|username|user_name|user.name|user.email"
    "|user|principal|account_id|account|actor.id|actor|subject|sub|api_key|client_id|session_id"
    "|SubjectUserName|TargetUserName|AccountName|User|remote_user|client_ip|clientIp|remote_addr|remote_ip"
    "|source_ip|src_ip|x_forwarded_for|ip|host|Hostname"
)
ENDPOINT = (
    "request.method request.url|request.method request.path|request.method request.uri|method path"
    "|method url|method uri|method endpoint|method route|http_method path|http_method url"
    "|request_method request_uri|request_method uri|requestMethod requestUrl|verb path|verb url"
    "|httpRequest.requestMethod httpRequest.requestUrl|http.method http.target|http.method http.url"
    "|endpoint|route|request|path|url|uri|operation|operationName|eventName|event_name|action"
    "|event_type|eventType|SourceName EventID|event.action|event|type|name"
)
TIME = (
    "@timestamp|timestamp|time|ts|datetime|date|eventTime|event_time|time_iso8601|time_local|msec"
    "|start_time|created_at|createdAt|request.time|request.timestamp|TimeCreated|request.headers.Date"
)

FORMAT = Format(
    name="jsonl",
    title="JSON Lines",
    entity=ENTITY,
    endpoint=ENDPOINT,
    time=TIME,
    matches=lambda content: isinstance(content, dict),
)
