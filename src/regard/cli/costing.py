"""`regard cost`: parameters, FLOPs, memory and streaming state of a model; training plans."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from regard.cli.output import USAGE, console, fail, print_json, user_errors

if TYPE_CHECKING:  # they load torch, which takes seconds
    from regard.measure.memory import StepMemory
    from regard.measure.plan import TrainingJob, TrainingPlan
    from regard.measure.timing import MeasuredStep
    from regard.models import ModelConfig

MAX_SIZE, MAX_LENGTH = 1 << 40, 1 << 24
DIM, HEADS, LAYERS, VOCAB_SIZE, LENGTH = 512, 8, 6, 32_000, 4096
RECIPE = "vanilla"


@dataclass(frozen=True)
class CostReport:
    """Results of `regard cost` for one model."""

    name: str
    config: ModelConfig
    job: TrainingJob
    memory: StepMemory
    plans: list[TrainingPlan | str]
    measured: MeasuredStep | None = None
    refusal: str | None = None


def cost_command(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe used in every block.", show_default=f"{RECIPE}")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json or folder of a model, instead of a recipe.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Sequence length.", show_default=f"{LENGTH}, or the maximum of the model"
        ),
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Model width.", show_default=f"{DIM}")] = None,
    heads: Annotated[
        int | None,
        typer.Option(help="Number of heads.", show_default=f"{HEADS}, or that of the recipe"),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Number of blocks.", show_default=f"{LAYERS}")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary size.", show_default=f"{VOCAB_SIZE:,}")
    ] = None,
    ffn_dim: Annotated[
        int | None, typer.Option(help="Width of the feed-forward layers.", show_default="4 x dim")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Build a causal model.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Recipe argument, as name=value. Can be repeated."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a training step.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="Type of weights and activations: float32, tf32 or bfloat16.")
    ] = "float32",
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run training steps here, if the model fits.")
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option(help='Plan the training on an accelerator, such as H100, or "this machine".'),
    ] = None,
    accelerators: Annotated[
        Path | None, typer.Option(help="JSON file with your own accelerators, for --plan.")
    ] = None,
    accumulation_steps: Annotated[
        int, typer.Option(help="Micro-batches in a training step, for --plan.")
    ] = 1,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to train on in total, for --plan.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a model costs: parameters, FLOPs, activations, peak memory and streaming state.

    Costs are counted without computing anything, so any size is fast and takes no memory. The model
    is an embedding, blocks of one recipe with feed-forward layers, and a language-model head; or
    any --config.

    Example: regard cost vanilla --causal --dim 8192 --heads 64 --layers 80 --length 1000000 --dtype
    bfloat16 --plan H100
    """
    only_for_plan = {
        "--tokens": tokens is not None,
        "--accelerators": accelerators is not None,
        "--accumulation-steps": accumulation_steps != 1,
    }
    for option, is_given in only_for_plan.items():
        if is_given and plan is None:
            fail(f"{option} needs --plan with an accelerator", USAGE)

    with user_errors():
        from regard.measure.model import build_on_meta
        from regard.measure.plan import BYTES, TrainingJob

        sizes = {"dim": dim, "heads": heads, "layers": layers}
        sizes |= {"vocab_size": vocab_size, "ffn_dim": ffn_dim}
        if config is None:
            length = LENGTH if length is None else length
            model = _config_from_options(recipe or RECIPE, length, sizes, causal, set_ or [])
        else:
            given = {**sizes, "causal": causal, "set": set_}
            model, length = _read_config(config, length, recipe, given)
        _check_sizes(length=length, batch_size=batch_size)
        if dtype not in BYTES:
            raise ValueError(f"--dtype must be one of {', '.join(BYTES)}, not {dtype!r}")
        job = TrainingJob(
            build_on_meta(model), length, batch_size, dtype, tokens, accumulation_steps
        )
        report = _report(str(config or recipe or RECIPE), model, job, plan, accelerators)
        if measure:
            report = _with_measurement(report)
    if json:
        print_json(_as_json(report))
    else:
        _print(report)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        most = MAX_LENGTH if name == "length" else MAX_SIZE
        if not 1 <= size <= most:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be between 1 and {most:,}, not {size:,}")


def _config_from_options(
    name: str, length: int, sizes: dict[str, int | None], causal: bool, settings: list[str]
) -> ModelConfig:
    """The configuration of a language model with one recipe in every block."""
    from regard.cli.recipe_arguments import parse_recipe_arguments
    from regard.measure.model import simple_config
    from regard.registry import get_recipe
    from regard.show.build import fill_length_arguments

    recipe = get_recipe(name)
    given = {key: size for key, size in sizes.items() if size is not None}
    heads, dim = given.get("heads", recipe.default_heads(HEADS)), given.get("dim", DIM)
    _check_sizes(length=length, dim=dim, heads=heads)
    arguments = {"heads": heads, **parse_recipe_arguments(recipe, settings)}
    if causal:
        arguments["causal"] = True
    return simple_config(
        recipe,
        fill_length_arguments(recipe, length, arguments),
        dim=dim,
        layers=given.get("layers", LAYERS),
        vocab_size=given.get("vocab_size", VOCAB_SIZE),
        hidden=given.get("ffn_dim"),
    )


def _read_config(
    path: Path, length: int | None, recipe: str | None, given: dict[str, Any]
) -> tuple[ModelConfig, int]:
    """A configuration from a file, and the sequence length."""
    from regard.models.serialization import CONFIG_NAME, read_config

    options = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    options += [recipe] if recipe else []
    if options:
        raise ValueError(f"--config describes the whole model: remove {options[0]}")
    config = read_config(path / CONFIG_NAME if path.is_dir() else path)
    if (tokens := config.input.fixed_length) is not None:
        if length not in (None, tokens):
            raise ValueError(f"--length is {length}, but the input has {tokens} tokens: remove it")
        return config, tokens
    return config, length or config.length or LENGTH


def _report(
    name: str, config: ModelConfig, job: TrainingJob, device: str | None, accelerators: Path | None
) -> CostReport:
    from regard.errors import Unsupported
    from regard.measure.accelerators import ACCELERATORS, find_accelerator, read_accelerators
    from regard.measure.memory import step_memory
    from regard.measure.plan import RECOMPUTE, plan

    memory = step_memory(
        job.model, job.length, batch=job.batch, itemsize=job.itemsize, total=job.cost
    )
    plans: list[TrainingPlan | str] = []
    if device is not None:
        table = ACCELERATORS if accelerators is None else read_accelerators(accelerators)
        accelerator = find_accelerator(device, table)
        for recompute in RECOMPUTE:
            try:
                again = replace(job, recompute=recompute)
                plans.append(plan(again, accelerator, heads=config.heads))
            except Unsupported as error:  # no number of devices is enough
                plans.append(str(error))
    return CostReport(name, config, job, memory, plans)


def _with_measurement(report: CostReport) -> CostReport:
    from regard.measure.timing import measure_step, refusal_reason

    arguments = report.config, report.job.length, report.job.batch
    refusal = refusal_reason(*arguments)
    if refusal is not None:
        return replace(report, refusal=refusal)
    return replace(report, measured=measure_step(*arguments))


def _as_json(report: CostReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "config": report.config.model_dump(),
        "length": report.job.length,
        "batch_size": report.job.batch,
        "dtype": report.job.dtype,
        "cost": report.job.cost.as_json(),
        "step_memory": {**asdict(report.memory), "process_bytes": report.memory.process_bytes},
        "plans": [
            each if isinstance(each, str) else {**asdict(each), "step_seconds": each.step_seconds}
            for each in report.plans
        ],
        "measured": None if report.measured is None else asdict(report.measured),
        "not_measured": report.refusal,
    }


def _print(report: CostReport) -> None:
    from regard.cli.cost_table import cost_table, plan_table, step_table

    out, config, job = console(), report.config, report.job
    sizes = f"{job.batch} x {job.length:,} tokens, {config.layers} layers of width {config.dim}"
    out.print(Text.assemble((report.name, "bold cyan"), f"  {sizes}, {job.dtype}"))
    out.print()
    out.print(cost_table(job.cost))
    if job.cost.active_parameters < job.cost.parameters:
        out.print(f"active parameters per token: {job.cost.active_parameters:,}")
    out.print()
    out.print(step_table(job.cost, report.memory, report.measured))
    if report.refusal is not None:
        out.print(f"not measured: {report.refusal}")
    if report.plans:
        out.print()
        out.print(plan_table(report.plans))
