"""regard train, regard eval: one run, from words to a folder, and measured again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from regard.cli.output import INTERRUPTED, console, fail, print_json, user_errors
from regard.cli.parsing import add_data_arguments, parse_duration, parse_key_values, parse_spec
from regard.cli.text_plot import plot_text
from regard.json_files import read_json
from regard.models import ModuleSpec
from regard.train.checkpoint import latest_checkpoint
from regard.train.distributed import ProcessLost, is_main_process
from regard.train.inference import evaluate, load_run
from regard.train.run import RESULT_FILE, SPEC_FILE, RunSpec, build_task, read_spec, run_training
from regard.train.settings import parse_settings
from regard.train.trainer import CHECKPOINTS, Diverged, Interrupted, TrainProgress as Seen

OUT = Path("runs/last")
Watch = Callable[[Seen], None]


def train(
    context: typer.Context,
    task: Annotated[
        str, typer.Option(help="Name and arguments: lm, classify:level=char, recall:pairs=8.")
    ] = "",
    data: Annotated[
        str | None, typer.Option(help="File, folder or hf:name, for tasks on your own data.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The column of the text, where the data are rows.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="The column of the label; label unless given.")
    ] = None,
    mixer: Annotated[str, typer.Option(help="Name and arguments: local:window=64.")] = "vanilla",
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an example, at most.")
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Width of a token.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Heads of attention.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 2,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Width of the feed-forward layers [4 × dim].")
    ] = None,
    position: Annotated[str, typer.Option(help="How tokens know where they stand.")] = "learned",
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Share that is dropped.")] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 1000,
    seconds: Annotated[str | None, typer.Option(help="Stop after so long: 90s, 3m.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples in an update.")] = 32,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 1e-3,
    set_: Annotated[
        list[str],
        typer.Option("--set", help="Any other setting: warmup=100, ema=0.999, schedule=rsqrt."),
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the order of examples.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the same words again go on where it stopped.")
    ] = OUT,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this folder; --steps or --seconds: for longer."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="The result as one JSON object to stdout.")
    ] = False,
) -> None:
    """Train one model on one task, into a folder.  Ctrl-C keeps what was done.

    Example: regard train --task lm --data texts/ --mixer local:window=64 --length 256 --dim 128 --layers 4 --out runs/mine
    """
    with user_errors():
        if resume is not None:
            refuse_others(context, {"resume", "json", "steps", "seconds"})
            more: dict[str, Any] = {"steps": steps} if given_in(context, "steps") else {}
            more |= {} if seconds is None else {"seconds": parse_duration(seconds)}
            spec, folder = extended(resume, more), resume
        else:
            often = max(1, steps // 10)
            given = {
                "steps": steps,
                "batch": batch,
                "rate": rate,
                "seed": seed,
                "evaluate": often,
                "save": often,
            }
            given |= {} if seconds is None else {"seconds": parse_duration(seconds)}
            given |= parse_key_values(set_, f"--set takes name=value, not {' '.join(set_)!r}")
            spec = RunSpec(
                task=task_part(task, data, length, text=text, label=label),
                mixer=parse_spec(mixer),
                dim=dim,
                heads=heads,
                layers=layers,
                hidden=hidden,
                position=parse_spec(position),
                dropout=dropout,
                settings=parse_settings(given),
            )
            folder = checked_folder(out, spec)
    found = _run(spec, folder, quiet=json or not is_main_process())
    if not is_main_process():
        return
    if json:
        print_json({"folder": str(folder), **found})
    else:
        tell(folder, found, console())


def refuse_others(context: typer.Context, allowed: set[str]) -> None:
    """A resumed run has its words already."""
    extra = sorted(
        name for name in context.params if name not in allowed and given_in(context, name)
    )
    if extra:
        raise ValueError(
            f"--resume goes on with the words of the run: leave --{extra[0].strip('_')} out"
        )


def given_in(context: typer.Context, name: str) -> bool:
    """Whether the user wrote this option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def extended(folder: Path, more: dict[str, Any]) -> RunSpec:
    """The words of a run, with more steps or seconds than it has had; then it is not over any more."""
    spec = read_spec(folder)
    if not more:
        return spec
    result = read_json(folder / RESULT_FILE) if (folder / RESULT_FILE).exists() else {}
    for name, had in ((name, result.get(name, 0)) for name in more):
        if more[name] <= had:
            raise ValueError(
                f"the run in {folder} has had {had:.6g} {name}: to go on it needs more, not {more[name]:g}"
            )
    (folder / RESULT_FILE).unlink(
        missing_ok=True
    )  # the checkpoint of its end is there: nothing is lost if this ends here
    return spec.model_copy(update={"settings": parse_settings(spec.settings.model_dump() | more)})


def task_part(word: str, data: str | None, length: int | None, **columns: str | None) -> ModuleSpec:
    """The task with its data, whose path is made whole so that the run can be used from anywhere."""
    if not word:
        raise ValueError(
            "say what to learn: --task lm, --task classify, --task recall:pairs=8; or --resume a run"
        )
    return add_data_arguments(parse_spec(word), data, {"length": length, **columns})


def checked_folder(out: Path, spec: RunSpec) -> Path:
    """A folder that is free, or has this very run."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: --out names a folder")
    if (out / SPEC_FILE).exists() and (there := read_spec(out)) != spec:
        other = [
            name for name in RunSpec.model_fields if getattr(there, name) != getattr(spec, name)
        ]
        raise ValueError(
            f"{out} has a run with another {', '.join(other)}: take another --out, or --resume {out}"
        )
    return out


def _run(spec: RunSpec, folder: Path, *, quiet: bool) -> dict[str, Any]:
    """Train with a bar on stderr; what stops it is said in one line, with how to go on."""
    go_on = f"regard train --resume {folder}"
    try:
        with user_values(), bar(Console(stderr=True), quiet=quiet) as watch:
            return run_training(spec, folder, watch)
    except Interrupted as stop:
        fail(f"{str(stop).split(': run the same')[0]}; go on with: {go_on}", INTERRUPTED)
    except KeyboardInterrupt:  # the second time, or before the first step
        begun = latest_checkpoint(folder / CHECKPOINTS) is not None
        fail(
            f"stopped at once; go on with: {go_on}"
            if begun
            else "stopped: there was nothing to keep yet",
            INTERRUPTED,
        )
    except Diverged as error:
        fail(f"{error}; try a smaller --rate")
    except ProcessLost as error:
        fail(f"{error}; go on with: {go_on}")
    except OSError as error:
        last = latest_checkpoint(folder / CHECKPOINTS)
        kept = (
            f"; the last checkpoint is {last}"
            if last is not None and str(last) not in str(error)
            else ""
        )
        fail(f"{error}{kept}; when that is mended, go on with: {go_on}")


@contextmanager
def user_values() -> Iterator[None]:
    """What does not fit together is an answer; what the system says, such as a full disk, is another."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, ImportError) as error:
        fail(str(error))


@contextmanager
def bar(to: Console, *, quiet: bool) -> Iterator[Watch]:
    """A bar with the time left, the loss and the speed; where there is no terminal, a line for each tenth."""
    if not quiet and not to.is_terminal:
        yield Lines(to)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=to, transient=True, disable=quiet) as shown:
        whole = shown.add_task("training", total=1.0)
        yield lambda seen: shown.update(whole, completed=seen.fraction, description=in_words(seen))


def in_words(seen: Seen) -> str:
    """ "step 40/200  loss 1.234  5,678 tokens/s"."""
    speed = seen.tokens / max(seen.seconds, 1e-9)
    return f"step {seen.step}/{seen.steps}  loss {seen.loss:.3f}  {speed:,.0f} tokens/s"


class Lines:
    """Says so at each tenth."""

    def __init__(self, to: Console) -> None:
        self.to, self.tenths = to, 0

    def __call__(self, seen: Seen) -> None:
        """After a step."""
        tenths = math.floor(10 * seen.fraction + 1e-9)
        if tenths > self.tenths:
            self.tenths = tenths
            left = seen.seconds * (1 - seen.fraction) / seen.fraction
            self.to.print(f"{in_words(seen)}  {left:.0f} s left", highlight=False)


def tell(folder: Path, found: dict[str, Any], to: Console) -> None:
    """What came of a run."""
    to.print(
        plot_text(
            [row["step"] for row in found["curve"]],
            [row["valid"] for row in found["curve"]],
            found["metric"],
        )
    )
    speed = found["tokens"] / max(found["seconds"], 1e-9)
    to.print(f"{found['metric']} {found['test']:.4f} on test, {found['best']:.4f} at best on valid")
    to.print(
        f"{found['steps']:,} steps, {found['seconds']:.0f} s, {speed:,.0f} tokens/s, {found['parameters']:,} parameters"
    )
    to.print(f"kept in {folder}")


def eval_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that is over.")],
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    examples: Annotated[
        int | None, typer.Option(min=1, help="The first so many; all unless given.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples at a time.")] = 32,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """Measure a trained model again, on a whole split.

    Example: regard eval runs/mine --split test
    """
    with user_errors():
        run = load_run(folder)
        found = evaluate(run.model, build_task(run.spec), split, examples=examples, batch=batch)
    if json:
        print_json(
            {
                "folder": str(folder),
                "task": run.spec.task.name,
                "mixer": run.spec.mixer.name,
                **found,
            }
        )
        return
    unit = {"bits": f" for each {found['unit']}"} if "unit" in found else {}
    numbers = ", ".join(
        f"{k} {value:.4f}{unit.get(k, '')}"
        for k, value in found.items()
        if isinstance(value, float)
    )
    typer.echo(f"{numbers} over {found['examples']:,} examples of {split}")
