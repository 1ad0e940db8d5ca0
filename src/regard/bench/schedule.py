"""The order of a measurement, until a budget of time or memory is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from regard.bench.cell import DENSE, BenchCell, CallEstimate, Contender, prepare_call
from regard.bench.contenders import DenseContender
from regard.bench.formatting import many
from regard.bench.machine import (
    PeakThroughput,
    available_memory,
    measure_load,
    measure_peaks,
    torch_threads,
)
from regard.bench.plan import CLOCKS, DONE, SPENT, STOPPED, BenchPlan, BenchResult, BenchRow
from regard.bench.probe import EXCUSES, ProbeRefused, ProbeResult, probe, warm
from regard.bench.stats import MOST, Times, paired_ratio, time_interleaved

SHARE = 0.8  # of the memory that is free
LONG = 3.0  # seconds of a cell, at most, once each was measured often enough
STEPS = 32  # tokens of a turn of decoding: they follow each other, and find in the cache what the one before left there


def start_bench(plan: BenchPlan, *, anyway: bool = False) -> BenchResult:
    """Look at the machine; a busy one raises, unless it is to be measured anyway."""
    now = measure_load()
    if now.against() and not anyway:
        raise ValueError(
            f"{'; '.join(now.against())}: wait, or measure --anyway, and the result will be flagged"
        )
    modules = {each.module for group in plan.groups for each in group if each.module is not None}
    warm(sorted(modules))  # so that it counts to no budget
    found = []
    for count in plan.threads:
        with torch_threads(count):
            found.append(measure_peaks(clock=CLOCKS[plan.clock]))
    return BenchResult(plan, found, [now])


Watch = Callable[[str, float], None]


def run_bench(
    bench: BenchResult,
    watch: Watch = lambda what, share: None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fill `bench.rows`.  An interrupt leaves what there is; `watch` is told what is measured, and the share that is done."""
    bench.ended = STOPPED
    todo = _Todo(bench, watch, clock)
    todo.all()
    bench.loads.append(
        replace(measure_load(seconds=0.2), average=None)
    )  # by now the average is of this measurement itself
    bench.ended = SPENT if todo.over else DONE


class _Todo:
    """The order of things, and what is known of the time that each will take."""

    def __init__(self, bench: BenchResult, watch: Watch, clock: Callable[[], float]) -> None:
        self.bench, self.plan, self.watch, self.clock = bench, bench.plan, watch, clock
        self.end, self.over = clock() + bench.plan.budget, False
        self.limit = bench.plan.memory or int(SHARE * available_memory())
        self.took: dict[
            tuple[str, str, str], tuple[int, float]
        ] = {}  # the longest call so far: tokens and seconds
        self.seen: dict[
            tuple[str, BenchCell], ProbeResult
        ] = {}  # dense attention stands in every group
        self.known: dict[
            tuple[str, BenchCell], CallEstimate | None
        ] = {}  # to count the pairs of a million tokens takes a while

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.end - self.clock()

    def all(self) -> None:
        """Every cell, with every group, at every number of threads."""
        pairs = [(cell, group) for cell in self.plan.cells() for group in self.plan.groups]
        places = [
            (cell, group)
            for cell, group in pairs
            if all(cell.level in each.levels for each in group)
        ]
        for done, (cell, group) in enumerate(places):
            self.watch(
                f"{cell.length:,} tokens, {cell.way}, {cell.level}: {group[0].label}",
                done / len(places),
            )
            self.cell(cell, group, self.left / (len(places) - done))

    def cell(self, cell: BenchCell, group: Sequence[Contender], seconds: float) -> None:
        """Probe all of a group, then let those that can take turns."""
        known: dict[str, ProbeResult] = {}
        missing: dict[str, str] = {}
        everyone = [DenseContender(), *(c for c in group if c.label != DenseContender().label)]
        for contender in everyone:
            try:
                known[contender.label] = self.probed(contender, cell)
            except ProbeRefused as refusal:
                missing[contender.label] = str(refusal)
        if not self.plan.rounds:
            top = max(self.bench.peaks, key=lambda top: top.threads)  # that of the probe
            self.rows(
                cell,
                everyone,
                {name: [found.seconds] for name, found in known.items()},
                known,
                missing,
                top,
            )
            return
        for count, top in zip(self.plan.threads, self.bench.peaks, strict=True):
            with torch_threads(count):
                self.turns(
                    cell, everyone, known, dict(missing), seconds / len(self.plan.threads), top
                )

    def probed(self, contender: Contender, cell: BenchCell) -> ProbeResult:
        """Of one call, unless it is plain before that it is too long or too large."""
        if (contender.label, cell) in self.seen:
            return self.seen[contender.label, cell]
        key, needs = (contender.label, cell.level, cell.way), self.needs(contender, cell)
        if needs is not None and needs.bytes > self.limit:
            raise ProbeRefused(
                f"it needs {needs.bytes / 1e9:,.1f} GB by formula, and {self.limit / 1e9:,.1f} may be taken"
            )
        n, took = self.took.get(key, (1, 0.0))
        least = (
            0.0
            if needs is None
            else min(top.seconds(needs.flops, needs.exps) for top in self.bench.peaks)
        )
        self.afford(
            max(least, took * max(1.0, cell.length / n)), self.calls(cell)
        )  # no mechanism grows by less
        begin = self.clock()
        try:
            seconds = self.left / self.calls(cell)
            found = probe(
                contender, cell, threads=max(self.plan.threads), limit=self.limit, seconds=seconds
            )
        except ProbeRefused as refusal:
            if "a call takes more" in str(refusal):
                self.took[key], self.over = (cell.length, self.left), True
            raise
        if contender.compiles:  # that counts to no budget
            self.end += self.clock() - begin - found.seconds
        self.took[key], self.seen[contender.label, cell] = (cell.length, found.seconds), found
        return found

    def calls(self, cell: BenchCell) -> int:
        """How often each is called at least: a round to warm up comes first."""
        return self.plan.rounds * _at_once(cell) + 1

    def needs(self, contender: Contender, cell: BenchCell) -> CallEstimate | None:
        """By formula, asked once."""
        if (contender.label, cell) not in self.known:
            self.known[contender.label, cell] = contender.needs(cell)
        return self.known[contender.label, cell]

    def afford(self, seconds: float, calls: int) -> None:
        """A call of so many seconds must fit into what is left, as often as it takes to say something of it."""
        if seconds * calls > self.left or self.left <= 0:
            self.over = True
            each = f"{many(calls, 'call')} of {seconds:.2g} s or more"
            few = f"{each} {'does' if calls == 1 else 'do'} not fit into the {self.left:.0f} s left of the budget"
            raise ProbeRefused(SPENT if self.left <= 0 else few)

    def turns(
        self,
        cell: BenchCell,
        everyone: Sequence[Contender],
        known: dict[str, ProbeResult],
        missing: dict[str, str],
        seconds: float,
        top: PeakThroughput,
    ) -> None:
        """The slowest stay away where there is no time for all."""
        calls: dict[str, Callable[[], object]] = {}
        for contender in sorted(
            (c for c in everyone if c.label in known), key=lambda c: known[c.label].seconds
        ):
            name = contender.label
            try:
                together = sum(known[other].seconds for other in (*calls, name))
                self.afford(together * max(self.plan.threads) / top.threads, self.calls(cell))
                calls[name] = prepare_call(contender, cell)
            except ProbeRefused as refusal:
                missing[name] = str(refusal)
            except EXCUSES as error:
                missing[name] = " ".join(str(error).split())
        order = {c.label: calls[c.label] for c in everyone if c.label in calls}
        steps, clock = _at_once(cell), CLOCKS[self.plan.clock]
        least, most = (
            self.plan.rounds,
            max(self.plan.rounds, MOST // steps),
        )  # a cache must not grow beyond what it is for
        times = (
            time_interleaved(
                order, min(LONG, seconds), least=least, most=most, at_once=steps, clock=clock
            )
            if order
            else {}
        )
        self.rows(cell, everyone, times, known, missing, top)

    def rows(
        self,
        cell: BenchCell,
        everyone: Sequence[Contender],
        times: Times,
        known: dict[str, ProbeResult],
        missing: dict[str, str],
        top: PeakThroughput,
    ) -> None:
        """One for each."""
        for each in everyone:
            ours = (each.of or everyone[1].label) if each.foreign else ""
            row = BenchRow(each.label, ours, cell, top.threads, why=missing.get(each.label))
            self.bench.rows.append(
                _told(row, self.needs(each, cell), top, times, known.get(each.label))
            )


def _at_once(cell: BenchCell) -> int:
    return STEPS if cell.way == "decode" else 1


def _told(
    row: BenchRow,
    needs: CallEstimate | None,
    top: PeakThroughput,
    times: Times,
    probed: ProbeResult | None,
) -> BenchRow:
    """The row with what the formula says, what the probe found, and the times."""
    if needs is not None:
        model = top.seconds(needs.flops, needs.exps)
        row = replace(row, density=needs.density, formula=needs.bytes, model=model)
    row = replace(row, memory=None if probed is None else probed.bytes)
    mine = times.get(row.name)
    if mine is None:
        return row
    paired = len(mine) > 1
    faster = (
        paired_ratio(times[DENSE], mine)
        if paired and DENSE in times and row.name != DENSE
        else None
    )
    ahead = paired_ratio(mine, times[row.of]) if paired and row.of in times else None
    return replace(row, seconds=median(mine), best=min(mine), faster=faster, ahead=ahead)
