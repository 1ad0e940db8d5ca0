"""Tables of a measurement, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.bench.cell import DENSE
from regard.bench.formatting import (
    BESIDE,
    HEADINGS,
    cells,
    crossing,
    first_lines,
    many,
    notes,
    reasons,
    tables,
)
from regard.bench.plan import DONE, BenchResult, BenchRow

WIDEST = 1000  # characters of a line


def print_bench(found: BenchResult, to: Console) -> None:
    """The machine, a table for each way, level and number of threads, and the lengths from which on it pays."""
    for line in first_lines(found):
        to.print(Text(line, "yellow" if line.startswith("flagged") else ""), soft_wrap=True)
    for (way, level, threads), rows in tables(found.rows):
        to.print()
        title = f"{way}, {level}, {many(threads, 'thread')}"
        if any(row.seconds for row in rows):
            made = table(title, rows)
            if not to.is_terminal:  # a file has no edge at which numbers would have to be cut
                to.width = max(
                    to.width, to.measure(made, options=to.options.update(max_width=WIDEST)).maximum
                )
            to.print(made)
        else:
            to.print(f"{title}: nothing was measured")
        for name, why in reasons(rows):
            to.print(Text(f"  {name}: {why}", "dim"), soft_wrap=True)
    to.print()
    for line in (*crossing(found), *notes(found)):
        to.print(line, soft_wrap=True)
    if found.ended != DONE:
        to.print(Text(f"not all was measured: {found.ended}", "yellow"))


def table(title: str, rows: Sequence[BenchRow]) -> Table:
    """Those that were measured; the same dense row once a length."""
    beside = any(row.of for row in rows)
    made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in (*HEADINGS, *((BESIDE,) if beside else ())):
        named = heading == "name"  # the one that may fold
        made.add_column(
            heading, justify="left" if named else "right", no_wrap=not named, overflow="fold"
        )
    for row in rows:
        if row.seconds is not None:
            made.add_row(*cells(row, beside), style="dim" if row.name == DENSE else "")
    return made
