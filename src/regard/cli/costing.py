"""regard cost: parameters, FLOPs, activations and state of a model, and what it takes to train it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.text import Text

from regard.cli.arguments import parse
from regard.cli.cost_table import cost_table, measured_table, plan_table
from regard.cli.say import USAGE, console, fail, print_json, user_errors
from regard.errors import Unsupported
from regard.measure.accelerators import HERE, accelerator
from regard.measure.cost import Cost, cost
from regard.measure.memory import StepMemory, step_memory
from regard.measure.model import Sizes, TokenModel, on_meta
from regard.measure.plan import BYTES, Job, Plan, plan
from regard.measure.timing import Measured, measured, why_not
from regard.registry import get
from regard.show.build import fitted, heads_of

MOST, LONGEST = 1 << 40, 1 << 25
PLAIN = (int, float, str, bool, type(None))
DIM, HEADS, LAYERS, VOCAB, LENGTH = 512, 8, 6, 32_000, 4096


@dataclass(frozen=True)
class Answer:
    """All that was found out about a model."""

    sizes: Sizes
    length: int
    batch: int
    dtype: str
    heads: int
    model: TokenModel
    cost: Cost
    memory: StepMemory


def cost_command(
    name: Annotated[str, typer.Argument(help="A recipe, as `regard list` names it: the mixer of every block.")] = "vanilla",
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = LENGTH,
    dim: Annotated[int, typer.Option(help="Width of a token.")] = DIM,
    heads: Annotated[int | None, typer.Option(help=f"{HEADS} unless given, or what the recipe prefers.")] = None,
    layers: Annotated[int, typer.Option(help="Blocks.")] = LAYERS,
    vocab: Annotated[int, typer.Option(help="Words of the embedding and of the head.")] = VOCAB,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = 1,
    hidden: Annotated[int | None, typer.Option(help="Width inside the feed-forward layers; 4 dim unless given.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Built causal.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Another argument, as name=value; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of the numbers: {', '.join(BYTES)}.")] = "float32",
    measure: Annotated[bool, typer.Option("--measure", help="Run a few steps, where the machine allows it.")] = False,
    plan: Annotated[str | None, typer.Option(help=f'An accelerator, such as H100, or "{HERE}": plan the training.')] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to train on in all, for --plan.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """What a model costs, by formula, so that the largest costs nothing to ask about.

    The model is an embedding, blocks of one mixer and a feed-forward layer, and a head over the vocabulary.

    Example: regard cost vanilla --causal --dim 8192 --heads 64 --layers 80 --length 1000000 --dtype bfloat16 --plan H100
    """
    _check_options(plan, tokens)
    with user_errors():
        recipe = get(name)
        heads = heads_of(recipe, HEADS) if heads is None else heads
        _check_sizes(length=length, dim=dim, heads=heads, batch=batch)
        given = {"dim": dim, "heads": heads, **parse(recipe, set_ or []), **({"causal": True} if causal else {})}
        options = {key: value for key, value in fitted(recipe, length, given).items() if key != "dim"}
        answer = _answer(Sizes(recipe, options, dim, layers, vocab, hidden), length, batch, dtype, heads)
        plans = [] if plan is None else _plans(answer, plan, tokens)
        refusal = why_not(answer.sizes, length, batch) if measure else None
        found = measured(answer.sizes, length, batch) if measure and refusal is None else None
    if json:
        print_json(_as_json(answer, plans, found, refusal))
    else:
        _print(answer, plans, found, refusal)


def _check_options(plan: str | None, tokens: int | None) -> None:
    if tokens is not None and plan is None:
        fail("--tokens is for --plan: name an accelerator", USAGE)
    if tokens is not None and not 1 <= tokens <= MOST * MOST:
        fail(f"--tokens must be a whole number >= 1, not {tokens}", USAGE)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        most = LONGEST if name == "length" else MOST
        if not 1 <= size <= most:
            raise ValueError(f"--{name} must be between 1 and {most:,}, not {size:,}")


def _answer(sizes: Sizes, length: int, batch: int, dtype: str, heads: int) -> Answer:
    if dtype not in BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(BYTES)}, not {dtype!r}")
    model, width = on_meta(sizes), BYTES[dtype][0]
    found = cost(model, length, batch=batch, width=width)
    memory = step_memory(model, length, batch=batch, width=width)
    return Answer(sizes, length, batch, dtype, heads, model, found, memory)


def _plans(answer: Answer, name: str, tokens: int | None) -> list[Plan | str]:
    """Without and with recomputation; a reason where no number of devices is enough."""
    device, job = accelerator(name), Job(answer.model, answer.length, answer.batch, answer.dtype, tokens)
    found: list[Plan | str] = []
    for recompute in (False, True):
        try:
            found.append(plan(job, device, heads=answer.heads, recompute=recompute))
        except Unsupported as refusal:
            found.append(str(refusal))
    return found


def _as_json(answer: Answer, plans: list[Plan | str], found: Measured | None, refusal: str | None) -> dict[str, Any]:
    sizes = answer.sizes
    options = {key: value if isinstance(value, PLAIN) else repr(value) for key, value in sizes.options.items()}
    return {
        "recipe": sizes.recipe.name, "options": options, "dim": sizes.dim, "layers": sizes.layers, "vocab": sizes.vocab,
        "length": answer.length, "batch": answer.batch, "dtype": answer.dtype,
        "cost": answer.cost.as_json(), "step_memory": asdict(answer.memory),
        "plans": [each if isinstance(each, str) else asdict(each) | {"seconds": each.seconds} for each in plans],
        "measured": None if found is None else asdict(found), "not_measured": refusal,
    }  # fmt: skip


def _print(answer: Answer, plans: list[Plan | str], found: Measured | None, refusal: str | None) -> None:
    out, sizes = console(), answer.sizes
    words = f"{answer.batch} x {answer.length:,} tokens, {sizes.layers} layers of width {sizes.dim}, {answer.dtype}"
    out.print(Text.assemble((sizes.recipe.name, "bold cyan"), f"  {words}"))
    out.print()
    out.print(cost_table(answer.cost))
    out.print()
    out.print(measured_table(answer.cost, answer.memory, found))
    if refusal is not None:
        out.print(f"not measured: {refusal}")
    if plans:
        out.print()
        out.print(plan_table(plans))
