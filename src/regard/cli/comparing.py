"""regard compare: train mixers alike on the same tasks and recommend one."""

from __future__ import annotations

import csv as csv_module
import inspect
import io
import shlex
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.cli import startup
from regard.cli.device_options import (
    DeviceOption,
    DtypeOption,
    check_device,
    check_device_names,
)
from regard.cli.output import (
    INTERRUPTED,
    console,
    fail,
    print_json,
    progress_bar,
    user_errors,
)
from regard.cli.reporting import PAGE, write_report

if TYPE_CHECKING:
    from regard.compare import ComparisonResult, PlannedRun, ResultRow, Schedule, Verdict

REPORT_SHARE, MIN_REPORT_SECONDS = 0.05, 6.0  # of a budget, kept for the table and the page


def compare(
    mixers: Annotated[
        str,
        typer.Option(
            "--mixers",
            "--mixer",
            help="Mixers, comma-separated: linear,local:window=64.",
        ),
    ],
    tasks: Annotated[
        str,
        typer.Option("--tasks", "--task", help="Tasks, comma-separated: copy,recall:pairs=8."),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Your own data: a file, a folder or hf:NAME (a Hugging Face dataset)."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text column of tabular data.")] = None,
    label: Annotated[
        str | None, typer.Option(help="Label column of tabular data.", show_default="label")
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            "--length",
            help="Sequence lengths, comma-separated: 128,512.",
            show_default="each task's default",
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds per mixer.")] = 1,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for the whole comparison: 90s, 3m, 1h30m.", show_default="no limit"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Maximum training steps per run.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 32,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 2e-3,
    dim: Annotated[int, typer.Option(min=1, help="Model width.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 2,
    position: Annotated[
        str,
        typer.Option(help="Positional encoding: learned, sinusoid, rope, alibi, none, ..."),
    ] = "learned",
    match_params: Annotated[
        bool,
        typer.Option(
            help="Match every model's parameter count to dense softmax by adjusting the FFN width."
        ),
    ] = True,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    executor: Annotated[
        str,
        typer.Option(help="Where to run jobs: local, slurm:partition=cpu:cores=4, ray:cores=2."),
    ] = "local",
    out: Annotated[
        Path, typer.Option(help="Folder of the comparison. Repeat the command to resume it.")
    ] = Path("runs/compare"),
    html: Annotated[
        Path | None, typer.Option(help="Where to write the page.", show_default="OUT/report.html")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
) -> None:
    """Train mixers on the same tasks and recommend one.

    Dense softmax attention and a constant baseline are part of every comparison. The result is a
    table and a recommendation with caveats for each task and length, and an HTML page.

    Example: regard compare --mixers local,linear --tasks recall:pairs=8 --lengths 128 --budget 3m
    """
    command, started = format_command(compare, locals()), time.monotonic()
    with user_errors():
        if json and csv:
            raise ValueError("--json and --csv both print to stdout: give one of them")
        if html is not None and html.is_dir():
            raise ValueError(f"--html {html} is a folder: give the name of a file")

        from regard.cli.parsing import (
            add_data_arguments,
            parse_duration,
            parse_ints,
            parse_spec,
            parse_specs,
        )
        from regard.compare import ComparisonPlan, ComparisonRecord, Schedule, plan_runs
        from regard.compare.executors import create_executor
        from regard.compare.record import write_record
        from regard.compare.schedule import MIN_RUN_SECONDS
        from regard.train.settings import TrainSettings

        executor_spec = parse_spec(executor)
        check_names = check_device if executor_spec.name == "local" else check_device_names
        check_names(device, dtype)
        interval = max(1, steps // 10)
        columns = {"text": text, "label": label}
        plan = ComparisonPlan(
            tasks=[add_data_arguments(task, data, columns) for task in parse_specs(tasks)],
            mixers=parse_specs(mixers),
            lengths=parse_ints(lengths),
            seeds=seeds,
            dim=dim,
            heads=heads,
            layers=layers,
            position=parse_specs(position)[0],
            match_params=match_params,
            settings=TrainSettings(
                steps=steps,
                batch_size=batch_size,
                lr=lr,
                device=device,
                dtype=dtype,
                eval_every=interval,
                save_every=interval,
            ),
        )
        runs = plan_runs(plan)
        seconds = None
        if budget is not None:
            seconds = training_budget(parse_duration(budget), time.monotonic() - started)
        schedule = Schedule(
            out,
            executor=create_executor(executor_spec, out, jobs),
            jobs=jobs,
            budget=seconds,
            # if this process was slow to start, the runs will be too
            min_seconds=max(MIN_RUN_SECONDS, startup.startup_seconds()),
        )
        schedule.time_share(runs)  # refuses a budget that is too small
        keys = [run.key for run in runs]
        write_record(out, ComparisonRecord(plan=plan, command=command, keys=keys))
    run_schedule(schedule, runs, quiet=json or csv)

    from regard.compare import load_result
    from regard.compare.formatting import row_to_json, verdict_to_json
    from regard.report import build_report

    result = load_result(out)
    if json:
        print_json(
            {
                "plan": plan.model_dump(mode="json"),
                "rows": [row_to_json(row) for row in result.rows],
                "verdicts": [verdict_to_json(verdict) for verdict in result.verdicts],
            }
        )
    elif csv:
        typer.echo(rows_to_csv(result.rows), nl=False)
    else:
        print_comparison(result, console())
    with user_errors():
        report = build_report(out, result)
    write_report(report, html or out / PAGE)


def format_command(function: Callable[..., None], arguments: Mapping[str, object]) -> str:
    """Return the command line of a call; arguments with their default value are left out."""
    words = ["regard", function.__name__]
    for name, parameter in inspect.signature(function).parameters.items():
        value, option = arguments.get(name, parameter.default), name.replace("_", "-")
        if value is None or value == parameter.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return shlex.join(words)


def training_budget(budget: float, spent: float) -> float:
    """Return the seconds of a budget that remain for the runs after `spent` seconds of planning.

    The report takes about as long as the command took to start: both are slow on a busy machine.
    """
    start = startup.startup_seconds()
    report = min(start, 4 * REPORT_SHARE * budget)
    return budget - start - spent - max(MIN_REPORT_SECONDS, REPORT_SHARE * budget, report)


def run_schedule(schedule: Schedule, runs: list[PlannedRun], *, quiet: bool) -> None:
    """Execute all runs with a progress bar; without a terminal, print a line per finished run."""
    stderr = Console(stderr=True)
    pending = len(schedule.pending(runs))
    resume = "Finished runs are kept: repeat the command to resume."
    with progress_bar(visible=not quiet and stderr.is_terminal, count=True) as bar:
        task = bar.add_task("runs", total=pending)
        fractions: dict[str, float] = {}
        finished = 0

        def on_progress(run: PlannedRun, fraction: float | None) -> None:
            nonlocal finished
            fractions[run.key] = 1.0 if fraction is None else fraction
            bar.update(task, completed=sum(fractions.values()), description=run.name)
            if fraction is None:
                finished += 1
                if not quiet and not stderr.is_terminal:
                    stderr.print(f"{finished} of {pending}: {run.name}", highlight=False)

        schedule.on_progress = on_progress
        try:
            schedule.run(runs)
        except KeyboardInterrupt:
            bar.stop()
            fail(f"interrupted. {resume}", INTERRUPTED)
        except (OSError, sqlite3.Error) as error:  # a disk that is full or gone
            bar.stop()
            fail(f"{error}. {resume}")
        finally:
            schedule.close()


def print_comparison(result: ComparisonResult, to: Console) -> None:
    """Print a table for each task and length, with the recommendation and its caveats below."""
    from regard.compare.formatting import NO_RESULT, describe_caveats, describe_verdict
    from regard.compare.results import group_rows

    verdicts = {(verdict.task, verdict.length): verdict for verdict in result.verdicts}
    for key, rows in group_rows(result.rows).items():
        verdict = verdicts.get(key)
        to.print(comparison_table(rows, verdict))
        to.print(Text(describe_verdict(verdict) if verdict else NO_RESULT, "bold"))
        for caveat in describe_caveats(verdict.caveats) if verdict else ():
            to.print(Text(caveat, "yellow"))
        to.print()


def comparison_table(rows: list[ResultRow], verdict: Verdict | None) -> Table:
    """Return the table of one task and length, best mixer first; empty columns are left out."""
    from regard.compare.formatting import format_row, table_header
    from regard.compare.results import group_metric, rank_rows

    title = f"{rows[0].task}, {rows[0].length:,} tokens"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    ranked = rank_rows(rows)
    lines = [format_row(row, verdict) for row in ranked]
    header = table_header(group_metric(rows))
    shown = [i for i in range(len(header)) if any(line[i] for line in lines)]
    for i in shown:
        is_text = header[i] in ("mixer", "")
        table.add_column(
            header[i],
            justify="left" if is_text else "right",
            no_wrap=header[i] == "mixer",
            overflow="fold",
        )
    for row, line in zip(ranked, lines, strict=True):
        style = "" if row.scores else "dim"
        if verdict is not None and row is verdict.recommended:
            style = "bold green"
        table.add_row(*(line[i] for i in shown), style=style)
    return table


def rows_to_csv(rows: list[ResultRow]) -> str:
    """Return the rows as CSV, with the number of seeds in place of their scores."""
    from regard.compare.formatting import row_to_json

    values = []
    for row in rows:
        value = row_to_json(row)
        value["seeds"] = len(value.pop("scores"))
        values.append(value)
    text = io.StringIO()
    writer = csv_module.DictWriter(text, list(values[0]))
    writer.writeheader()
    writer.writerows(values)
    return text.getvalue()
