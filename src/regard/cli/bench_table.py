"""Tables of a measurement, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.bench.cell import DENSE
from regard.bench.machine import Peaks
from regard.bench.plan import DONE, Bench, Row
from regard.bench.stats import Ratio

HEADINGS = ("tokens", "name", "ms", "× dense", "", "seen", "of model", "MB", "formula")
BESIDE = "ours ahead"


def tell(found: Bench, to: Console) -> None:
    """The machine, a table for each way, level and number of threads, and the lengths from which on it pays."""
    for line in first_lines(found):
        to.print(Text(line, "yellow" if line.startswith("flagged") else ""), soft_wrap=True)
    for (way, level, threads), rows in tables(found.rows):
        to.print()
        title = f"{way}, {level}, {_many(threads, 'thread')}"
        to.print(table(title, rows) if any(row.seconds for row in rows) else f"{title}: nothing was measured")
        for name, why in reasons(rows):
            to.print(Text(f"  {name}: {why}", "dim"), soft_wrap=True)
    to.print()
    for line in (*crossing(found), *notes(found)):
        to.print(line, soft_wrap=True)
    if found.ended != DONE:
        to.print(Text(f"not all was measured: {found.ended}", "yellow"))


def first_lines(found: Bench) -> list[str]:
    """What the machine can do, and whether it was quiet."""
    plan = found.plan
    sizes = f"{plan.batch} x {plan.heads} heads x {plan.width}, float32{', causal' if plan.causal else ''}"
    sizes += "" if plan.clock == "wall" else f", seconds of the {plan.clock}"
    told = (("flagged before", found.loads[:1]), ("flagged after", found.loads[1:]))
    flags = [f"{when}: {'; '.join(load.flags())}" for when, loads in told for load in loads if load.flags()]
    return [*map(peak_line, found.peaks), sizes, *flags]


def peak_line(top: Peaks) -> str:
    """The two numbers that the model is made of."""
    return f"{_many(top.threads, 'thread')}: products {top.gemm / 1e9:.0f} GFLOP/s, exponentials {top.exp / 1e9:.2f} G/s"


def tables(rows: Sequence[Row]) -> list[tuple[tuple[str, str, int], list[Row]]]:
    """Rows that stand in one table, the shortest first."""
    keys = list(dict.fromkeys((row.cell.way, row.cell.level, row.threads) for row in rows))
    return [(key, [row for row in rows if (row.cell.way, row.cell.level, row.threads) == key]) for key in keys]


def table(title: str, rows: Sequence[Row]) -> Table:
    """Those that were measured; the same dense row once a length."""
    beside = any(row.of for row in rows)
    made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in (*HEADINGS, *((BESIDE,) if beside else ())):
        made.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
    for row in rows:
        if row.seconds is not None:
            made.add_row(*cells(row, beside), style="dim" if row.name == DENSE else "")
    return made


def cells(row: Row, beside: bool) -> list[str]:
    """A row as text."""
    faster, interval = _ratio(row.faster)
    found = [
        f"{row.cell.length:,}", row.name, _three(1e3 * (row.seconds or 0)), faster, interval,
        "" if row.density is None else f"{row.density:.1%}", "" if row.reached is None else f"{row.reached:.0%}",
        "" if row.memory is None else _three(row.memory / 1e6), "" if row.formula is None else _three(row.formula / 1e6),
    ]  # fmt: skip
    return found + ([" ".join(_ratio(row.ahead))] if beside else [])


def reasons(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Why some were not measured; those with the same reason at the same lengths together."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.why is not None and row.cell.length not in (known := lengths.setdefault((row.why, row.name), [])):
            known.append(row.cell.length)
    names: dict[tuple[str, str], list[str]] = {}
    for (why, name), found in lengths.items():
        names.setdefault((why, ", ".join(f"{n:,}" for n in found)), []).append(name)
    return [(f"{', '.join(each)} at {where}", why) for (why, where), each in names.items()]


def crossing(found: Bench) -> list[str]:
    """From which length on each is never slower than dense SDPA, where several were measured: a line each, all threads."""
    lines: dict[str, list[str]] = {}
    for each in found.crossovers():
        if each["several"]:
            told = "never" if each["faster_from"] is None else f"from {each['faster_from']:,} on"
            key = f"{each['name']}, {each['way']}, {each['level']}, up to {each['up_to']:,} tokens"
            lines.setdefault(key, []).append(f"{told} with {_many(each['threads'], 'thread')}")
    return [f"at least as fast as {DENSE}: {', '.join(told)}  ({key})" for key, told in lines.items()]


def notes(found: Bench) -> list[str]:
    """What the peers that were measured cannot do."""
    names = {row.name for row in found.rows if row.of}
    if not names:
        return []
    from regard.bench.peers import PEERS

    known = ((name, PEERS[name].cannot) for name in sorted(names) if name in PEERS)
    return [f"{name}: {'; '.join(f'{word}: {why}' for word, why in cannot.items())}" for name, cannot in known if cannot]


def _ratio(ratio: Ratio | None) -> tuple[str, str]:
    return ("", "") if ratio is None else (_three(ratio.median), f"[{_three(ratio.low)}, {_three(ratio.high)}]")


def _three(value: float) -> str:
    """Three figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
