"""regard runs: what was trained, side by side; and away with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from regard.cli.output import console, print_json, user_errors
from regard.cli.text_plot import plot_text
from regard.compare.executors import LOCK_FILE, LOG_FILE, STOP_FILE
from regard.compare.plan import spec_label
from regard.json_files import CorruptFile, read_json
from regard.train.metrics_log import METRICS_FILE as METRICS, read_metrics
from regard.train.run import MODEL_DIR, RESULT_FILE, SPEC_FILE, TASK_FILE, RunSpec, read_spec
from regard.train.trainer import CHECKPOINTS

runs = typer.Typer(no_args_is_help=True, help="Look at runs: list, show, compare, delete.")
OWN = {
    SPEC_FILE,
    TASK_FILE,
    METRICS,
    CHECKPOINTS,
    MODEL_DIR,
    RESULT_FILE,
    LOG_FILE,
    LOCK_FILE,
    STOP_FILE,
}  # what a run writes into its folder

Folder = Annotated[Path, typer.Argument(help="The folder of a run.")]
Json = Annotated[bool, typer.Option("--json", help="JSON to stdout.")]


class Found(NamedTuple):
    """A run: where, its words, and what came of it if it is over."""

    folder: Path
    spec: RunSpec
    result: dict[str, Any] | None

    def facts(self) -> dict[str, Any]:
        """What is told of it in one line."""
        r = self.result or {}
        rows = [] if r else metrics(self.folder)
        at = r.get("steps", rows[-1]["step"] if rows else 0)
        return {
            "folder": str(self.folder),
            "task": spec_label(self.spec.task),
            "mixer": spec_label(self.spec.mixer),
            "dim": self.spec.dim,
            "layers": self.spec.layers,
            "steps": at,
            "of": self.spec.settings.steps,
            "metric": r.get("metric"),
            "valid": r.get("best"),
            "test": r.get("test"),
            "seconds": r.get("seconds"),
            "parameters": r.get("parameters"),
        }


def run_at(folder: Path) -> Found:
    """The run in a folder."""
    spec = read_spec(folder)
    return Found(
        folder,
        spec,
        dict(read_json(folder / RESULT_FILE)) if (folder / RESULT_FILE).exists() else None,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines that a run wrote so far."""
    return read_metrics(folder / METRICS) if (folder / METRICS).exists() else []


def runs_under(root: Path) -> tuple[list[Found], list[str]]:
    """All runs below a folder, by name; and what is wrong with those that cannot be read."""
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
    found, wrong = [], []
    for path in sorted(root.rglob(SPEC_FILE)):
        try:
            found.append(run_at(path.parent))
        except (ValueError, CorruptFile) as error:
            wrong.append(str(error))
    return found, wrong


@runs.command("list")
def list_command(
    root: Annotated[Path, typer.Argument(help="Where to look, with all below.")] = Path("runs"),
    json: Json = False,
) -> None:
    """A table of all runs below a folder.

    Example: regard runs list runs/
    """
    with user_errors():
        found, wrong = runs_under(root)
    for words in wrong:
        typer.echo(f"left out: {words}", err=True)
    if json:
        print_json([run.facts() for run in found])
    elif found:
        console().print(table(found))
    else:
        typer.echo(f"there is no run below {root}", err=True)


def table(found: list[Found]) -> Table:
    """A line for each."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("run", "task", "mixer", "steps", "metric", "valid", "test", "seconds"):
        made.add_column(
            name,
            justify="right" if name in ("steps", "valid", "test", "seconds") else "left",
            overflow="fold",
        )
    for run in found:
        facts = run.facts()
        steps = f"{facts['steps']:,}" if run.result else f"{facts['steps']:,} of {facts['of']:,}"
        values = (
            facts["folder"],
            facts["task"],
            facts["mixer"],
            steps,
            facts["metric"],
            *numbers(facts),
        )
        made.add_row(*("" if value is None else str(value) for value in values))
    return made


def numbers(facts: dict[str, Any]) -> list[str]:
    """The last columns."""
    forms = {"valid": "{:.4f}", "test": "{:.4f}", "seconds": "{:,.0f}"}
    return ["" if facts[name] is None else form.format(facts[name]) for name, form in forms.items()]


@runs.command()
def show(folder: Folder, json: Json = False) -> None:
    """The words of a run, its curve, and what came of it.

    Example: regard runs show runs/mine
    """
    with user_errors():
        run = run_at(folder)
        curve = [row for row in metrics(folder) if "valid" in row]
    if json:
        print_json(
            {
                "folder": str(folder),
                "spec": run.spec.model_dump(mode="json"),
                "curve": curve,
                "result": run.result,
            }
        )
        return
    to = console()
    to.print(pairs([run], {name: value for name, value in run.facts().items() if name != "folder"}))
    metric = run.facts()["metric"] or "the metric"
    to.print(
        plot_text(
            [row["step"] for row in curve], [row["valid"] for row in curve], f"{metric} on valid"
        ),
        markup=False,
    )
    if run.result is None:
        to.print(f"not over yet: regard train --resume {folder}")


@runs.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two runs or more.")], json: Json = False
) -> None:
    """Runs side by side, with what differs between them first.

    Example: regard runs compare runs/one runs/two
    """
    with user_errors():
        if len(folders) < 2:
            raise ValueError("give at least two runs to compare")
        found = [run_at(folder) for folder in folders]
    if json:
        print_json([run.facts() | {"spec": run.spec.model_dump(mode="json")} for run in found])
        return
    console().print(pairs(found, *(differing(run, found) | results(run) for run in found)))


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        key: leaf
        for word, inner in value.items()
        for key, leaf in flat(inner, f"{name}.{word}".strip(".")).items()
    }


def differing(run: Found, among: list[Found]) -> dict[str, Any]:
    """The words of a run that are not the same in all."""
    words = [flat(other.spec.model_dump(mode="json")) for other in among]
    names = list(dict.fromkeys(name for each in words for name in each))
    mine = flat(run.spec.model_dump(mode="json"))
    return {
        name: mine.get(name) for name in names if len({str(each.get(name)) for each in words}) > 1
    }


def results(run: Found) -> dict[str, Any]:
    """What came of it."""
    facts = run.facts()
    return {
        name: facts[name] for name in ("steps", "metric", "valid", "test", "seconds", "parameters")
    }


def pairs(found: list[Found], *columns: dict[str, Any]) -> Table:
    """Names at the side, and a column for each run."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("", *(str(run.folder) for run in found)):
        made.add_column(header, overflow="fold")
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        made.add_row(
            name,
            *("" if v is None else f"{v:.4f}" if isinstance(v, float) else str(v) for v in values),
        )
    return made


@runs.command()
def delete(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete a run, after asking; what is no run, or holds more than one wrote, is left alone.

    Example: regard runs delete runs/mine --yes
    """
    with user_errors():
        check_own(folder)
        if not yes and not typer.confirm(f"delete {folder} for good?", err=True):
            raise typer.Exit(1)
        shutil.rmtree(folder)
    if json:
        print_json({"deleted": str(folder)})
    else:
        typer.echo(f"deleted {folder}")


def check_own(folder: Path) -> None:
    """A folder that a run wrote, and nobody else wrote into."""
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link: delete what it points at")
    read_spec(folder)
    strange = sorted(path.name for path in folder.iterdir() if path.name not in OWN)
    if strange:
        raise ValueError(f"{folder} holds {strange[0]!r}, which no run writes: delete it by hand")
