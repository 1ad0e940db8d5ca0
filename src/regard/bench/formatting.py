"""Rows in words, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regard.bench.cell import DENSE
from regard.bench.machine import PeakThroughput
from regard.bench.plan import BenchResult, BenchRow
from regard.bench.stats import Ratio

HEADINGS = ("tokens", "name", "ms", "× dense", "", "seen", "of model", "MB", "formula")
BESIDE = "ours ahead"


def first_lines(found: BenchResult) -> list[str]:
    """What the machine can do, and whether it was quiet."""
    plan = found.plan
    sizes = f"{plan.batch} x {plan.heads} heads x {plan.width}, float32{', causal' if plan.causal else ''}"
    sizes += "" if plan.clock == "wall" else f", seconds of the {plan.clock}"
    told = (("flagged before", found.loads[:1]), ("flagged after", found.loads[1:]))
    flags = [
        f"{when}: {'; '.join(load.flags())}"
        for when, loads in told
        for load in loads
        if load.flags()
    ]
    return [*map(peak_line, found.peaks), sizes, *flags]


def peak_line(top: PeakThroughput) -> str:
    """The two numbers that the model is made of."""
    return f"{many(top.threads, 'thread')}: products {top.gemm / 1e9:.0f} GFLOP/s, exponentials {top.exp / 1e9:.2f} G/s"


def tables(rows: Sequence[BenchRow]) -> list[tuple[tuple[str, str, int], list[BenchRow]]]:
    """Rows that stand in one table, the shortest first."""
    keys = list(dict.fromkeys((row.cell.way, row.cell.level, row.threads) for row in rows))
    return [
        (key, [row for row in rows if (row.cell.way, row.cell.level, row.threads) == key])
        for key in keys
    ]


def cells(row: BenchRow, beside: bool) -> list[str]:
    """A row as text."""
    faster, interval = _ratio(row.faster)
    found = [
        f"{row.cell.length:,}",
        row.name,
        _three(1e3 * (row.seconds or 0)),
        faster,
        interval,
        "" if row.density is None else f"{row.density:.1%}",
        "" if row.reached is None else f"{row.reached:.0%}",
        "" if row.memory is None else _three(row.memory / 1e6),
        "" if row.formula is None else _three(row.formula / 1e6),
    ]
    return found + ([" ".join(_ratio(row.ahead))] if beside else [])


def reasons(rows: Iterable[BenchRow]) -> list[tuple[str, str]]:
    """Why some were not measured; those with the same reason at the same lengths together."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.why is not None and row.cell.length not in (
            known := lengths.setdefault((row.why, row.name), [])
        ):
            known.append(row.cell.length)
    names: dict[tuple[str, str], list[str]] = {}
    for (why, name), found in lengths.items():
        names.setdefault((why, ", ".join(f"{n:,}" for n in found)), []).append(name)
    return [(f"{', '.join(each)} at {where}", why) for (why, where), each in names.items()]


def crossing(found: BenchResult) -> list[str]:
    """From which length on each is never slower than dense SDPA, where several were measured: a line each, all threads."""
    lines: dict[str, list[str]] = {}
    for each in found.crossovers():
        if each["several"]:
            told = "never" if each["faster_from"] is None else f"from {each['faster_from']:,} on"
            key = f"{each['name']}, {each['way']}, {each['level']}, up to {each['up_to']:,} tokens"
            lines.setdefault(key, []).append(f"{told} with {many(each['threads'], 'thread')}")
    return [
        f"at least as fast as {DENSE}: {', '.join(told)}  ({key})" for key, told in lines.items()
    ]


def notes(found: BenchResult) -> list[str]:
    """What the peers that were measured cannot do."""
    names = {row.name for row in found.rows if row.of}
    if not names:
        return []
    from regard.bench.peers import PEERS

    known = ((name, PEERS[name].cannot) for name in sorted(names) if name in PEERS)
    return [
        f"{name}: {'; '.join(f'{word}: {why}' for word, why in cannot.items())}"
        for name, cannot in known
        if cannot
    ]


def _ratio(ratio: Ratio | None) -> tuple[str, str]:
    return (
        ("", "")
        if ratio is None
        else (_three(ratio.median), f"[{_three(ratio.low)}, {_three(ratio.high)}]")
    )


def _three(value: float) -> str:
    """Three figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def many(count: int, what: str) -> str:
    """1 thread, 2 threads."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
