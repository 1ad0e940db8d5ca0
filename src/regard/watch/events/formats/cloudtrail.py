"""AWS CloudTrail: events on lines, or the files with `Records` that the service writes.

https://docs.aws.amazon.com/awscloudtrail/latest/userguide/cloudtrail-event-reference.html
"""

from __future__ import annotations

from typing import Any

from regard.watch.events.formats.format import Format


def matches(content: Any) -> bool:
    """Whether an object is an event of CloudTrail."""
    keys = ("eventVersion", "eventSource", "eventName")
    return isinstance(content, dict) and all(key in content for key in keys)


FORMAT = Format(
    name="cloudtrail",
    title="AWS CloudTrail",
    entity="userIdentity.arn|userIdentity.principalId|userIdentity.invokedBy|userIdentity.accountId"
    "|sourceIPAddress",
    endpoint="eventSource eventName",
    time="eventTime",
    matches=matches,
)
