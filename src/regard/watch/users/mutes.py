"""Which alerts not to report: those whose findings are all muted, or belong to a known shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from regard.watch.alert import Alert
from regard.watch.follow.store import Mute
from regard.watch.level import Finding

RELEVANT_P = 0.01  # a finding that is more usual than this does not keep an alert alive
MAX_CLASS = 24  # characters

_RUN = re.compile(r"[^\W_]+")


def value_class(value: Any) -> str:
    """The class of a value, for mutes: how it is written.

    Of a string, runs of letters become "a", runs of digits "0", runs of both "x"; other characters
    stay: "2026-11-18" is "0-0-0", "ShopApp/5.2" is "a/0.0". Other values have their JSON type.
    """
    if isinstance(value, str):
        written = _RUN.sub(_run_class, value[:500])
        return written if len(written) <= MAX_CLASS else f"{written[: MAX_CLASS - 1]}…"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else "other"


def _run_class(found: re.Match[str]) -> str:
    if found[0].isdigit():
        return "0"
    return "a" if found[0].isalpha() else "x"


def mutes_finding(mute: Mute, alert: Alert, finding: Finding) -> bool:
    """Whether a mute is about a finding of an alert."""
    return (
        mute.tenant in ("", alert.tenant)
        and (not mute.endpoint or matches(mute.endpoint, alert.endpoint))
        and (not mute.path or matches(mute.path, finding.path))
        and mute.value_class in ("", value_class(finding.observed))
    )


def matches(pattern: str, name: str) -> bool:
    """Whether a name is the pattern, or fits it: "*" stands for anything, and only "*"."""
    escaped = pattern.replace("[", "[[]").replace("?", "[?]")
    return pattern == name or fnmatchcase(name, escaped)


def find_mute(alert: Alert, mutes: Sequence[Mute]) -> Mute | None:
    """The mute of the first finding, if all relevant findings of an alert are muted, else None."""
    muting = {}

    def is_muted(finding: Finding) -> bool:
        found = next((mute for mute in mutes if mutes_finding(mute, alert, finding)), None)
        muting[id(finding)] = found
        return found is not None

    if mutes and covers(alert.findings, is_muted):
        return muting[id(alert.findings[0])]
    return None


def is_about_shape(alert: Alert, paths: Collection[str]) -> bool:
    """Whether all relevant findings of an alert are about keys of a shape."""
    return covers(
        alert.findings,
        lambda finding: finding.path in paths and finding.level == "leaf",
    )


def covers(findings: Iterable[Finding], is_covered: Callable[[Finding], bool]) -> bool:
    """Whether the first finding and all others with p <= 0.01 are covered."""
    found = [
        is_covered(finding)
        for i, finding in enumerate(findings)
        if i == 0 or finding.p <= RELEVANT_P
    ]
    return bool(found) and all(found)
