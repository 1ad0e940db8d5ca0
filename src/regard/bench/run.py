"""A measurement: which contenders in which cells, at how many threads, until a budget of time or memory is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from statistics import median
from typing import Any

from regard.bench.cell import LEVELS, WAYS, Cell, Contender, Dense, Needs, ready
from regard.bench.machine import Load, Peaks, cores, environment, free_bytes, load, peaks, threads
from regard.bench.probe import EXCUSES, Probed, Refused, probe
from regard.bench.stats import LEAST, Ratio, crossover, in_turns, ratio
from regard.errors import check_choice, check_positive, check_whole

LENGTHS = tuple(1 << power for power in range(7, 17))  # 128 ... 65,536
LONGEST = 1 << 24
SCHEMA = 1
SHARE = 0.8  # of the memory that is free
LONG = 3.0  # seconds of a cell, at most, once each was measured often enough
DONE, SPENT, STOPPED = "done", "the budget was used up", "stopped by hand"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    groups    contenders that take turns, dense SDPA beside them; where there are peers, the first is ours
    threads   numbers of threads
    budget    seconds in all; `memory` bytes of one call, a share of what is free unless given
    """

    groups: Sequence[Sequence[Contender]]
    lengths: Sequence[int] = LENGTHS
    levels: Sequence[str] = tuple(LEVELS)
    ways: Sequence[str] = ("forward", "training")
    threads: Sequence[int] = field(default_factory=lambda: tuple(sorted({1, cores()})))
    batch: int = 1
    heads: int = 8
    width: int = 64
    causal: bool = False
    budget: float = 120.0
    memory: int | None = None

    def __post_init__(self) -> None:
        check_whole(1, batch=self.batch, heads=self.heads, width=self.width)
        check_positive("budget", self.budget)
        for length in self.lengths:
            check_whole(1, length=length)
            if length > LONGEST:
                raise ValueError(f"lengths may be at most {LONGEST:,}, not {length:,}")
        for level in self.levels:
            check_choice("level", level, LEVELS)
        for way in self.ways:
            check_choice("way", way, WAYS)
        for count in self.threads:
            check_whole(1, threads=count)
            if count > cores():
                raise ValueError(f"threads may be at most {cores()}, the cores of this machine, not {count}")
        for name in ("groups", "lengths", "levels", "ways", "threads"):
            if not getattr(self, name):
                raise ValueError(f"there is nothing to measure: {name} is empty")

    def cells(self) -> list[Cell]:
        """From the shortest, so that who runs out of time has all that is short."""
        sizes = {"batch": self.batch, "heads": self.heads, "width": self.width, "causal": self.causal}
        lengths = sorted(set(self.lengths))
        return [Cell(level, way, n, **sizes) for n in lengths for way in self.ways for level in self.levels]


@dataclass(frozen=True)
class Row:
    """One contender in one cell.

    seconds     the median; `best` the least
    faster      how many times faster than dense SDPA in the same rounds
    ahead       of a peer: how many times faster ours is
    model       seconds that the formula gives at the peaks of this machine; `reached` the share of that speed
    efficiency  density times `faster`: 1 means that a score costs as much as in the dense kernel
    memory      bytes at the peak, in a process of its own; `formula` what they are by formula
    why         the reason where it was not measured
    """

    name: str
    of: str
    cell: Cell
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
        return None if self.density is None or self.faster is None else self.density * self.faster.median

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        found = asdict(replace(self, faster=None, ahead=None)) | {"reached": self.reached, "efficiency": self.efficiency}
        for key, value in (("faster", self.faster), ("ahead", self.ahead)):
            found[key] = None if value is None else value._asdict()
        return found.pop("cell") | found


@dataclass
class Bench:
    """What was measured so far; `ended` says how it came to an end."""

    plan: Plan
    peaks: list[Peaks]
    loads: list[Load]
    rows: list[Row] = field(default_factory=list)
    ended: str = STOPPED

    def crossovers(self) -> list[dict[str, Any]]:
        """From which length on each is never slower than dense SDPA, and up to which length that was looked at."""
        found = []
        key = _line
        measured = [row for row in self.rows if row.faster is not None and row.name != Dense().label]
        for (name, level, way, count), rows in groupby(sorted(measured, key=key), key):
            points = [(row.cell.length, row.faster.median) for row in rows if row.faster is not None]
            line = {"name": name, "level": level, "way": way, "threads": count}
            found.append(line | {"faster_from": crossover(points), "up_to": max(n for n, _ in points)})
        return found

    def as_json(self) -> dict[str, Any]:
        """As plain values; `schema` is raised whenever a key changes its meaning."""
        plan = asdict(replace(self.plan, groups=())) | {"groups": [[c.label for c in group] for group in self.plan.groups]}
        return {
            "schema": SCHEMA, "environment": environment(), "ended": self.ended, "plan": plan,
            "peaks": [asdict(each) for each in self.peaks],
            "load": [asdict(each) | {"flags": each.flags()} for each in self.loads],
            "rows": [row.as_json() for row in self.rows], "crossovers": self.crossovers(),
        }  # fmt: skip


def _line(row: Row) -> tuple[str, str, str, int]:
    return row.name, row.cell.level, row.cell.way, row.threads


def begin(plan: Plan, *, anyway: bool = False) -> Bench:
    """Look at the machine; a busy one raises, unless it is to be measured anyway."""
    now = load()
    if now.against() and not anyway:
        raise ValueError(f"{'; '.join(now.against())}: wait, or measure --anyway, and the result will be flagged")
    found = []
    for count in plan.threads:
        with threads(count):
            found.append(peaks())
    return Bench(plan, found, [now])


Watch = Callable[[str, float], None]


def run(bench: Bench, watch: Watch = lambda what, share: None, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Fill `bench.rows`.  An interrupt leaves what there is; `watch` is told what is measured, and the share that is done."""
    bench.ended = STOPPED
    todo = _Todo(bench, watch, clock)
    todo.all()
    bench.loads.append(load(seconds=0.2))
    bench.ended = SPENT if todo.over else DONE


class _Todo:
    """The order of things, and what is known of the time that each will take."""

    def __init__(self, bench: Bench, watch: Watch, clock: Callable[[], float]) -> None:
        self.bench, self.plan, self.watch, self.clock = bench, bench.plan, watch, clock
        self.end, self.over = clock() + bench.plan.budget, False
        self.limit = bench.plan.memory or int(SHARE * free_bytes())
        self.took: dict[tuple[str, str, str], tuple[int, float]] = {}  # the longest call so far: tokens and seconds

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.end - self.clock()

    def all(self) -> None:
        """Every cell, with every group, at every number of threads."""
        pairs = [(cell, group) for cell in self.plan.cells() for group in self.plan.groups]
        places = [(cell, group) for cell, group in pairs if all(cell.level in each.levels for each in group)]
        for done, (cell, group) in enumerate(places):
            self.watch(f"{cell.length:,} tokens, {cell.way}, {cell.level}: {group[0].label}", done / len(places))
            self.cell(cell, group, self.left / (len(places) - done))

    def cell(self, cell: Cell, group: Sequence[Contender], seconds: float) -> None:
        """Probe all of a group, then let those that can take turns."""
        known: dict[str, Probed] = {}
        missing: dict[str, str] = {}
        everyone = [Dense(), *(c for c in group if c.label != Dense().label)]
        for contender in everyone:
            try:
                known[contender.label] = self.probed(contender, cell)
            except Refused as refusal:
                missing[contender.label] = str(refusal)
        for count, top in zip(self.plan.threads, self.bench.peaks, strict=True):
            with threads(count):
                self.turns(cell, everyone, known, dict(missing), seconds / len(self.plan.threads), top)

    def probed(self, contender: Contender, cell: Cell) -> Probed:
        """Of one call, unless it is plain before that it is too long or too large."""
        key, needs = (contender.label, cell.level, cell.way), contender.needs(cell)
        n, took = self.took.get(key, (1, 0.0))
        self.afford(took * max(1.0, cell.length / n))  # no mechanism grows by less
        if needs is not None and needs.bytes > self.limit:
            raise Refused(f"it needs {needs.bytes / 1e9:,.1f} GB by formula, and {self.limit / 1e9:,.1f} may be taken")
        try:
            found = probe(contender, cell, threads=max(self.plan.threads), limit=self.limit, seconds=self.left / (LEAST + 1))
        except Refused as refusal:
            if "a call takes more" in str(refusal):
                self.took[key], self.over = (cell.length, self.left), True
            raise
        self.took[key] = (cell.length, found.seconds)
        return found

    def afford(self, seconds: float) -> None:
        """A call of so many seconds must fit into what is left, as often as it takes to say something of it."""
        if seconds * (LEAST + 1) > self.left or self.left <= 0:
            self.over = True
            rest = f"{max(0.0, self.left):.0f} s are left of the budget"
            raise Refused(f"a call takes {seconds:.2g} s or more, {LEAST + 1} are needed, and {rest}" if seconds else rest)

    def turns(
        self, cell: Cell, everyone: Sequence[Contender], known: dict[str, Probed], missing: dict[str, str],
        seconds: float, top: Peaks,
    ) -> None:  # fmt: skip
        """The slowest stay away where there is no time for all."""
        calls: dict[str, Callable[[], object]] = {}
        for contender in sorted((c for c in everyone if c.label in known), key=lambda c: known[c.label].seconds):
            name = contender.label
            try:
                together = sum(known[other].seconds for other in (*calls, name))
                self.afford(together * max(self.plan.threads) / top.threads)
                calls[name] = ready(contender, cell)
            except Refused as refusal:
                missing[name] = str(refusal)
            except EXCUSES as error:
                missing[name] = " ".join(str(error).split())
        order = {c.label: calls[c.label] for c in everyone if c.label in calls}
        times = in_turns(order, min(LONG, seconds)) if order else {}
        self.bench.rows += [
            _row(c, everyone, cell, top, times, known.get(c.label), missing.get(c.label)) for c in everyone
        ]


def _row(
    contender: Contender, everyone: Sequence[Contender], cell: Cell, top: Peaks, times: dict[str, list[float]],
    probed: Probed | None, why: str | None,
) -> Row:  # fmt: skip
    name, dense, ours = contender.label, everyone[0].label, everyone[1].label if contender.foreign else ""
    needs: Needs | None = contender.needs(cell)
    row = Row(
        name, ours, cell, top.threads, why=why, memory=None if probed is None else probed.bytes,
        density=None if needs is None else needs.density, formula=None if needs is None else needs.bytes,
        model=None if needs is None else top.seconds(needs.flops, needs.exps),
    )  # fmt: skip
    mine = times.get(name)
    if mine is None:
        return row
    faster = ratio(times[dense], mine) if dense in times and name != dense else None
    ahead = ratio(mine, times[ours]) if ours in times else None
    return replace(row, seconds=median(mine), best=min(mine), faster=faster, ahead=ahead)
