"""The commands `regard train` and `regard eval`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.device_options import DeviceOption, DtypeOption, check_device
from regard.cli.output import INTERRUPTED, console, echo, fail, print_json, user_errors
from regard.cli.parsing import add_data_arguments, parse_duration, parse_key_values, parse_spec
from regard.cli.plugins import PluginOption
from regard.cli.renamed import RENAMED_SETTINGS
from regard.cli.text_plot import plot_text
from regard.plugins import load_plugins, require_plugins
from regard.progress import ProgressBar, progress_bar
from regard.train import Diverged, Interrupted, ProcessLost
from regard.train.checkpoint import latest_checkpoint
from regard.train.distributed import is_main_process
from regard.train.evaluation import breakdown_table, describe_values
from regard.train.inference import evaluate, load_run
from regard.train.overview import RunOverview
from regard.train.plateau import PlateauDetector
from regard.train.run import (
    RESULT_FILE,
    SPEC_FILE,
    ModelSettings,
    RunSpec,
    build_task,
    check_run_folder,
    inherit_arguments,
    read_finished_spec,
    read_model_settings,
    read_result,
    read_spec,
    refuse_attention_settings,
    run_training,
)
from regard.train.settings import UNLIMITED_STEPS, parse_settings
from regard.train.trainer import CHECKPOINTS, TrainProgress

OUT = Path("runs/last")
DEFAULT_STEPS = 1000
NOAM_LR = 1.0  # the factor in the formula of Vaswani et al. 2017
WARMUP_STEPS, MEASURED_STEPS = 2, 5  # before the time of a step is printed


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
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Start from the weights, the model settings and the tokenizer of this run.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with parts of the model: mixer, dim, heads, layers, ffn, ffn_dim, "
            "norm, residual, position, stack, dropout, encoder_mixer, encoder_layers, cross, rnn. "
            "Options override it."
        ),
    ] = None,
    mixer: Annotated[
        str, typer.Option(help="Mixer with arguments: vanilla, local:window=64.")
    ] = "vanilla",
    encoder_mixer: Annotated[
        str | None,
        typer.Option(
            help="Mixer of the encoder, if the model has a decoder too.",
            show_default="as the decoder",
        ),
    ] = None,
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
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of training steps.",
            show_default="1000, or as many as --max-time allows",
        ),
    ] = None,
    max_time: Annotated[
        str | None, typer.Option(help="Time limit of the run: 90s, 3m, 1h30m.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 32,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Peak learning rate; with --schedule noam, the factor of its formula.",
            show_default="0.001; 1 for noam",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Learning rate after the warmup: cosine, rsqrt, noam or constant.",
            show_default="cosine",
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Steps of linear warmup.", show_default="50"),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(min=0, help="Weight decay of AdamW.", show_default="0.01")
    ] = None,
    label_smoothing: Annotated[
        float | None,
        typer.Option(min=0, help="Share of the target probability spread over all classes."),
    ] = None,
    clip_grad_norm: Annotated[
        float | None,
        typer.Option(min=0, help="Clip gradients to this norm; 0: do not.", show_default="1"),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            min=1, help="Parts that a batch is split into, to save memory.", show_default="1"
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Weights to save: best (by the metric on valid) or last.", show_default="best"
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    set_: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="Other training settings: ema_decay=0.999, patience=5, eval_every=200. "
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
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Start at step 0 again if none of the run's checkpoints can be read."
        ),
    ] = False,
    plugin: PluginOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model on a task and save it in a folder. Ctrl-C saves a checkpoint first.

    Example: regard train --task lm --data texts/ --mixer local:window=64 --out runs/mine
    """

    limits: dict[str, Any] = {}
    with user_errors():
        plugins = load_plugins(plugin)
        if steps is not None or max_time is not None:  # a limit that is not given is none
            limits = {
                "steps": UNLIMITED_STEPS if steps is None else steps,
                "max_seconds": None if max_time is None else parse_duration(max_time),
            }
        if resume is not None:
            _refuse_options(
                context,
                allowed={"resume", "restart", "json", "steps", "max_time", "device", "plugin"},
            )
            require_plugins(read_spec(resume).plugins, resume, _warn)
            saved = read_spec(resume).settings
            device = device if _is_given(context, "device") else saved.device
            check_device(device, saved.dtype)
            spec = use_device(_extend_run(resume, limits, restart=restart), device)
            folder = resume
        elif not task:
            raise ValueError(
                "Give a task: --task lm, --task classify, --task recall:pairs=8; or --resume a run."
            )
        else:
            limits = limits or {"steps": DEFAULT_STEPS}
            every = max(1, limits["steps"] // 10)
            named = {
                "batch_size": batch_size if _is_given(context, "batch_size") else None,
                "lr": lr,
                "seed": seed if _is_given(context, "seed") else None,
                "device": device if _is_given(context, "device") else None,
                "dtype": dtype if _is_given(context, "dtype") else None,
                "schedule": schedule,
                "warmup_steps": warmup,
                "weight_decay": weight_decay,
                "label_smoothing": label_smoothing,
                "max_grad_norm": clip_grad_norm,
                "accumulation_steps": accumulate,
                "keep": keep,
            }
            settings = limits | {"eval_every": every, "save_every": every}
            settings |= _join_settings(named, _parse_settings_option(set_))
            if settings.get("schedule") == "noam":
                settings.setdefault("lr", NOAM_LR)
            if settings.get("max_grad_norm") == 0:
                settings["max_grad_norm"] = None
            check_device(settings.get("device", "auto"), settings.get("dtype", "float32"))
            parsed = parse_settings(settings)
            arguments = {"length": length, "text": text, "label": label}
            options = {
                "mixer": parse_spec(mixer),
                "encoder_mixer": None if encoder_mixer is None else parse_spec(encoder_mixer),
                "dim": dim,
                "heads": heads,
                "layers": layers,
                "ffn_dim": ffn_dim,
                "position": parse_spec(position),
                "dropout": dropout,
            }
            task_spec = add_data_arguments(parse_spec(task), data, arguments)
            model: dict[str, Any] = {}
            if from_ is not None:
                from_ = from_.expanduser().absolute()
                source = read_finished_spec(from_, _warn)
                model = {name: getattr(source, name) for name in ModelSettings.model_fields}
                task_spec = inherit_arguments(from_, task_spec)
            if config is not None:
                model |= read_model_settings(config)
            given = {name: each for name, each in options.items() if _is_given(context, name)}
            if model.get("rnn") is not None:
                refuse_attention_settings(given)
            model |= given
            spec = RunSpec(
                task=task_spec,
                **model,
                settings=parsed,
                pretrained=None if from_ is None else str(from_),
                plugins=tuple(plugins),
            )
            folder = out
            spec = _check_folder(folder, spec)
    quiet, extend = json or not is_main_process(), bool(resume and limits)
    result = _train(spec, folder, restart=restart, extend=extend, quiet=quiet)
    if not is_main_process():
        return
    if json:
        print_json({"folder": str(folder), **result})
    else:
        _print_result(folder, result)


def _join_settings(named: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Join the settings that have an option with those of --set; twice the same is an error."""
    given = {name: value for name, value in named.items() if value is not None}
    for name in given.keys() & others.keys():
        raise ValueError(f"--set {name}=... repeats an option of its own: give one of them.")
    return given | others


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


def _extend_run(folder: Path, more: dict[str, Any], *, restart: bool) -> RunSpec:
    """The spec of a run with more steps or time."""

    spec = read_spec(folder)
    if not more:
        return spec
    result = read_result(folder) if (folder / RESULT_FILE).exists() else {}
    for name, value in more.items():
        unit = name.removeprefix("max_")
        used = result.get(unit, 0)
        if value is not None and value <= used:
            raise ValueError(
                f"Run {folder} has already used {used:.6g} {unit}: give more than that, "
                f"not {value:g}."
            )
    settings = parse_settings(spec.settings.model_dump() | more)
    damaged: list[str] = []
    last = latest_checkpoint(folder / CHECKPOINTS, lambda path, reason: damaged.append(reason))
    if restart and last is not None:
        raise ValueError(f"{last} is intact: omit --restart to continue from there.")
    if result and last is None and not restart:
        raise ValueError(
            f"Run {folder} has no checkpoint to continue from. {' '.join(damaged)} "
            "To train again from step 0, add --restart."
        )
    return spec.model_copy(update={"settings": settings})


def use_device(spec: RunSpec, device: str) -> RunSpec:
    """The spec of the same run on another device."""
    settings = parse_settings(spec.settings.model_dump() | {"device": device})
    return spec.model_copy(update={"settings": settings})


def _check_folder(folder: Path, spec: RunSpec) -> RunSpec:
    """The spec of the run to train in a folder that is free or contains the same run.

    A plugin may have changed since the run started: this is a warning, and the run remembers the
    content that it started with.
    """
    check_run_folder(folder)
    if (folder / SPEC_FILE).exists():
        recorded = read_spec(folder).plugins
        if [each.path for each in recorded] == [each.path for each in spec.plugins]:
            require_plugins(recorded, folder, _warn)
            spec = spec.model_copy(update={"plugins": recorded})
        existing = use_device(read_spec(folder), spec.settings.device)  # it may resume elsewhere
        other = [f for f in RunSpec.model_fields if getattr(existing, f) != getattr(spec, f)]
        if other:
            raise ValueError(
                f"{folder} has a run with a different {', '.join(other)}: "
                f"choose another --out, or use --resume {folder}"
            )
    return spec


def _warn(text: str) -> None:
    echo(f"warning: {text}", err=True)


def _train(
    spec: RunSpec, folder: Path, *, restart: bool, extend: bool, quiet: bool
) -> dict[str, Any]:
    """Train with a progress bar on stderr; errors say how to resume."""

    if restart and not extend and (folder / RESULT_FILE).exists():
        fail(f"Run {folder} is finished: omit --restart, or use another --out.")
    resume = f"Resume with: regard train --resume {folder}"
    try:
        with progress_bar(quiet=quiet) as bar:
            printer = _ProgressPrinter(bar, quiet=quiet)
            return run_training(
                spec,
                folder,
                printer,
                on_start=printer.start,
                on_warning=_warn,
                restart=restart,
                extend=extend,
            )
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
    """Shows what a run will do, its loss and its speed: in the bar, or as a line at each tenth
    without a terminal. Warns once if nothing is learned."""

    def __init__(self, bar: ProgressBar, *, quiet: bool) -> None:
        self.bar, self.quiet, self.tenths = bar, quiet, 0
        self.calls, self.measured_from = 0, 0.0
        self.plateau: PlateauDetector | None = None

    def start(self, overview: RunOverview) -> None:
        """Print what the run will do."""
        if overview.constant_loss is not None:
            self.plateau = PlateauDetector(overview.settings.steps, overview.constant_loss)
        if not self.quiet:
            for line in overview.lines():
                echo(line, err=True)

    def __call__(self, progress: TrainProgress) -> None:
        speed = progress.tokens / max(progress.seconds, 1e-9)
        last = "" if progress.steps == UNLIMITED_STEPS else f"/{progress.steps}"
        status = f"step {progress.step}{last}  loss {progress.loss:.3f}  {speed:,.0f} tokens/s"
        self.bar.update(progress.fraction, status)
        self._print_estimate(progress)
        if self.plateau is not None:
            warning = self.plateau.update(progress.step, progress.loss)
            if warning:
                _warn(warning)
        tenths = math.floor(10 * progress.fraction + 1e-9)
        if tenths > self.tenths and not self.quiet and not self.bar.visible:
            left = progress.seconds * (1 - progress.fraction) / progress.fraction
            echo(f"{status}  {left:.0f} s left", err=True)
        self.tenths = max(tenths, self.tenths)

    def _print_estimate(self, progress: TrainProgress) -> None:
        """Print the time of a step and of the run, once the first steps are measured."""
        self.calls += 1
        if self.calls == WARMUP_STEPS:
            self.measured_from = progress.seconds
        if self.calls != WARMUP_STEPS + MEASURED_STEPS or self.quiet:
            return
        step = (progress.seconds - self.measured_from) / MEASURED_STEPS
        text = f"measured: {step:.3g} s a step"
        if progress.steps != UNLIMITED_STEPS:
            left = format_duration(step * (progress.steps - progress.step))
            text += f", about {left} and the evaluations for the other steps"
        echo(text, err=True)


def format_duration(seconds: float) -> str:
    """A duration in words: "45 s", "3 min 20 s", "2 h 5 min"."""
    total = round(seconds)
    if total < 60:
        return f"{max(total, 1)} s"
    minutes, rest = divmod(total, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _print_result(folder: Path, result: dict[str, Any]) -> None:
    to, metric, curve = console(), result["metric"], result["curve"]
    to.print(plot_text([row["step"] for row in curve], [row["valid"] for row in curve], metric))
    _print_breakdowns(result)
    speed = result["tokens"] / max(result["seconds"], 1e-9)
    step = result.get("best_step")
    at = "" if step is None else f" at step {step:,}"
    test = "no value" if result["test"] is None else f"{result['test']:.4f}"
    examples = f"{result['examples']:,} examples"
    to.print(f"{metric} {test} on {examples} of test, best on valid {result['best']:.4f}{at}")
    others = {name: value for name, value in result["metrics"].items() if name != metric}
    if others:
        values = ", ".join(f"{name} {value:.4g}" for name, value in others.items())
        to.print(f"also on test: {values}")
    for name, signature in result.get("signatures", {}).items():
        to.print(f"{name}: {signature}")
    to.print(
        f"{result['steps']:,} steps, {result['seconds']:.0f} s, {speed:,.0f} tokens/s, "
        f"{result['parameters']:,} parameters"
    )
    to.print(f"saved to {folder}")


def _print_breakdowns(result: dict[str, Any]) -> None:
    """Print the tables of metrics that have one, such as F1 by type."""
    for name, rows in result.get("breakdown", {}).items():
        echo(breakdown_table(name, rows).to_text())


def eval_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    max_examples: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate on a random sample of this size.", show_default="all"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 32,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    plugin: PluginOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a trained model on a whole split.

    Example: regard eval runs/mine --split test
    """

    with user_errors():
        run = load_run(
            folder,
            device=check_device(device, dtype),
            dtype=dtype,
            plugins=plugin,
            on_warning=_warn,
        )
        task = build_task(run.spec)
        metrics = evaluate(
            run.model,
            task,
            split,
            examples=max_examples,
            batch_size=batch_size,
            dtype=dtype,
        )
    signatures = {each.name: each.signature for each in task.metrics if each.signature}
    if json:
        names = {"task": run.spec.task.name, "mixer": run.spec.mixer.name}
        more = {"signatures": signatures} if signatures else {}
        print_json({"folder": str(folder), **names, **metrics, **more})
        return
    _print_breakdowns(metrics)
    numbers = {k: value for k, value in metrics.items() if isinstance(value, float)}
    echo(f"{describe_values(task, numbers)} over {metrics['examples']:,} examples of {split}")
    for name, signature in signatures.items():
        echo(f"{name}: {signature}")
