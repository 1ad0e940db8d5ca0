"""regard compare: train mixers alike on the same tasks and recommend one."""

from __future__ import annotations

import csv as csv_module
import inspect
import io
import math
import shlex
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
    echo_data,
    fail,
    print_json,
    progress_bar,
    stderr_console,
    user_errors,
)
from regard.cli.plugins import PluginOption
from regard.cli.reporting import PAGE, write_report
from regard.plugins import load_plugins

if TYPE_CHECKING:
    from regard.compare import Comparison, ComparisonResult, PlannedRun, ResultRow, Verdict
    from regard.models import ModuleSpec

REPORT_SHARE, MIN_REPORT_SECONDS = 0.05, 6.0  # of a budget, kept for the table and the page
DEFAULT_STEPS, DEFAULT_RATE = 1000, 2e-3  # without a budget
AUTO_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
MODEL_FIELDS = (
    *("dim", "heads", "layers", "ffn", "norm"),
    *("residual", "position", "stack", "dropout", "mixer", "encoder_mixer"),
)


def compare(
    tasks: Annotated[
        str,
        typer.Option("--tasks", "--task", help="Tasks, comma-separated: copy,recall:pairs=8."),
    ],
    mixers: Annotated[
        str,
        typer.Option(
            "--mixers",
            "--mixer",
            help="Mixers, comma-separated: linear,local:window=64; or all.",
            show_default="a shortlist of what fits the task",
        ),
    ] = "",
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare another part of the model: position=rope,alibi; also norm, ffn, residual "
            "and stack.",
            show_default=False,
        ),
    ] = None,
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
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds per mixer; with a budget, per finalist.")
    ] = 3,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for the whole comparison: 90s, 3m, 1h30m.", show_default="no limit"
        ),
    ] = None,
    equal: Annotated[
        str, typer.Option(help="What a budget gives every mixer the same of: time or steps.")
    ] = "time",
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Training steps per run; with a budget, at most.", show_default="1000"
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 32,
    lr: Annotated[
        str | None,
        typer.Option(
            help="Peak learning rate, several to try for each mixer, or auto (3e-4 to 1e-2).",
            show_default="auto with a budget, else 2e-3",
        ),
    ] = None,
    prefer: Annotated[
        str, typer.Option(help="What matters most: score, speed, memory or latency.")
    ] = "score",
    config: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with the rest of the model: dim, heads, layers, ffn, norm, residual, "
            "position, stack, dropout, mixer, encoder_mixer.",
            show_default=False,
        ),
    ] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Model width.", show_default="64")] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads.", show_default="4")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.", show_default="2")] = None,
    position: Annotated[
        str | None,
        typer.Option(
            help="Positional encoding: learned, sinusoid, rope, alibi, none, ...",
            show_default="learned",
        ),
    ] = None,
    match_params: Annotated[
        bool,
        typer.Option(
            help="Match every model's parameter count to dense softmax by adjusting the FFN width."
        ),
    ] = True,
    plugin: PluginOption = [],  # noqa: B006
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
    plan_from: Annotated[
        Path | None,
        typer.Option(
            "--plan-from",
            help="Folder of another comparison by the same command: use its steps and learning "
            "rates, so that the learning curves are the same.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Where to write the page.", show_default="OUT/report.html")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
) -> None:
    """Train mixers on the same tasks and recommend one.

    Dense softmax attention and cheap baselines are part of every comparison. The costs are measured
    first; from them a budget becomes a plan, which is printed: a search of learning rates, the
    better half of the mixers, and the finalists with several seeds. The result is a table and a
    recommendation with caveats for each task and length, and an HTML page.

    Example: regard compare --mixers local,linear --tasks recall:pairs=8 --lengths 128 --budget 10m
    """
    command, started = format_command(compare, locals()), time.monotonic()
    with user_errors():
        if json and csv:
            raise ValueError("--json and --csv both print to stdout: give one of them")
        if html is not None and html.is_dir():
            raise ValueError(f"--html {html} is a folder: give the name of a file")

        from regard.cli.parsing import add_data_arguments, parse_duration, parse_ints, parse_specs
        from regard.compare import Comparison, ComparisonPlan, Schedule
        from regard.compare.executors import create_executor
        from regard.compare.plan import PARTS
        from regard.compare.results import PREFERENCES
        from regard.errors import check_choice
        from regard.tasks import find_task
        from regard.train.settings import UNLIMITED_STEPS, TrainSettings

        plugins = load_plugins(plugin)
        check_choice("--prefer", prefer, PREFERENCES)
        check_choice("--equal", equal, ("time", "steps"))
        executor_spec = parse_executor(executor, device, dtype)
        given = {"dim": dim, "heads": heads, "layers": layers, "position": position}
        part, values = parse_candidates(mixers, vary or [], PARTS)
        rates = parse_rates(lr, search=budget is not None)
        columns = {"text": text, "label": label}
        seconds = None if budget is None else parse_duration(budget)
        if steps is None:
            steps = UNLIMITED_STEPS if seconds is not None else DEFAULT_STEPS
        plan = ComparisonPlan(
            tasks=[add_data_arguments(task, data, columns) for task in parse_specs(tasks)],
            vary=part,
            mixers=values,
            is_shortlist=not mixers and part == "mixer",
            lengths=parse_ints(lengths),
            seeds=seeds,
            rates=tuple(rates),
            budget=seconds,
            equal=cast(Any, equal),
            prefer=cast(Any, prefer),
            jobs=jobs,
            match_params=match_params,
            plugins=tuple(plugins),
            settings=TrainSettings(
                steps=steps,
                batch_size=batch_size,
                lr=rates[0],
                device=device,
                dtype=dtype,
                eval_every=max(1, steps // 10),
            ),
            **parse_model(config, given, mixers if part != "mixer" else ""),
        )
        for task in plan.tasks:
            find_task(task.name)  # before an executor is started
        schedule = Schedule(out, executor=create_executor(executor_spec, out, jobs), jobs=jobs)
        reserve = 0.0 if seconds is None else report_seconds(seconds)
        comparison = Comparison(schedule, plan, command, reserve=reserve, plan_folder=plan_from)
        schedule.lock()
    run_comparison(comparison, started - startup.startup_seconds(), quiet=json or csv)

    from regard.compare import load_result
    from regard.compare.formatting import result_to_json
    from regard.report import build_report

    with user_errors():
        result = load_result(out)
    if json:
        print_json(result_to_json(result))
    elif csv:
        echo_data(rows_to_csv(result.rows))
    else:
        print_comparison(result, console())
    with user_errors():
        report = build_report(out, result)
    write_report(report, html or out / PAGE)


def parse_executor(text: str, device: str, dtype: str) -> ModuleSpec:
    """Parse --executor; the device must exist here if the runs are executed here."""
    from regard.cli.parsing import parse_spec

    spec = parse_spec(text)
    check_names = check_device if spec.name == "local" else check_device_names
    check_names(device, dtype)
    return spec


def parse_candidates(
    mixers: str, vary: Sequence[str], parts: Sequence[str]
) -> tuple[Any, list[ModuleSpec]]:
    """Return the part of the model that varies, and its values."""
    from regard.cli.parsing import parse_specs
    from regard.compare.plan import SHORTLIST
    from regard.errors import did_you_mean
    from regard.models import ModuleSpec
    from regard.registry import list_recipes

    if len(vary) > 1:
        raise ValueError(
            "--vary takes one part at a time: with two, a difference could come from either. "
            f"Start with --vary {vary[0]}."
        )
    if vary:
        part, equals, values = vary[0].partition("=")
        if not equals:
            raise ValueError(f"Write --vary part=value,value, not {vary[0]!r}.")
        if part not in parts:
            raise ValueError(f"--vary: no part {part!r}: {did_you_mean(part, parts)}")
        if part != "mixer":
            return part, parse_specs(values)
        if mixers:
            raise ValueError("--vary mixer=... and --mixers are the same: give one of them.")
        mixers = values
    if mixers.strip() == "all":
        return "mixer", [ModuleSpec(name=name) for name in list_recipes()]
    return "mixer", parse_specs(mixers) if mixers else list(SHORTLIST)


def parse_rates(text: str | float | None, *, search: bool) -> list[float]:
    """Parse --lr: "auto", a learning rate, or several with commas."""
    if text is None:
        return list(AUTO_RATES) if search else [DEFAULT_RATE]
    if text == "auto":
        return list(AUTO_RATES)
    try:
        rates = [float(word) for word in str(text).split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"--lr must be auto, or positive numbers such as 1e-3,3e-3, not {text!r}.")
    return list(dict.fromkeys(rates))


def parse_model(config: Path | None, given: Mapping[str, Any], mixer: str) -> dict[str, Any]:
    """Return the rest of the model, from --config and from options of its own."""
    from regard.cli.parsing import parse_spec, parse_specs
    from regard.errors import did_you_mean
    from regard.json_files import read_json

    values: dict[str, Any] = {}
    if config is not None:
        values = read_json(config)
        if not isinstance(values, dict):
            raise ValueError(f'{config}: expected a JSON object such as {{"dim": 128}}.')
        for name in values:
            if name not in MODEL_FIELDS:
                raise ValueError(f"{config}: no field {name!r}: {did_you_mean(name, MODEL_FIELDS)}")
    for name, value in given.items():
        if value is None:
            continue
        if name in values:
            raise ValueError(f"--{name} is also in {config}: give one of them.")
        values[name] = value
    if mixer:
        if "mixer" in values:
            raise ValueError(f"--mixers is also in {config} as mixer: give one of them.")
        specs = parse_specs(mixer)
        if len(specs) != 1:
            raise ValueError("With --vary, --mixers is the one mixer of all models.")
        values["mixer"] = specs[0]
    return {
        name: parse_spec(value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def format_command(function: Callable[..., None], arguments: Mapping[str, object]) -> str:
    """Return the command line of a call; arguments with their default value are left out."""
    words = ["regard", function.__name__]
    for name, parameter in inspect.signature(function).parameters.items():
        value, option = arguments.get(name, parameter.default), name.replace("_", "-")
        if value is None or value == parameter.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [word for each in value for word in (f"--{option}", str(each))]
        else:
            words += [f"--{option}", str(value)]
    return shlex.join(words)


def report_seconds(budget: float) -> float:
    """Return the seconds of a budget that are kept for the table and the page.

    The page takes about as long as the command took to start: both are slow on a busy machine.
    """
    report = min(startup.startup_seconds(), 4 * REPORT_SHARE * budget)
    return max(MIN_REPORT_SECONDS, REPORT_SHARE * budget, report)


def run_comparison(comparison: Comparison, begin: float, *, quiet: bool) -> None:
    """Plan and execute a comparison with a progress bar; without a terminal, print a line per run.

    Args:
        begin: `time.monotonic()` from which the budget counts.
    """
    from regard.compare.formatting import describe_plan

    schedule, stderr = comparison.schedule, stderr_console()
    resume = "Finished runs are kept: repeat the command to resume."
    try:
        with user_errors():
            if not quiet:
                stderr.print(Text("Measuring the costs of the candidates ...", "dim"))
            comparison.prepare(begin)
        if not quiet:
            for note in comparison.notes():
                stderr.print(Text(f"warning: {note}"))
            for line in describe_plan(comparison.record, comparison.estimate()):
                stderr.print(Text(line))
        with progress_bar(visible=not quiet and stderr.is_terminal) as bar:
            task = bar.add_task("runs", total=None)
            weights: dict[str, float] = {}
            fractions: dict[str, float] = {}
            finished = 0

            def on_rung(index: int, runs: list[PlannedRun]) -> None:
                pending = {run.key for run in schedule.pending(runs)}
                weights.update({run.key: run.seconds or 1.0 for run in runs if run.spec})
                fractions.update({key: 1.0 for key in weights if key not in pending})
                later = comparison.later_seconds(index)
                bar.update(task, total=sum(weights.values()) + later)

            def on_progress(run: PlannedRun, fraction: float | None) -> None:
                nonlocal finished
                fractions[run.key] = 1.0 if fraction is None else fraction
                done = sum(weights[key] * part for key, part in fractions.items())
                bar.update(task, completed=done, description=run.name)
                if fraction is None:
                    finished += 1
                    if not quiet and not stderr.is_terminal:
                        stderr.print(f"{finished} of {len(weights)}: {run.name}")

            schedule.on_progress = on_progress
            comparison.run(on_rung)
    except KeyboardInterrupt:
        fail(f"interrupted. {resume}", INTERRUPTED)
    except (OSError, sqlite3.Error) as error:  # a disk that is full or gone
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
        for caveat in describe_caveats(verdict.caveats, verdict) if verdict else ():
            to.print(Text(caveat, "yellow"))
        to.print()


def comparison_table(rows: list[ResultRow], verdict: Verdict | None) -> Table:
    """Return the table of one task and length, best mixer first; empty columns are left out, and
    the number of parameters is in the title if it is the same for all."""
    from regard.compare.formatting import PARAMETERS, format_row, table_header
    from regard.compare.results import group_metric, rank_rows

    title = f"{rows[0].task}, {rows[0].length:,} tokens"
    ranked = rank_rows(rows)
    lines = [format_row(row, verdict) for row in ranked]
    header = table_header(group_metric(rows)[0])
    shown = [i for i in range(len(header)) if any(line[i] for line in lines)]
    sizes = {row.parameters for row in rows if row.parameters}
    if len(sizes) == 1:
        title += f", {sizes.pop():,} parameters each"
        shown.remove(header.index(PARAMETERS))
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for i in shown:
        is_text = header[i] in ("mixer", "note")
        table.add_column(
            header[i],
            justify="left" if is_text else "right",
            no_wrap=not is_text,  # numbers are not cut: texts are wrapped instead
            min_width=11 if is_text else None,
            overflow="fold",
        )
    for row, line in zip(ranked, lines, strict=True):
        style = "" if row.scores else "dim"
        if verdict is not None and row is verdict.recommended:
            style = "bold green"
        table.add_row(*(line[i] for i in shown), style=style)
    return table


def rows_to_csv(rows: list[ResultRow]) -> str:
    """Return the rows as CSV, with the number of seeds in place of their scores, and a column for
    each number of the difference to dense softmax."""
    from regard.compare.formatting import row_to_json

    values = []
    for row in rows:
        value = row_to_json(row)
        value["seeds"] = len(value.pop("scores"))
        difference = value.pop("difference") or {}
        for name in ("estimate", "low", "high", "adjusted_p", "significant"):
            value[f"difference_{name}"] = difference.get(name)
        for name in ("speedup", "latency_speedup"):
            ratio = value.pop(name) or {}
            value[name] = ratio.get("median")
        metrics = value.pop("metrics")
        value["metrics"] = "; ".join(f"{name}={number:.6g}" for name, number in metrics.items())
        values.append(value)
    text = io.StringIO()
    writer = csv_module.DictWriter(text, list(values[0]))
    writer.writeheader()
    writer.writerows(values)
    return text.getvalue()
