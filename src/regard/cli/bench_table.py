"""Tables of a benchmark for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.bench.cell import DENSE
from regard.bench.formatting import (
    HEADER,
    LEAD_HEADER,
    crossover_lines,
    format_row,
    group_rows,
    missing_reasons,
    peer_notes,
    summary_lines,
    table_title,
)
from regard.bench.plan import DONE, BenchResult, BenchRow

MAX_WIDTH = 1000  # characters of a line in a file


def print_bench(bench: BenchResult, to: Console) -> None:
    """Print the machine, a table per mode, scope and thread count, and the crossover lengths."""
    for line in summary_lines(bench):
        to.print(Text(line, "yellow" if line.startswith("flagged") else ""), soft_wrap=True)
    for key, rows in group_rows(bench.rows):
        to.print()
        if any(row.seconds for row in rows):
            table = bench_table(table_title(key), rows)
            if not to.is_terminal:  # do not cut numbers in a file
                options = to.options.update(max_width=MAX_WIDTH)
                to.width = max(to.width, to.measure(table, options=options).maximum)
            to.print(table)
        else:
            to.print(f"{table_title(key)}: nothing was measured")
        for names, reason in missing_reasons(rows):
            to.print(Text(f"  {names}: {reason}", "dim"), soft_wrap=True)
    to.print()
    for line in (*crossover_lines(bench), *peer_notes(bench)):
        to.print(line, soft_wrap=True)
    if bench.ended != DONE:
        to.print(Text(f"incomplete: {bench.ended}", "yellow"))


def bench_table(title: str, rows: Sequence[BenchRow]) -> Table:
    """Return a table of the rows that were measured."""
    with_lead = any(row.reference for row in rows)
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in (*HEADER, *([LEAD_HEADER] if with_lead else [])):
        is_name = heading == "name"  # the only column that may wrap
        table.add_column(
            heading,
            justify="left" if is_name else "right",
            no_wrap=not is_name,
            overflow="fold",
        )
    for row in rows:
        if row.seconds is not None:
            table.add_row(*format_row(row, with_lead), style="dim" if row.name == DENSE else "")
    return table
