"""Run a benchmark until its budget of time or memory is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from regard.bench.cell import DENSE, BenchCell, CallEstimate, Contender, prepare_call
from regard.bench.contenders import DenseContender
from regard.bench.formatting import pluralize
from regard.bench.machine import (
    PeakThroughput,
    device_memory,
    measure_load,
    measure_peaks,
    torch_threads,
)
from regard.bench.plan import CLOCKS, DONE, INTERRUPTED, SPENT, BenchPlan, BenchResult, BenchRow
from regard.bench.probe import (
    CALL_ERRORS,
    ProbeRefused,
    ProbeResult,
    ProbeTimeout,
    preload,
    probe,
)
from regard.bench.stats import MAX_ROUNDS, Times, paired_ratio, time_interleaved

MEMORY_FRACTION = 0.8  # of the available memory, the default limit of a call
MAX_CELL_SECONDS = 3.0  # of a cell, once every contender has had enough rounds
DECODE_STEPS = 32  # tokens per turn of decoding: consecutive ones find the CPU cache warm

OnProgress = Callable[[str, float], None]


def start_bench(plan: BenchPlan, *, force: bool = False) -> BenchResult:
    """Check the load of the machine and measure its peaks; ValueError if it is busy."""
    load = measure_load()
    if load.problems() and not force:
        raise ValueError(
            f"The machine is busy: {'; '.join(load.problems())}. Wait, or use --force to measure "
            "anyway; the results are flagged."
        )
    modules = {each.module for group in plan.groups for each in group if each.module is not None}
    preload(sorted(modules))  # before the budget starts
    peaks = []
    for count in plan.threads:
        with torch_threads(count):
            clock = CLOCKS[plan.clock]
            peaks.append(measure_peaks(clock=clock, device=plan.device, dtype=plan.dtype))
    return BenchResult(plan, peaks, [load])


def run_bench(
    bench: BenchResult,
    on_progress: OnProgress = lambda description, fraction: None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fill `bench.rows`. An interrupt leaves the rows measured so far."""
    bench.ended = INTERRUPTED
    runner = BenchRunner(bench, on_progress, clock)
    runner.run()
    # the load average is now that of the benchmark itself
    bench.loads.append(replace(measure_load(seconds=0.2), average=None))
    bench.ended = SPENT if runner.budget_exhausted else DONE


class BenchRunner:
    """Measures all cells of a plan and keeps track of the time they take."""

    def __init__(
        self, bench: BenchResult, on_progress: OnProgress, clock: Callable[[], float]
    ) -> None:
        self.bench, self.plan, self.on_progress, self.clock = bench, bench.plan, on_progress, clock
        self.deadline = clock() + bench.plan.budget
        self.budget_exhausted = False
        self.memory_limit = bench.plan.memory_limit or int(
            MEMORY_FRACTION * device_memory(bench.plan.device)
        )
        # tokens and seconds of the longest call so far, by label, scope and mode
        self.longest: dict[tuple[str, str, str], tuple[int, float]] = {}
        # dense attention is part of every group; counting pairs of a million tokens takes a while
        self.probes: dict[tuple[str, BenchCell], ProbeResult] = {}
        self.estimates: dict[tuple[str, BenchCell], CallEstimate | None] = {}

    @property
    def seconds_left(self) -> float:
        """Remaining time of the budget."""
        return self.deadline - self.clock()

    def run(self) -> None:
        """Measure every group in every cell that fits it."""
        todo = [
            (cell, group)
            for cell in self.plan.cells()
            for group in self.plan.groups
            if all(cell.scope in contender.scopes for contender in group)
        ]
        for done, (cell, group) in enumerate(todo):
            description = f"{cell.length:,} tokens, {cell.mode}, {cell.scope}: {group[0].label}"
            self.on_progress(description, done / len(todo))
            self.measure_cell(cell, group, self.seconds_left / (len(todo) - done))

    def measure_cell(self, cell: BenchCell, group: Sequence[Contender], seconds: float) -> None:
        """Probe every contender of a group, then time those that can run, at each thread count."""
        dense = DenseContender()
        contenders = [dense, *(each for each in group if each.label != dense.label)]
        probes: dict[str, ProbeResult] = {}
        refusals: dict[str, str] = {}
        for contender in contenders:
            try:
                probes[contender.label] = self.probe(contender, cell)
            except ProbeRefused as refusal:
                refusals[contender.label] = str(refusal)
        if not self.plan.rounds:
            peaks = max(self.bench.peaks, key=lambda peaks: peaks.threads)  # those of the probe
            times = {name: [result.seconds] for name, result in probes.items()}
            self.add_rows(cell, contenders, times, probes, refusals, peaks)
            return
        for count, peaks in zip(self.plan.threads, self.bench.peaks, strict=True):
            share = seconds / len(self.plan.threads)
            with torch_threads(count):
                self.time_cell(cell, contenders, probes, dict(refusals), share, peaks)

    def probe(self, contender: Contender, cell: BenchCell) -> ProbeResult:
        """Probe a call, unless it is known to take too much time or memory."""
        if (contender.label, cell) in self.probes:
            return self.probes[contender.label, cell]
        key, estimate = (contender.label, cell.scope, cell.mode), self.estimate(contender, cell)
        lower_bound = 0.0
        if estimate is not None:
            if estimate.bytes > self.memory_limit:
                raise ProbeRefused(
                    f"it needs {estimate.bytes / 1e9:,.1f} GB in theory, above the memory limit of "
                    f"{self.memory_limit / 1e9:,.1f} GB"
                )
            lower_bound = min(
                peaks.seconds(estimate.flops, estimate.exps) for peaks in self.bench.peaks
            )
        n, seconds = self.longest.get(key, (1, 0.0))
        scaled = seconds * max(1.0, cell.length / n)  # no mixer grows slower than linearly
        self.check_time(max(lower_bound, scaled), self.min_calls(cell))
        begin = self.clock()
        try:
            result = probe(
                contender,
                cell,
                threads=max(self.plan.threads),
                limit=self.memory_limit,
                seconds=self.seconds_left / self.min_calls(cell),
            )
        except ProbeTimeout:
            self.longest[key], self.budget_exhausted = (cell.length, self.seconds_left), True
            raise
        if contender.compiles:  # compilation does not count to the budget
            self.deadline += self.clock() - begin - result.seconds
        self.longest[key] = (cell.length, result.seconds)
        self.probes[contender.label, cell] = result
        return result

    def min_calls(self, cell: BenchCell) -> int:
        """Return the least number of calls of each contender, including the warm-up."""
        return self.plan.rounds * calls_per_turn(cell) + 1

    def estimate(self, contender: Contender, cell: BenchCell) -> CallEstimate | None:
        """Return the theoretical cost of a call, computed once."""
        key = (contender.label, cell)
        if key not in self.estimates:
            self.estimates[key] = contender.estimate(cell)
        return self.estimates[key]

    def check_time(self, seconds: float, calls: int) -> None:
        """Raise `ProbeRefused` if that many calls do not fit into the rest of the budget."""
        left = self.seconds_left
        if left <= 0 or seconds * calls > left:
            self.budget_exhausted = True
            if left <= 0:
                raise ProbeRefused(SPENT)
            each = f"{pluralize(calls, 'call')} of at least {seconds:.2g} s"
            raise ProbeRefused(f"{each} would exceed the remaining {left:.0f} s of the budget")

    def time_cell(
        self,
        cell: BenchCell,
        contenders: Sequence[Contender],
        probes: dict[str, ProbeResult],
        refusals: dict[str, str],
        seconds: float,
        peaks: PeakThroughput,
    ) -> None:
        """Time the contenders interleaved; without time for all, leave out the slowest."""
        calls: dict[str, Callable[[], object]] = {}
        probed = [contender for contender in contenders if contender.label in probes]
        for contender in sorted(probed, key=lambda each: probes[each.label].seconds):
            name = contender.label
            try:
                round_seconds = sum(probes[other].seconds for other in (*calls, name))
                slowdown = max(self.plan.threads) / peaks.threads  # probes use all threads
                self.check_time(round_seconds * slowdown, self.min_calls(cell))
                calls[name] = prepare_call(contender, cell)
            except ProbeRefused as refusal:
                refusals[name] = str(refusal)
            except CALL_ERRORS as error:
                refusals[name] = " ".join(str(error).split())
        times: Times = {}
        if calls:
            repeat = calls_per_turn(cell)
            times = time_interleaved(
                {each.label: calls[each.label] for each in contenders if each.label in calls},
                min(MAX_CELL_SECONDS, seconds),
                min_rounds=self.plan.rounds,
                # a KV cache must not grow far beyond the length of the cell
                max_rounds=max(self.plan.rounds, MAX_ROUNDS // repeat),
                repeat=repeat,
                clock=CLOCKS[self.plan.clock],
            )
        self.add_rows(cell, contenders, times, probes, refusals, peaks)

    def add_rows(
        self,
        cell: BenchCell,
        contenders: Sequence[Contender],
        times: Times,
        probes: dict[str, ProbeResult],
        refusals: dict[str, str],
        peaks: PeakThroughput,
    ) -> None:
        """Append a row for each contender: theory, probe and times, or the reason for none."""
        for contender in contenders:
            name = contender.label
            reference = (contender.reference or contenders[1].label) if contender.is_peer else ""
            row = BenchRow(name, reference, cell, peaks.threads, reason=refusals.get(name))
            if (estimate := self.estimate(contender, cell)) is not None:
                row = replace(
                    row,
                    density=estimate.density,
                    estimated_bytes=estimate.bytes,
                    bound_seconds=peaks.seconds(estimate.flops, estimate.exps),
                )
            if name in probes:
                row = replace(row, peak_bytes=probes[name].bytes)
            if name in times:
                own = times[name]
                row = replace(row, seconds=median(own), best_seconds=min(own))
                if len(own) > 1 and DENSE in times and name != DENSE:
                    row = replace(row, speedup=paired_ratio(times[DENSE], own))
                if len(own) > 1 and reference in times:
                    row = replace(row, lead=paired_ratio(own, times[reference]))
            self.bench.rows.append(row)


def calls_per_turn(cell: BenchCell) -> int:
    """Return how often a contender is called before it is the turn of the next."""
    return DECODE_STEPS if cell.mode == "decode" else 1
