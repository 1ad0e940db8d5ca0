"""regard compare: which mechanism is best for a task, a length and this machine?"""

from __future__ import annotations

import csv as comma
import io
import sqlite3
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from regard.cli import startup
from regard.cli.output import INTERRUPTED, console, fail, print_json, user_errors
from regard.cli.parsing import (
    add_data_arguments,
    parse_duration,
    parse_ints,
    parse_spec,
    parse_specs,
)
from regard.cli.reporting import PAGE, command, write_page
from regard.compare import (
    ComparisonPlan,
    PlannedRun,
    ResultRow,
    Schedule,
    Verdict,
    compute_verdicts,
    plan_runs,
)
from regard.compare.executors import create_executor
from regard.compare.formatting import (
    COLUMNS,
    format_row,
    group_rows,
    headings,
    metric_of,
    rank_rows,
    row_to_json,
)
from regard.compare.record import ComparisonRecord, read_entries, result_rows, write_record
from regard.compare.schedule import LEAST
from regard.train.settings import TrainSettings

FOLDER = Path("runs/compare")
KEPT = "what was done is kept: the same command goes on with it"
TELLING = 0.05, 6.0  # of a budget, and seconds at least, that are kept for the table and the page


def compare(
    mixers: Annotated[
        str,
        typer.Option("--mixers", "--mixer", help="With commas between: vanilla,local:window=64."),
    ],
    tasks: Annotated[
        str, typer.Option("--tasks", "--task", help="With commas between: recall:pairs=8,copy.")
    ],
    data: Annotated[
        str | None, typer.Option(help="File, folder or hf:name, for tasks on your own data.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The column of the text, where the data are rows.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="The column of the label; label unless given.")
    ] = None,
    lengths: Annotated[
        str, typer.Option("--lengths", "--length", help="Lengths of the tasks: 128,512.")
    ] = "",
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each that differ in the seed alone.")
    ] = 1,
    budget: Annotated[
        str | None, typer.Option(help="Time for all: 3m. Without it each trains for --steps.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates of each run, at most.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Examples in an update.")] = 32,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 2e-3,
    dim: Annotated[int, typer.Option(min=1, help="Width of a token.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Heads of attention.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 2,
    position: Annotated[str, typer.Option(help="How tokens know where they stand.")] = "learned",
    equal: Annotated[bool, typer.Option(help="Give all the parameters of dense softmax.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    on: Annotated[
        str,
        typer.Option(
            help="Where to run: local, slurm:partition=cpu:cores=4:memory=8, ray:cores=2."
        ),
    ] = "local",
    out: Annotated[
        Path,
        typer.Option(help="Folder of the comparison; the same again goes on where it stopped."),
    ] = FOLDER,
    html: Annotated[
        Path | None, typer.Option(help="Where the page goes; OUT/report.html unless given.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The rows as CSV to stdout.")] = False,
) -> None:
    """Train mechanisms alike on the same tasks, beside dense softmax and a constant answer, and recommend one.

    Example: regard compare --mixers local,linear --tasks recall:pairs=8 --lengths 128 --budget 3m
    """
    asked, began = command(compare, locals()), time.monotonic()
    with user_errors():
        check_outputs(json, csv, html)
        evaluations = max(1, steps // 10)
        plan = ComparisonPlan(
            tasks=[
                add_data_arguments(each, data, {"text": text, "label": label})
                for each in parse_specs(tasks)
            ],
            mixers=parse_specs(mixers),
            lengths=parse_ints(lengths),
            seeds=seeds,
            dim=dim,
            heads=heads,
            layers=layers,
            position=parse_specs(position)[0],
            match_params=equal,
            settings=TrainSettings(
                steps=steps, batch=batch, rate=rate, evaluate=evaluations, save=evaluations
            ),
        )
        planned = plan_runs(plan)
        allowed = (
            None
            if budget is None
            else training_budget(parse_duration(budget), time.monotonic() - began)
        )
        least = max(
            LEAST, startup.startup_seconds()
        )  # where this process was slow to start, others will be
        schedule = Schedule(
            out,
            place=create_executor(parse_spec(on), out, jobs),
            jobs=jobs,
            budget=allowed,
            least=least,
        )
        schedule.share(planned)
        record = ComparisonRecord(plan=plan, command=asked, keys=[cell.key for cell in planned])
        write_record(out, record)
    _run(schedule, planned, quiet=json or csv)
    rows = result_rows(plan, read_entries(out, record))
    found = compute_verdicts(rows)
    if json:
        print_json(
            {
                "plan": plan.model_dump(mode="json"),
                "rows": list(map(row_to_json, rows)),
                "verdicts": [v.words for v in found],
            }
        )
    elif csv:
        typer.echo(as_csv(rows), nl=False)
    else:
        print_comparison(rows, found, console())
    write_page(out, html or out / PAGE)


def check_outputs(json: bool, csv: bool, html: Path | None) -> None:
    """What would fail after all training is refused before it."""
    if json and csv:
        raise ValueError("--json and --csv both go to stdout: give one of them")
    if html is not None and html.is_dir():
        raise ValueError(f"--html {html} is a folder: give the name of a file")


def training_budget(budget: float, spent: float) -> float:
    """What is left of a budget for the runs, when so much of it was spent on the plan.  The page takes about as long as the
    command took to start: on a busy machine both take longer."""
    share, least = TELLING
    before = startup.startup_seconds()
    return budget - before - spent - max(least, share * budget, min(before, 4 * share * budget))


def _run(schedule: Schedule, planned: list[PlannedRun], *, quiet: bool) -> None:
    """All runs, with a bar on stderr; where there is no terminal, a line for each that ended."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    to = Console(stderr=True)
    todo = schedule.waiting(planned)
    with Progress(*columns, console=to, transient=True, disable=quiet or not to.is_terminal) as bar:
        whole = bar.add_task("runs", total=len(todo))
        begun: dict[str, float] = {}
        ended: list[PlannedRun] = []

        def watch(cell: PlannedRun, fraction: float | None) -> None:
            begun[cell.key] = 1.0 if fraction is None else fraction
            bar.update(whole, completed=sum(begun.values()), description=cell.name)
            ended.extend([cell] if fraction is None else [])
            if fraction is None and not quiet and not to.is_terminal:
                to.print(f"{len(ended)} of {len(todo)}: {cell.name}", highlight=False)

        schedule.watch = watch
        try:
            schedule.run(planned)
        except KeyboardInterrupt:
            bar.stop()
            fail(f"stopped; {KEPT}", INTERRUPTED)
        except (OSError, sqlite3.Error) as error:  # a disk that is full, or gone
            bar.stop()
            fail(f"{error}; {KEPT}")
        finally:
            schedule.close()


# ---------------------------------------------------------------------------------------------- what is shown
def print_comparison(rows: list[ResultRow], found: list[Verdict], to: Console) -> None:
    """A table for each task and length, and below it the recommendation."""
    words = {(v.task, v.length): v for v in found}
    for place, each in group_rows(rows).items():
        to.print(table(each, words.get(place)))
        to.print(
            Text(
                words[place].words
                if place in words
                else "No run came to an end: nothing can be recommended.",
                "bold",
            )
        )
        to.print()


def table(rows: list[ResultRow], verdict: Verdict | None) -> Table:
    """The rows of one task and length, the best first."""
    made = Table(
        title=f"{rows[0].task}, {rows[0].length:,} tokens",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    order = rank_rows(rows)
    lines = [format_row(row, verdict) for row in order]
    shown = [
        i for i in range(len(lines[0])) if any(line[i] for line in lines)
    ]  # one seed has no spread
    for name in (headings(metric_of(rows))[i] for i in shown):
        words = name in ("mechanism", "")
        made.add_column(
            name, justify="left" if words else "right", no_wrap=name == "mechanism", overflow="fold"
        )
    for row, line in zip(order, lines, strict=True):
        style = (
            "bold green"
            if verdict is not None and row is verdict.take
            else ""
            if row.scores
            else "dim"
        )
        made.add_row(*(line[i] for i in shown), style=style)
    return made


def as_csv(rows: list[ResultRow]) -> str:
    """A line for each row."""
    text = io.StringIO()
    writer = comma.DictWriter(text, COLUMNS)
    writer.writeheader()
    for row in rows:
        values = row_to_json(row)
        writer.writerow(values | {"seeds": len(values["seeds"])})
    return text.getvalue()
