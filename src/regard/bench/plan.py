"""What is to be measured, and what was: a plan, rows, and all of it as plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from regard.bench.cell import MODES, SCOPES, BenchCell, Contender
from regard.bench.machine import MachineLoad, PeakThroughput
from regard.bench.stats import LEAST, Ratio, crossover
from regard.environment import cores, environment
from regard.errors import check_choice, check_int, check_positive

LENGTHS = tuple(1 << power for power in range(7, 17))  # 128 ... 65,536
LONGEST = 1 << 24
SCHEMA = 1
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
DONE, SPENT, STOPPED = "done", "the budget was used up", "stopped by hand"


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    groups    contenders that take turns, dense SDPA beside them; where there are peers, the first is ours
    threads   numbers of threads
    budget    seconds in all; `memory` bytes of one call, a share of what is free unless given
    rounds    at least so many pairs; 0: nothing takes turns, each is called once in a process of its own, for its memory
    clock     "wall"; or "processor", seconds of the processor alone, for one thread on a machine that cannot be had quiet
    """

    groups: Sequence[Sequence[Contender]]
    lengths: Sequence[int] = LENGTHS
    levels: Sequence[str] = tuple(SCOPES)
    ways: Sequence[str] = ("forward", "training")
    threads: Sequence[int] = field(default_factory=lambda: tuple(sorted({1, cores()})))
    batch: int = 1
    heads: int = 8
    width: int = 64
    causal: bool = False
    budget: float = 120.0
    memory: int | None = None
    rounds: int = LEAST
    clock: str = "wall"

    def __post_init__(self) -> None:
        check_int(1, batch=self.batch, heads=self.heads, width=self.width)
        check_positive("budget", self.budget)
        check_int(0, rounds=self.rounds)
        if self.memory is not None:
            check_positive("memory", self.memory)
        for length in self.lengths:
            check_int(1, length=length)
            if length > LONGEST:
                raise ValueError(f"lengths may be at most {LONGEST:,}, not {length:,}")
        for level in self.levels:
            check_choice("level", level, SCOPES)
        for way in self.ways:
            check_choice("way", way, MODES)
        for count in self.threads:
            check_int(1, threads=count)
            if count > cores():
                raise ValueError(
                    f"threads may be at most {cores()}, the cores of this machine, not {count}"
                )
        check_choice("clock", self.clock, CLOCKS)
        if self.clock != "wall" and tuple(self.threads) != (1,):
            raise ValueError(
                "the clock of the processor tells the time of one thread: threads must be 1"
            )
        for name in ("groups", "lengths", "levels", "ways", "threads"):
            if not getattr(self, name):
                raise ValueError(f"there is nothing to measure: {name} is empty")

    def cells(self) -> list[BenchCell]:
        """From the shortest, so that who runs out of time has all that is short."""
        places = [
            (level, way, n)
            for n in sorted(set(self.lengths))
            for way in self.ways
            for level in self.levels
        ]
        return [
            BenchCell(*place, self.batch, self.heads, self.width, self.causal) for place in places
        ]


@dataclass(frozen=True)
class BenchRow:
    """One contender in one cell.

    seconds     the median, or those of the one call where there were no rounds; `best` the least
    faster      how many times faster than dense SDPA in the same rounds
    ahead       of a peer: how many times faster ours is
    model       seconds that the formula gives at the peaks of this machine; `reached` the share of that speed
    efficiency  density times `faster`: 1 means that a score costs as much as in the dense kernel
    memory      bytes at the peak, in a process of its own; `formula` what they are by formula
    why         the reason where it was not measured
    """

    name: str
    of: str
    cell: BenchCell
    threads: int
    seconds: float | None = None
    best: float | None = None
    faster: Ratio | None = None
    ahead: Ratio | None = None
    density: float | None = None
    model: float | None = None
    memory: int | None = None
    formula: float | None = None
    why: str | None = None

    @property
    def reached(self) -> float | None:
        """See above."""
        return None if self.model is None or not self.seconds else self.model / self.seconds

    @property
    def efficiency(self) -> float | None:
        """See above."""
        return (
            None
            if self.density is None or self.faster is None
            else self.density * self.faster.median
        )

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        found = asdict(replace(self, faster=None, ahead=None)) | {
            "reached": self.reached,
            "efficiency": self.efficiency,
        }
        for key, value in (("faster", self.faster), ("ahead", self.ahead)):
            found[key] = None if value is None else value._asdict()
        return found.pop("cell") | found


@dataclass
class BenchResult:
    """What was measured so far; `ended` says how it came to an end."""

    plan: BenchPlan
    peaks: list[PeakThroughput]
    loads: list[MachineLoad]
    rows: list[BenchRow] = field(default_factory=list)
    ended: str = STOPPED

    def crossovers(self) -> list[dict[str, Any]]:
        """From which length on each is never slower than dense SDPA, and up to which length that was looked at."""
        found = []
        measured = [row for row in self.rows if row.faster is not None]
        for (name, level, way, count), rows in groupby(sorted(measured, key=_line), _line):
            points = [
                (row.cell.length, row.faster.median) for row in rows if row.faster is not None
            ]
            line = {"name": name, "level": level, "way": way, "threads": count}
            longest, several = max(n for n, _ in points), len(points) > 1
            found.append(
                line | {"faster_from": crossover(points), "up_to": longest, "several": several}
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """As plain values; `schema` is raised whenever a key changes its meaning."""
        plan = vars(self.plan) | {
            "groups": [[c.label for c in group] for group in self.plan.groups]
        }
        return {
            "schema": SCHEMA,
            "environment": environment(),
            "ended": self.ended,
            "plan": plan,
            "peaks": [asdict(each) for each in self.peaks],
            "load": [asdict(each) | {"flags": each.flags()} for each in self.loads],
            "rows": [row.as_json() for row in self.rows],
            "crossovers": self.crossovers(),
        }


def _line(row: BenchRow) -> tuple[str, str, str, int]:
    return row.name, row.cell.level, row.cell.way, row.threads
