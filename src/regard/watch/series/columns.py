"""What the leaves of an event say about its result: failure, bytes, time taken, ids it touched."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.watch.event import Event, Value
from regard.watch.events.ids import id_class, path_template

STATUS = {"status", "statuscode", "responsestatus", "responsecode", "httpstatus", "respcode"}
ERROR = {"error", "errorcode", "errormessage", "exception"}
BYTES = {"contentlength", "bodysize", "responsesize", "requestsize"}  # and whatever has "bytes"
TIME_TAKEN = ("latency", "duration", "elapsed", "responsetime", "requesttime", "timetaken")
NO_LETTERS = re.compile(r"[^a-z0-9]")

ID_PATHS = 6  # paths whose distinct values are counted
SAMPLE = 20_000  # events that choose them
ID_SHARE = 0.2  # share of a path's values that are ids
FEWEST_VALUES = 10
UNIQUE = 0.995  # a path whose values are never repeated is the id of a request
BITS = 256  # of a bitmap that counts distinct values
MOST_ROLES = 20_000
GOLDEN = 2_654_435_769  # 2³² / φ, of Fibonacci hashing

OTHER_ROLE, STATUS_ROLE, ERROR_ROLE, BYTES_ROLE, TIME_ROLE = range(5)


class Result(NamedTuple):
    """What an event says about its result.

    Attributes:
        failed: Whether it has a status from 400, or names an error.
        size: Bytes, or 0 if it has none.
        seconds: Time taken, in whatever unit the event has; NaN if it says none.
        ids: For each path of ids, the bit in a bitmap of the value that the event has; 0 if none.
    """

    failed: bool
    size: float
    seconds: float
    ids: list[int]


class ResultReader:
    """Reads results by general rules: names of keys for status, errors, bytes and time, and values
    for ids. The paths of ids are those whose values are ids by their form or by their key, which
    are neither a few values nor all different, the most frequent first.
    """

    def __init__(self, id_paths: Sequence[str] = ()) -> None:
        self.id_paths = list(id_paths)
        self._slots = {path: slot for slot, path in enumerate(self.id_paths)}
        self._roles: dict[str, int] = {}

    def fit(self, events: Sequence[Event]) -> None:
        """Choose the paths of ids."""
        values: dict[str, dict[Value, int]] = {}
        for event in events[:: max(1, len(events) // SAMPLE)]:
            for path, value in zip(event.paths, event.values, strict=True):
                counts = values.setdefault(path, {})
                counts[value] = counts.get(value, 0) + 1
        candidates = []
        for path, counts in values.items():
            total = sum(counts.values())
            share = sum(n for value, n in counts.items() if is_id(path, value)) / total
            few = len(counts) < FEWEST_VALUES
            if share >= ID_SHARE and not few and len(counts) < UNIQUE * total:
                candidates.append((-total, path))
        self.id_paths = [path for _, path in sorted(candidates)[:ID_PATHS]]
        self._slots = {path: slot for slot, path in enumerate(self.id_paths)}

    def read(self, event: Event) -> Result:
        """The result of an event."""
        failed, size, seconds = False, 0.0, math.nan
        ids = [0] * len(self.id_paths)
        roles, slots = self._roles, self._slots
        for path, value in zip(event.paths, event.values, strict=True):
            if path in slots and value is not None:
                ids[slots[path]] |= hash_bit(str(value))
            role = roles.get(path)
            if role is None:
                role = find_role(path)
                if len(roles) < MOST_ROLES:
                    roles[path] = role
            if role == OTHER_ROLE:
                continue
            if role == ERROR_ROLE:
                failed |= value not in (None, "", False, 0, "none", "None", "-")
                continue
            number = as_number(value)
            if number is None:
                continue
            if role == STATUS_ROLE:
                failed |= 400 <= number < 600
            elif role == BYTES_ROLE:
                size += max(number, 0.0)
            else:
                seconds = number if math.isnan(seconds) else max(seconds, number)
        return Result(failed, size, seconds, ids)


def find_role(path: str) -> int:
    """What a path is about, by its last key."""
    key = NO_LETTERS.sub("", path.rsplit(".", 1)[-1].lower())
    if key in STATUS:
        return STATUS_ROLE
    if key in ERROR:
        return ERROR_ROLE
    if "bytes" in key or key in BYTES:
        return BYTES_ROLE
    return TIME_ROLE if any(word in key for word in TIME_TAKEN) else OTHER_ROLE


def is_id(path: str, value: Value) -> bool:
    """Whether a value is an id: by its form, or as a number whose key ends in "id"."""
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return False
    if isinstance(value, int):
        return path.lower().endswith(("id", "uid", "number"))
    if value.startswith("/"):
        return path_template(value) != value.partition("?")[0]
    return bool(id_class(value))


def as_number(value: Value) -> float | None:
    """A finite number, also one in a string; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def hash_bit(text: str) -> int:
    """A bitmap with one bit set."""
    checksum = zlib.crc32(text.encode("utf-8", "surrogatepass"))
    mixed = checksum * GOLDEN & 0xFFFFFFFF  # the checksums of successive numbers are not random
    return 1 << (mixed >> 16) % BITS


def count_bits(bitmap: int) -> float:
    """Estimate of the number of distinct values in a bitmap, by linear counting (Whang et al.,
    1990); at most about 1,400."""
    empty = max(BITS - bitmap.bit_count(), 1)
    return BITS * math.log(BITS / empty)


def bitmap_to_json(bitmap: int) -> str:
    return f"{bitmap:x}"


def bitmap_from_json(text: Any) -> int:
    return int(text, 16)
