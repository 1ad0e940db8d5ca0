"""A benchmark in words, the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regard.bench.cell import DENSE
from regard.bench.machine import PeakThroughput
from regard.bench.plan import BenchResult, BenchRow
from regard.bench.stats import Ratio

HEADER = (
    "tokens",
    "name",
    "ms",
    "speedup",
    "",
    "density",
    "of peak",
    "peak MB",
    "theory MB",
)
LEAD_HEADER = "lead of ours"


def summary_lines(bench: BenchResult) -> list[str]:
    """Return the peaks of the machine, the sizes of the calls, and flags of a busy machine."""
    plan = bench.plan
    sizes = f"batch {plan.batch}, {plan.heads} heads of {plan.head_dim}, float32"
    sizes += ", causal" if plan.causal else ""
    sizes += ", CPU seconds" if plan.clock == "cpu" else ""
    flags = []
    for i, load in enumerate(bench.loads):
        if load.flags():
            flags.append(f"flagged {'after' if i else 'before'}: {'; '.join(load.flags())}")
    return [*map(format_peaks, bench.peaks), sizes, *flags]


def format_peaks(peaks: PeakThroughput) -> str:
    """Return the peaks that theoretical times are computed from."""
    gemm, exp = peaks.gemm / 1e9, peaks.exp / 1e9
    threads = pluralize(peaks.threads, "thread")
    return f"{threads}: matrix products {gemm:.0f} GFLOP/s, exponentials {exp:.2f} G/s"


TableKey = tuple[str, str, int]  # mode, scope, threads


def group_rows(rows: Sequence[BenchRow]) -> list[tuple[TableKey, list[BenchRow]]]:
    """Return the rows of each table."""
    tables: dict[TableKey, list[BenchRow]] = {}
    for row in rows:
        tables.setdefault((row.cell.mode, row.cell.scope, row.threads), []).append(row)
    return list(tables.items())


def table_title(key: TableKey) -> str:
    """Return the title of a table."""
    mode, scope, threads = key
    return f"{mode}, {scope}, {pluralize(threads, 'thread')}"


def format_row(row: BenchRow, with_lead: bool) -> list[str]:
    """Return the cells of a table row; cells without a value are empty."""
    speedup, interval = format_ratio(row.speedup)
    cells = [
        f"{row.cell.length:,}",
        row.name,
        three_digits(1e3 * (row.seconds or 0)),
        speedup,
        interval,
        "" if row.density is None else f"{row.density:.1%}",
        "" if row.utilization is None else f"{row.utilization:.0%}",
        "" if row.peak_bytes is None else three_digits(row.peak_bytes / 1e6),
        "" if row.estimated_bytes is None else three_digits(row.estimated_bytes / 1e6),
    ]
    return [*cells, " ".join(format_ratio(row.lead))] if with_lead else cells


def missing_reasons(rows: Iterable[BenchRow]) -> list[tuple[str, str]]:
    """Return (names and lengths, reason) of what was not measured, equal reasons together."""
    lengths: dict[tuple[str, str], dict[int, None]] = {}
    for row in rows:
        if row.reason is not None:
            lengths.setdefault((row.reason, row.name), {})[row.cell.length] = None
    names: dict[tuple[str, str], list[str]] = {}
    for (reason, name), measured in lengths.items():
        names.setdefault((reason, ", ".join(f"{n:,}" for n in measured)), []).append(name)
    return [(f"{', '.join(group)} at {where}", reason) for (reason, where), group in names.items()]


def crossover_lines(bench: BenchResult) -> list[str]:
    """Return from which length on each contender is never slower than dense SDPA."""
    lines: dict[str, list[str]] = {}
    for each in bench.crossovers():
        if each["several"]:
            start = each["faster_from"]
            text = "never" if start is None else f"from {start:,}"
            key = (
                f"{each['name']}, {each['mode']}, {each['scope']}, "
                f"measured up to {each['max_length']:,} tokens"
            )
            threads = pluralize(each["threads"], "thread")
            lines.setdefault(key, []).append(f"{text} with {threads}")
    return [f"at least as fast as {DENSE} {', '.join(text)} ({key})" for key, text in lines.items()]


def peer_notes(bench: BenchResult) -> list[str]:
    """Return what the peers that were measured do not support."""
    names = {row.name for row in bench.rows if row.reference}
    if not names:
        return []
    from regard.bench.peers import PEERS

    notes = []
    for name in sorted(names & PEERS.keys()):
        limits = [f"{what}: {reason}" for what, reason in PEERS[name].limitations.items()]
        if limits:
            notes.append(f"{name}: {'; '.join(limits)}")
    return notes


def format_ratio(ratio: Ratio | None) -> tuple[str, str]:
    """Return a ratio and its interval: "2.5" and "[2.4, 2.6]"."""
    if ratio is None:
        return "", ""
    return (
        three_digits(ratio.median),
        f"[{three_digits(ratio.low)}, {three_digits(ratio.high)}]",
    )


def three_digits(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pluralize(count: int, noun: str) -> str:
    """Return "1 thread" or "2 threads"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
