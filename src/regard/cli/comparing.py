"""regard compare: which mechanism is best for a task, a length and this machine?"""

from __future__ import annotations

import csv as comma
import io
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from regard.cli.say import INTERRUPTED, console, fail, print_json, user_errors
from regard.cli.words import parts, span, whole_numbers
from regard.compare import Cell, Plan, Row, Schedule, Verdict, cells, rows_of, verdicts
from regard.compare.baseline import constant
from regard.compare.plan import CONSTANT, label, lengthened
from regard.tasks import task as make_task
from regard.train.settings import Settings

FOLDER = Path("runs/compare")
COLUMNS = ("mixer", "task", "length", "metric", "score", "spread", "seeds", "speed", "memory", "parameters", "steps", "why")


def compare(
    mixers: Annotated[str, typer.Option(help="Names with commas between: vanilla,local:window=64,linear.")],
    tasks: Annotated[str, typer.Option(help="Names with commas between: recall:pairs=8,copy.")],
    lengths: Annotated[str, typer.Option(help="Lengths of the tasks: 128,512.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each that differ in the seed alone.")] = 1,
    budget: Annotated[str | None, typer.Option(help="Time for all: 3m. Without it each trains for --steps.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates of each run, at most.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Examples in an update.")] = 32,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 2e-3,
    dim: Annotated[int, typer.Option(min=1, help="Width of a token.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Heads of attention.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 2,
    position: Annotated[str, typer.Option(help="How tokens know where they stand.")] = "learned",
    equal: Annotated[bool, typer.Option(help="Give all the parameters of dense softmax.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the comparison; the same again goes on where it stopped.")] = FOLDER,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The rows as CSV to stdout.")] = False,
) -> None:
    """Train mechanisms alike on the same tasks, beside dense softmax and a constant answer, and recommend one.

    Example: regard compare --mixers local,linear --tasks recall:pairs=8 --lengths 128 --budget 3m
    """
    with user_errors():
        evaluations = max(1, steps // 10)
        plan = Plan(
            tasks=parts(tasks), mixers=parts(mixers), lengths=whole_numbers(lengths), seeds=seeds, dim=dim, heads=heads,
            layers=layers, position=parts(position)[0], equal_parameters=equal,
            settings=Settings(steps=steps, batch=batch, rate=rate, evaluate=evaluations, save=evaluations),
        )  # fmt: skip
        planned = cells(plan)
        schedule = Schedule(out, jobs=jobs, budget=None if budget is None else span(budget))
    _run(schedule, planned, quiet=json or csv)
    mine = {cell.key for cell in planned}
    rows = [*rows_of(e for e in schedule.ledger.entries() if e.key in mine), *baselines(plan)]
    found = verdicts(rows)
    if json:
        print_json(
            {"plan": plan.model_dump(mode="json"), "rows": list(map(as_json, rows)), "verdicts": [v.words for v in found]}
        )
    elif csv:
        typer.echo(as_csv(rows), nl=False)
    else:
        tell(rows, found, console())


def _run(schedule: Schedule, planned: list[Cell], *, quiet: bool) -> None:
    """All runs, with a bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        todo = [cell for cell in planned if cell.spec is not None]
        whole = bar.add_task("runs", total=len(todo))
        ended: set[str] = set()

        def watch(cell: Cell, fraction: float | None) -> None:
            ended.update({cell.key} if fraction is None else ())
            bar.update(whole, completed=len(ended) + (fraction or 0), description=cell.name)

        schedule.watch = watch
        try:
            schedule.run(planned)
        except KeyboardInterrupt:
            bar.stop()
            fail("stopped; what was done is kept: the same command goes on with it", INTERRUPTED)


def baselines(plan: Plan) -> list[Row]:
    """The row of a constant answer for each task."""
    made = [(part, make_task(part.name, **part.arguments)) for p in plan.tasks for part in lengthened(p, plan.lengths)]
    return [Row(CONSTANT, label(part), m.length, m.metric, [constant(m)]) for part, m in made]


# ---------------------------------------------------------------------------------------------- what is shown
def tell(rows: list[Row], found: list[Verdict], to: Console) -> None:
    """A table for each task and length, and below it the recommendation."""
    places = list(dict.fromkeys((row.task, row.length) for row in rows))
    words = {(v.task, v.length): v for v in found}
    for place in places:
        to.print(table([row for row in rows if (row.task, row.length) == place], words.get(place)))
        to.print(Text(words[place].words if place in words else "No run came to an end: nothing can be recommended.", "bold"))
        to.print()


def table(rows: list[Row], verdict: Verdict | None) -> Table:
    """The rows of one task and length, the best first."""
    made = Table(title=f"{rows[0].task}, {rows[0].length:,} tokens", title_justify="left", box=None, padding=(0, 2, 0, 0))
    metric = next((row.metric for row in rows if row.metric), "")
    for name in ("mechanism", metric, "± seeds", "tokens/s", "× dense", "memory MB", "parameters", "steps", ""):
        made.add_column(name, justify="left" if name in ("mechanism", "") else "right")
    sign = -1 if metric == "accuracy" else 1
    for row in sorted(rows, key=lambda row: (not row.scores, sign * row.score if row.scores else 0)):
        style = "bold green" if verdict is not None and row is verdict.take else "" if row.scores else "dim"
        made.add_row(*cells_of(row, verdict), style=style)
    return made


def cells_of(row: Row, verdict: Verdict | None) -> list[str]:
    """One row in words."""
    dense = verdict.dense if verdict is not None else None
    ratio = "" if dense is None or math.isnan(row.speed) else f"{row.speed / dense.speed:.2f}"
    note = row.why or ("← take this" if verdict is not None and row is verdict.take else "")
    return [
        row.mixer, shown(row.score, "{:.3f}"), shown(row.spread, "{:.3f}"), shown(row.speed, "{:,.0f}"), ratio,
        shown(row.memory / 1e6, "{:,.0f}"), f"{row.parameters:,}" if row.parameters else "", shown(row.steps, "{:,.0f}"), note,
    ]  # fmt: skip


def shown(number: float, form: str) -> str:
    """A number, or nothing where there is none."""
    return "" if math.isnan(number) else form.format(number)


def as_json(row: Row) -> dict[str, Any]:
    """One row; what is not there is null."""
    values = (row.mixer, row.task, row.length, row.metric, row.score, row.spread, row.scores, row.speed, row.memory,
              row.parameters, row.steps, row.why)  # fmt: skip
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in zip(COLUMNS, values, strict=True)}


def as_csv(rows: list[Row]) -> str:
    """A line for each row."""
    text = io.StringIO()
    writer = comma.DictWriter(text, COLUMNS)
    writer.writeheader()
    for row in rows:
        values = as_json(row)
        writer.writerow(values | {"seeds": len(values["seeds"])})
    return text.getvalue()
