"""The commands `regard train` and `regard eval`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.device_options import DeviceOption, DtypeOption, check_device
from regard.cli.output import INTERRUPTED, console, fail, print_json, user_errors
from regard.cli.parsing import add_data_arguments, parse_duration, parse_key_values, parse_spec
from regard.cli.renamed import RENAMED_SETTINGS
from regard.cli.text_plot import plot_text
from regard.json_files import read_json
from regard.progress import ProgressBar, progress_bar
from regard.train import Diverged, Interrupted, ProcessLost
from regard.train.checkpoint import latest_checkpoint
from regard.train.distributed import is_main_process
from regard.train.inference import evaluate, load_run
from regard.train.run import RESULT_FILE, SPEC_FILE, RunSpec, build_task, read_spec, run_training
from regard.train.settings import parse_settings
from regard.train.trainer import CHECKPOINTS, TrainProgress

OUT = Path("runs/last")


def train(
    context: typer.Context,
    task: Annotated[
        str, typer.Option(help="Task with arguments: lm, classify:tokenizer=char, recall:pairs=8.")
    ] = "",
    data: Annotated[
        str | None, typer.Option(help="Your data: a file, a folder or hf:name.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Column of the text, if the data is rows.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of the label.", show_default="label")
    ] = None,
    mixer: Annotated[
        str, typer.Option(help="Mixer with arguments: vanilla, local:window=64.")
    ] = "vanilla",
    length: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Model width.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Number of attention heads.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 2,
    ffn_dim: Annotated[
        int | None,
        typer.Option(min=1, help="Width of the feed-forward layers.", show_default="4 * dim"),
    ] = None,
    position: Annotated[
        str, typer.Option(help="Positional encoding: learned, sinusoid, rope, alibi, t5, none.")
    ] = "learned",
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Dropout probability.")] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 1000,
    max_time: Annotated[
        str | None, typer.Option(help="Time limit of the run: 90s, 3m, 1h30m.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 32,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 1e-3,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    set_: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="Other training settings: warmup_steps=100, ema_decay=0.999, schedule=rsqrt. "
            "May be repeated.",
        ),
    ] = [],  # noqa: B006
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the weights and the order of the examples.")
    ] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of the run. The same command resumes an unfinished run.")
    ] = OUT,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume the run in this folder; with --steps or --max-time, for longer."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model on a task and save it in a folder. Ctrl-C saves a checkpoint first.

    Example: regard train --task lm --data texts/ --mixer local:window=64 --out runs/mine
    """

    with user_errors():
        limit = {} if max_time is None else {"max_seconds": parse_duration(max_time)}
        if resume is not None:
            _refuse_options(context, allowed={"resume", "json", "steps", "max_time", "device"})
            saved = read_spec(resume).settings
            device = device if _is_given(context, "device") else saved.device
            check_device(device, saved.dtype)
            more = {"steps": steps} if _is_given(context, "steps") else {}
            spec, folder = use_device(_extend_run(resume, more | limit), device), resume
        elif not task:
            raise ValueError(
                "Give a task: --task lm, --task classify, --task recall:pairs=8; or --resume a run."
            )
        else:
            every = max(1, steps // 10)
            settings: dict[str, Any] = {
                "steps": steps,
                "batch_size": batch_size,
                "lr": lr,
                "seed": seed,
            }
            settings |= {"eval_every": every, "save_every": every} | limit
            settings |= {"device": device, "dtype": dtype}
            settings |= _parse_settings_option(set_)
            check_device(settings["device"], settings["dtype"])
            arguments = {"length": length, "text": text, "label": label}
            spec = RunSpec(
                task=add_data_arguments(parse_spec(task), data, arguments),
                mixer=parse_spec(mixer),
                dim=dim,
                heads=heads,
                layers=layers,
                ffn_dim=ffn_dim,
                position=parse_spec(position),
                dropout=dropout,
                settings=parse_settings(settings),
            )
            folder = out
            _check_folder(folder, spec)
    result = _train(spec, folder, quiet=json or not is_main_process())
    if not is_main_process():
        return
    if json:
        print_json({"folder": str(folder), **result})
    else:
        _print_result(folder, result)


def _parse_settings_option(settings: list[str]) -> dict[str, Any]:
    values = parse_key_values(settings, f"--set takes name=value, not {' '.join(settings)!r}.")
    for name in values:
        if name in RENAMED_SETTINGS:
            raise ValueError(f"No setting {name!r}: did you mean {RENAMED_SETTINGS[name]!r}?")
    return values


def _refuse_options(context: typer.Context, allowed: set[str]) -> None:
    """Refuse options beside --resume, which reads them from the run."""
    for name in context.params:
        if name not in allowed and _is_given(context, name):
            option = name.strip("_").replace("_", "-")
            raise ValueError(f"--resume continues with the options of the run: omit --{option}.")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _extend_run(folder: Path, more: dict[str, Any]) -> RunSpec:
    """The spec of a run with more steps or time; its result is deleted, so that it continues."""

    spec = read_spec(folder)
    if not more:
        return spec
    result = read_json(folder / RESULT_FILE) if (folder / RESULT_FILE).exists() else {}
    for name, value in more.items():
        unit = name.removeprefix("max_")
        used = result.get(unit, 0)
        if value <= used:
            raise ValueError(
                f"Run {folder} has already used {used:.6g} {unit}: give more than that, "
                f"not {value:g}."
            )
    (folder / RESULT_FILE).unlink(missing_ok=True)  # the last checkpoint has everything
    settings = parse_settings(spec.settings.model_dump() | more)
    return spec.model_copy(update={"settings": settings})


def use_device(spec: RunSpec, device: str) -> RunSpec:
    """The spec of the same run on another device."""
    settings = parse_settings(spec.settings.model_dump() | {"device": device})
    return spec.model_copy(update={"settings": settings})


def _check_folder(folder: Path, spec: RunSpec) -> None:
    """Accept a folder that is free or contains the same run."""

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file: give a folder.")
    if (folder / SPEC_FILE).exists():
        existing = use_device(read_spec(folder), spec.settings.device)  # it may resume elsewhere
        other = [f for f in RunSpec.model_fields if getattr(existing, f) != getattr(spec, f)]
        if other:
            raise ValueError(
                f"{folder} has a run with a different {', '.join(other)}: "
                f"choose another --out, or use --resume {folder}"
            )


def _train(spec: RunSpec, folder: Path, *, quiet: bool) -> dict[str, Any]:
    """Train with a progress bar on stderr; errors say how to resume."""

    resume = f"Resume with: regard train --resume {folder}"
    try:
        with progress_bar(quiet=quiet) as bar:
            return run_training(spec, folder, _ProgressPrinter(bar, quiet=quiet))
    except (ValueError, TypeError, OverflowError, ImportError) as error:
        fail(str(error))
    except Interrupted as stop:
        fail(f"{stop}. {resume}", INTERRUPTED)
    except KeyboardInterrupt:  # a second Ctrl-C, or one before the first step
        if latest_checkpoint(folder / CHECKPOINTS) is None:
            fail("Stopped before the first checkpoint; nothing was saved.", INTERRUPTED)
        fail(f"Stopped at once. {resume}", INTERRUPTED)
    except Diverged as error:
        fail(f"{error}. Try a smaller --lr.")
    except ProcessLost as error:
        fail(f"{error} {resume}")
    except OSError as error:
        last, message = latest_checkpoint(folder / CHECKPOINTS), str(error).removesuffix(".")
        if last is not None and str(last) not in message:
            message += f". The last checkpoint is {last}"
        fail(f"{message}. Fix this, then {resume[0].lower()}{resume[1:]}")


class _ProgressPrinter:
    """Shows the loss and the speed: in the bar, or as a line at each tenth without a terminal."""

    def __init__(self, bar: ProgressBar, *, quiet: bool) -> None:
        self.bar, self.quiet, self.tenths = bar, quiet, 0

    def __call__(self, progress: TrainProgress) -> None:
        speed = progress.tokens / max(progress.seconds, 1e-9)
        status = (
            f"step {progress.step}/{progress.steps}  loss {progress.loss:.3f}  "
            f"{speed:,.0f} tokens/s"
        )
        self.bar.update(progress.fraction, status)
        tenths = math.floor(10 * progress.fraction + 1e-9)
        if tenths > self.tenths and not self.quiet and not self.bar.visible:
            left = progress.seconds * (1 - progress.fraction) / progress.fraction
            typer.echo(f"{status}  {left:.0f} s left", err=True)
        self.tenths = max(tenths, self.tenths)


def _print_result(folder: Path, result: dict[str, Any]) -> None:
    to, metric, curve = console(), result["metric"], result["curve"]
    to.print(plot_text([row["step"] for row in curve], [row["valid"] for row in curve], metric))
    speed = result["tokens"] / max(result["seconds"], 1e-9)
    to.print(f"{metric} {result['test']:.4f} on test, best on valid {result['best']:.4f}")
    to.print(
        f"{result['steps']:,} steps, {result['seconds']:.0f} s, {speed:,.0f} tokens/s, "
        f"{result['parameters']:,} parameters"
    )
    to.print(f"saved to {folder}")


def eval_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    max_examples: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate only the first examples.", show_default="all"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 32,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a trained model on a whole split.

    Example: regard eval runs/mine --split test
    """

    with user_errors():
        run = load_run(folder, device=check_device(device, dtype), dtype=dtype)
        metrics = evaluate(
            run.model,
            build_task(run.spec),
            split,
            examples=max_examples,
            batch_size=batch_size,
            dtype=dtype,
        )
    if json:
        names = {"task": run.spec.task.name, "mixer": run.spec.mixer.name}
        print_json({"folder": str(folder), **names, **metrics})
        return
    numbers = (f"{k} {value:.4f}" for k, value in metrics.items() if isinstance(value, float))
    typer.echo(f"{', '.join(numbers)} over {metrics['examples']:,} examples of {split}")
