"""regard cost: parameters, FLOPs, activations and state of a model, and what it takes to train it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from regard.cli.cost_table import cost_table, measured_table, plan_table
from regard.cli.output import USAGE, console, fail, print_json, user_errors
from regard.cli.recipe_arguments import parse_recipe_arguments
from regard.errors import Unsupported
from regard.measure.accelerators import HERE, TABLE, Accelerator, accelerator, read_table
from regard.measure.cost import Cost, cost
from regard.measure.memory import StepMemory, step_memory
from regard.measure.model import build_on_meta, simple_config
from regard.measure.plan import BYTES, RECOMPUTE, TrainingJob, TrainingPlan, plan
from regard.measure.timing import MeasuredStep, measure_step, refusal_reason
from regard.models import ModelConfig
from regard.models.config import PatchInput
from regard.models.serialization import CONFIG_NAME, read_config
from regard.registry import get_recipe
from regard.show.build import default_heads, fill_length_arguments

MOST, LONGEST = 1 << 40, 1 << 24
DIM, HEADS, LAYERS, VOCAB, LENGTH = 512, 8, 6, 32_000, 4096
NAME = "vanilla"
Devices = Mapping[str, Accelerator]


@dataclass(frozen=True)
class CostReport:
    """All that was found out about a model."""

    name: str
    config: ModelConfig
    job: TrainingJob
    cost: Cost
    memory: StepMemory
    plans: list[TrainingPlan | str]
    measured: MeasuredStep | None = None
    refusal: str | None = None


def cost_command(
    name: Annotated[
        str | None, typer.Argument(help=f"A recipe, the mixer of every block: {NAME} unless given.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A model's config.json, or its folder, in place of a recipe."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help=f"Tokens of a sequence: {LENGTH}, or what the model is for.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help=f"Width of a token: {DIM} unless given.")] = None,
    heads: Annotated[
        int | None, typer.Option(help=f"{HEADS} unless given, or what the recipe prefers.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help=f"Blocks: {LAYERS} unless given.")] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help=f"Words of the embedding and of the head: {VOCAB:,} unless given."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = 1,
    hidden: Annotated[
        int | None, typer.Option(help="Width inside the feed-forward layers; 4 dim unless given.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Built causal.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another argument, as name=value; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of the numbers: {', '.join(BYTES)}.")] = "float32",
    measure: Annotated[
        bool, typer.Option("--measure", help="Run a few steps, where the machine allows it.")
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option(help=f'An accelerator, such as H100, or "{HERE}": plan the training.'),
    ] = None,
    accelerators: Annotated[
        Path | None, typer.Option(help="Your own accelerators for --plan, a JSON file.")
    ] = None,
    accumulate: Annotated[
        int, typer.Option(help="Parts of a batch, one after the other, for --plan.")
    ] = 1,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to train on in all, for --plan.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """What a model costs, by formula, so that the largest costs nothing to ask about.

    The model is an embedding, blocks of one mixer and a feed-forward layer, and a head over the vocabulary; or any --config.

    Example: regard cost vanilla --causal --dim 8192 --heads 64 --layers 80 --length 1000000 --dtype bfloat16 --plan H100
    """
    _check_options(
        plan,
        {
            "--tokens": tokens,
            "--accelerators": accelerators,
            "--accumulate": None if accumulate == 1 else 1,
        },
    )
    with user_errors():
        flags = {
            "dim": dim,
            "heads": heads,
            "layers": layers,
            "vocab_size": vocab_size,
            "hidden": hidden,
            "causal": causal or None,
        }
        if config is None:
            long = LENGTH if length is None else length
            model = _from_flags(name or NAME, long, flags, set_ or [])
        else:
            _check_alone(name, {**flags, "set": set_})
            model = read_config(config / CONFIG_NAME if config.is_dir() else config)
            long = _length(model, length)
        _check_sizes(length=long, batch=batch)
        job = TrainingJob(build_on_meta(model), long, batch, _known(dtype), tokens, accumulate)
        answer = _answer(
            str(config or name or NAME),
            model,
            job,
            plan,
            TABLE if accelerators is None else read_table(accelerators),
        )
        if measure:
            answer = _with_measured(answer)
    if json:
        print_json(_as_json(answer))
    else:
        _print(answer)


# ---------------------------------------------------------------------------------------------- what is asked
def _check_options(plan: str | None, only: dict[str, Any]) -> None:
    """What is for --plan alone is given with it."""
    for option, value in only.items():
        if value is not None and plan is None:
            fail(f"{option} is for --plan: name an accelerator", USAGE)


def _check_alone(name: str | None, flags: dict[str, Any]) -> None:
    """A configuration says all; flags beside it would be ignored."""
    given = [f"--{flag}" for flag, value in flags.items() if value] + ([name] if name else [])
    if given:
        raise ValueError(f"--config says what the model is: leave {given[0]} out")


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        most = LONGEST if name == "length" else MOST
        if not 1 <= size <= most:
            raise ValueError(f"--{name} must be between 1 and {most:,}, not {size:,}")


def _known(dtype: str) -> str:
    if dtype not in BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(BYTES)}, not {dtype!r}")
    return dtype


def _from_flags(name: str, length: int, flags: dict[str, Any], settings: list[str]) -> ModelConfig:
    """The configuration that a recipe and sizes make."""
    recipe, given = (
        get_recipe(name),
        {flag: value for flag, value in flags.items() if value is not None},
    )
    heads, dim = given.get("heads", default_heads(recipe, HEADS)), given.get("dim", DIM)
    _check_sizes(length=length, dim=dim, heads=heads)
    told = {
        "heads": heads,
        **parse_recipe_arguments(recipe, settings),
        **({"causal": True} if "causal" in given else {}),
    }
    sizes = {
        "dim": dim,
        "layers": given.get("layers", LAYERS),
        "vocab_size": given.get("vocab_size", VOCAB),
    }
    return simple_config(
        recipe, fill_length_arguments(recipe, length, told), **sizes, hidden=given.get("hidden")
    )


def _length(config: ModelConfig, length: int | None) -> int:
    """As asked; else the longest that the model is for."""
    fixed = config.input.length if isinstance(config.input, PatchInput) else None
    if fixed is not None and length not in (None, fixed):
        raise ValueError(f"--length is {length}, and the image has {fixed} tokens: leave it out")
    return fixed or length or config.length or LENGTH


# ---------------------------------------------------------------------------------------------- what is answered
def _answer(
    name: str, config: ModelConfig, job: TrainingJob, device: str | None, table: Devices
) -> CostReport:
    found = cost(job.model, job.length, batch=job.batch, width=job.width)
    memory = step_memory(job.model, job.length, batch=job.batch, width=job.width)
    return CostReport(
        name,
        config,
        job,
        found,
        memory,
        [] if device is None else _plans(config, job, device, table),
    )


def _with_measured(answer: CostReport) -> CostReport:
    refusal = refusal_reason(answer.config, answer.job.length, answer.job.batch)
    if refusal is not None:
        return replace(answer, refusal=refusal)
    return replace(
        answer, measured=measure_step(answer.config, answer.job.length, answer.job.batch)
    )


def _plans(
    config: ModelConfig, job: TrainingJob, name: str, table: Devices
) -> list[TrainingPlan | str]:
    """One for each way to compute again; a reason where no number of devices is enough."""
    device = accelerator(name, table)
    found: list[TrainingPlan | str] = []
    for recompute in RECOMPUTE:
        try:
            found.append(plan(replace(job, recompute=recompute), device, heads=config.heads))
        except Unsupported as refusal:
            found.append(str(refusal))
    return found


def _as_json(answer: CostReport) -> dict[str, Any]:
    job, plans = answer.job, answer.plans
    return {
        "name": answer.name,
        "config": answer.config.model_dump(),
        "length": job.length,
        "batch": job.batch,
        "dtype": job.dtype,
        "cost": answer.cost.as_json(),
        "step_memory": asdict(answer.memory) | {"process": answer.memory.process},
        "plans": [
            each if isinstance(each, str) else asdict(each) | {"seconds": each.seconds}
            for each in plans
        ],
        "measured": None if answer.measured is None else asdict(answer.measured),
        "not_measured": answer.refusal,
    }


def _print(answer: CostReport) -> None:
    out, config, job = console(), answer.config, answer.job
    words = f"{job.batch} x {job.length:,} tokens, {config.layers} layers of width {config.dim}, {job.dtype}"
    out.print(Text.assemble((answer.name, "bold cyan"), f"  {words}"))
    out.print()
    out.print(cost_table(answer.cost))
    if answer.cost.active < answer.cost.parameters:
        out.print(f"a token uses {answer.cost.active:,} of the parameters")
    out.print()
    out.print(measured_table(answer.cost, answer.memory, answer.measured))
    if answer.refusal is not None:
        out.print(f"not measured: {answer.refusal}")
    if answer.plans:
        out.print()
        out.print(plan_table(answer.plans))
