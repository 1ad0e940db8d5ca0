"""Times of events, in the notations of logs."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

ACCESS_LOG = "%d/%b/%Y:%H:%M:%S %z"  # 10/Oct/2000:13:55:36 -0700
NUMBER = re.compile(r"\d{1,20}(\.\d+)?", re.ASCII)

EARLIEST, LATEST = 0.0, 253_402_300_800.0  # years 1970 to 9999
UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (float("inf"), 1e9))  # s, ms, us, ns since 1970


def parse_time(value: object) -> float | None:
    """Seconds since 1970, or None if the value is no time.

    Reads ISO 8601 (without a zone: UTC), the time of access logs, the dates of e-mail and HTTP
    headers, and seconds, milliseconds, microseconds or nanoseconds since 1970 as a number or as
    digits: the unit is the one that puts the time between 1973 and 5138.
    """
    if isinstance(value, str):
        return parse_time_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not EARLIEST < value < 1e20:
        return None
    unit = next(unit for limit, unit in UNITS if value < limit)
    return value / unit


def parse_time_text(text: str) -> float | None:
    """Seconds since 1970 of a time that is written in one of the notations of `parse_time`."""
    if len(text) > 64:
        return None
    if NUMBER.fullmatch(text):
        # fromisoformat takes 8 digits for a date, and seconds since 1970 have 9 or 10
        return parse_iso(text) if len(text) == 8 else parse_time(float(text))
    if text[:4].isdigit():
        return parse_iso(text)
    try:
        if text[2:3] == "/":
            return datetime.strptime(text, ACCESS_LOG).timestamp()
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def parse_iso(text: str) -> float | None:
    """Seconds since 1970 of an ISO 8601 time; UTC unless it has a zone."""
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        seconds = time.timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if EARLIEST <= seconds < LATEST else None
