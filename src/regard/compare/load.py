"""How busy other processes keep the machine during measurements and runs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from regard.bench.machine import MAX_OTHERS, busy_seconds


@dataclass(frozen=True)
class Load:
    """Cores that other processes used, of all cores, over some seconds."""

    others: float
    cores: int
    seconds: float

    @property
    def is_busy(self) -> bool:
        """Whether other processes used so much that it is worth a caveat."""
        return self.others > MAX_OTHERS * self.cores

    def describe(self, what: str) -> str:
        """Return "measured while other processes used 1.3 of 2 cores"."""
        return f"{what} while other processes used {self.others:.1f} of {self.cores} cores"


class LoadWatch:
    """Observes the machine from its creation on."""

    def __init__(self) -> None:
        self.begin, self.before = time.monotonic(), busy_seconds()
        self.own = own_seconds()

    def load(self) -> Load | None:
        """Return the load so far; None where the system does not tell it (no /proc)."""
        after, seconds = busy_seconds(), time.monotonic() - self.begin
        if self.before is None or after is None or seconds <= 0:
            return None
        everyone, own = after[0] - self.before[0], own_seconds() - self.own
        return Load(max(0.0, everyone - own) / seconds, os.cpu_count() or 1, seconds)


def own_seconds() -> float:
    """CPU seconds of this process and of its descendants, running or not.

    A process that has ended is in the times of its parent; so those that forks of a living server
    took are found in the server.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    children: dict[int, list[tuple[int, float]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # a name may contain spaces
        except OSError:  # it has ended
            continue
        seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        children.setdefault(int(fields[1]), []).append((int(path.parent.name), seconds))
    parents = [os.getpid()]
    while parents:
        for child, seconds in children.get(parents.pop(), ()):
            own += seconds
            parents.append(child)
    return own


def merge_loads(loads: list[Load]) -> Load | None:
    """Return the mean over time of several loads; None if there is none."""
    seconds = sum(each.seconds for each in loads)
    if not seconds:
        return None
    others = sum(each.others * each.seconds for each in loads) / seconds
    return Load(others, max(each.cores for each in loads), seconds)
