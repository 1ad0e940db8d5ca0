"""The commands `regard runs list`, `show`, `compare` and `delete`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from regard.cli.output import confirm, console, echo, print_json, user_errors
from regard.cli.renamed import Command
from regard.cli.text_plot import plot_text
from regard.compare.executors import LOG_FILE, STOP_FILE
from regard.compare.plan import spec_label
from regard.folder_lock import LOCK_FILE, lock_folder
from regard.json_files import PARTIAL_PREFIX
from regard.models.serialization import CONFIG_NAME, WEIGHTS_NAME
from regard.train import tensorboard
from regard.train.metrics_log import METRICS_FILE, read_metrics
from regard.train.run import (
    MODEL_DIR,
    RESULT_FILE,
    SPEC_FILE,
    TASK_FILE,
    TEST_FILE,
    RunSpec,
    read_result,
    read_spec,
)
from regard.train.settings import UNLIMITED_STEPS
from regard.train.trainer import CHECKPOINTS

runs = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List, show, compare and delete runs.\n\nExample: regard runs list runs",
)

Folder = Annotated[Path, typer.Argument(help="Folder of a run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CHECKPOINT_FILE = r"(\w+\.safetensors|(\.partial-)?manifest\.json|\.tmp\w{6})"
OWN_NAMES = (  # of the files and folders of a run
    rf"({re.escape(PARTIAL_PREFIX)})?({SPEC_FILE}|{TASK_FILE}|{RESULT_FILE}|{METRICS_FILE}"
    rf"|{TEST_FILE})",
    rf"{LOG_FILE}|{LOCK_FILE}|{STOP_FILE}",
    rf"{MODEL_DIR}(/\.?({CONFIG_NAME}|{WEIGHTS_NAME})(\.\w{{8}})?)?",
    rf"{CHECKPOINTS}(/((broken-)?step-\d+(-\d+)?|\.partial-\d+(-old)?)(/{CHECKPOINT_FILE})?)?",
    rf"{tensorboard.FOLDER}(/events\.out\..*)?",
)
SUMMARY = ("steps", "metric", "valid", "test", "seconds", "parameters")


class RunRecord(NamedTuple):
    """A run in a folder: its spec, and its result if it is finished."""

    folder: Path
    spec: RunSpec
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """The values of one table row."""

        result, steps = self.result or {}, self.spec.settings.steps
        rows = self.metrics
        return {
            "folder": str(self.folder),
            "task": spec_label(self.spec.task),
            "mixer": spec_label(self.spec.mixer),
            "dim": self.spec.dim,
            "layers": self.spec.layers,
            "steps": result.get("steps", rows[-1]["step"] if rows else 0),
            "max_steps": None if steps == UNLIMITED_STEPS else steps,
            "metric": result.get("metric"),
            "valid": result.get("best"),
            "test": result.get("test"),
            "seconds": result.get("seconds"),
            "parameters": result.get("parameters"),
        }


def _read_run(folder: Path) -> RunRecord:

    spec, path = read_spec(folder), folder / RESULT_FILE
    if path.exists():
        return RunRecord(folder, spec, read_result(folder), [])
    return RunRecord(folder, spec, None, _read_run_metrics(folder))


def _read_run_metrics(folder: Path) -> list[dict[str, Any]]:

    path = folder / METRICS_FILE
    try:
        return read_metrics(path) if path.exists() else []
    except OSError as error:
        raise ValueError(f"Cannot read {path}: {error.strerror}.") from None


@runs.command("list", cls=Command)
def list_command(
    root: Annotated[Path, typer.Argument(help="Folder to search, with all subfolders.")] = Path(
        "runs"
    ),
    json: Json = False,
) -> None:
    """List all runs below a folder.

    Example: regard runs list runs/
    """

    found: list[RunRecord] = []
    skipped = 0
    with user_errors():
        if not root.is_dir():
            raise ValueError(f"There is no folder {root}.")
        for path in sorted(root.rglob(SPEC_FILE)):
            try:
                found.append(_read_run(path.parent))
            except ValueError as error:
                skipped += 1
                echo(f"skipped: {error}", err=True)
    if json:
        print_json([run.summary() for run in found])
    elif not found:
        what = "no other run" if skipped else "no run"
        echo(f"There is {what} below {root}.", err=True)
    else:
        formats = {"valid": ".4f", "test": ".4f", "seconds": ",.0f", "steps": ",d"}
        names = ("folder", "task", "mixer", "steps", "metric", "valid", "test", "seconds")
        table = _new_table()
        for name in names:
            justify: Any = "right" if name in formats else "left"
            table.add_column(name.replace("folder", "run"), justify=justify, overflow="fold")
        for run in found:
            row = run.summary()
            cells = {
                name: "" if row[name] is None else format(row[name], formats.get(name, ""))
                for name in names
            }
            if run.result is None and row["max_steps"] is not None:
                cells["steps"] += f" of {row['max_steps']:,}"
            table.add_row(*cells.values())
        console().print(table)


@runs.command(cls=Command)
def show(folder: Folder, json: Json = False) -> None:
    """Show the spec, the learning curve and the result of a run.

    Example: regard runs show runs/mine
    """
    with user_errors():
        run = _read_run(folder)
        curve = [row for row in _read_run_metrics(folder) if "valid" in row]
    if json:
        spec = run.spec.model_dump(mode="json")
        print_json({"folder": str(folder), "spec": spec, "curve": curve, "result": run.result})
        return
    to, summary = console(), run.summary()
    del summary["folder"]
    to.print(_comparison_table([run], [summary]))
    title = f"{summary['metric'] or 'metric'} on valid"
    steps, values = [row["step"] for row in curve], [row["valid"] for row in curve]
    to.print(plot_text(steps, values, title))
    if run.result is None:
        to.print(f"Not finished. Resume it with: regard train --resume {folder}")


@runs.command(cls=Command)
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of two or more runs.")],
    json: Json = False,
) -> None:
    """Compare runs side by side: the settings in which they differ, and their results.

    Example: regard runs compare runs/one runs/two
    """
    with user_errors():
        if len(folders) < 2:
            raise ValueError("Give at least two runs to compare.")
        found = [_read_run(folder) for folder in folders]
    summaries = [run.summary() for run in found]
    specs = [run.spec.model_dump(mode="json") for run in found]
    if json:
        pairs = zip(summaries, specs, strict=True)
        print_json([summary | {"spec": spec} for summary, spec in pairs])
        return
    flat = list(map(_flatten, specs))
    names = dict.fromkeys(name for spec in flat for name in spec)
    differing = [name for name in names if len({str(spec.get(name)) for spec in flat}) > 1]
    columns = [
        {name: spec.get(name) for name in differing} | {name: row[name] for name in SUMMARY}
        for spec, row in zip(flat, summaries, strict=True)
    ]
    console().print(_comparison_table(found, columns))


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = (_flatten(inner, f"{prefix}.{key}".strip(".")) for key, inner in value.items())
    return {name: leaf for part in parts for name, leaf in part.items()}


def _new_table() -> Table:

    return Table(box=None, padding=(0, 2, 0, 0), header_style="bold")


def _comparison_table(found: list[RunRecord], columns: list[dict[str, Any]]) -> Table:
    """A row for each value and a column for each run."""
    table = _new_table()
    for header in ("", *(str(run.folder) for run in found)):
        table.add_column(header, overflow="fold")
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        cells = (
            f"{v:.4f}" if isinstance(v, float) else "" if v is None else str(v) for v in values
        )
        table.add_row(name, *cells)
    return table


@runs.command(cls=Command)
def delete(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: Json = False,
) -> None:
    """Delete a run, after confirmation. Folders with other files than those of a run are refused.

    Example: regard runs delete runs/mine --yes
    """
    with user_errors():
        _check_deletable(folder)
        if not yes and not confirm(f"Delete {folder}?"):
            raise typer.Exit(1)
        with lock_folder(folder):  # refuses a run in progress
            _check_deletable(folder)
        shutil.rmtree(folder)
    if json:
        print_json({"deleted": str(folder)})
    else:
        echo(f"Deleted {folder}")


def _check_deletable(folder: Path) -> None:
    """Refuse links, and folders that contain anything that a run does not write."""

    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link: delete its target instead.")
    read_spec(folder)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not any(re.fullmatch(pattern, name) for pattern in OWN_NAMES):
            raise ValueError(
                f"{folder} contains {name!r}, which is not part of a run: delete it by hand."
            )
