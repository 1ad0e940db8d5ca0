"""regard show: everything that there is to say of one recipe, and its picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from regard.backends import BackendChoice
from regard.cli.output import USAGE, console, fail, print_json, user_errors
from regard.cli.recipe_arguments import parse_recipe_arguments
from regard.mixer import CAPABILITIES
from regard.registry import FAMILIES, get_recipe
from regard.show import TOKENS, example_pictures, image, mixer_pictures, save_png, terminal
from regard.show.build import default_heads
from regard.show.description import RecipeDescription, describe_recipe, description_json, paper_url
from regard.show.picture import Picture, count_pictures

LENGTH = 4096
MOST = 131_072
DIM, HEADS = 512, 8


def show(
    name: Annotated[
        str, typer.Argument(help="A recipe, as `regard list` names it.", show_default=False)
    ],
    length: Annotated[
        int | None, typer.Option(help=f"Tokens, up to {MOST:,}; {LENGTH:,} unless given.")
    ] = None,
    dim: Annotated[int, typer.Option(help="Width of a token.")] = DIM,
    heads: Annotated[
        int | None, typer.Option(help=f"{HEADS} unless given, or what the recipe prefers.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Built causal.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw to this PNG file as well.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another argument, as name=value; may be repeated."),
    ] = None,
) -> None:
    """Show a recipe: paper, promises, cost, what would run, and a picture of who looks at whom.

    Without --length, --heads and --set the picture is that of a small example.

    Example: regard show bigbird --length 8192 --set random=2
    """
    n = _length(length)
    with user_errors():
        recipe = get_recipe(name)
        given = {
            "dim": dim,
            "heads": default_heads(recipe, HEADS) if heads is None else heads,
            **parse_recipe_arguments(recipe, set_ or []),
        }
        found = describe_recipe(recipe, n, given, causal=causal)
    asked = length is not None or heads is not None or bool(set_)
    if png is not None:
        drawn = _pictures(found, asked, lambda count: image.CELLS if count == 1 else 48)
        with user_errors():
            save_png(png, recipe, drawn)
        typer.echo(f"wrote {png}", err=True)
    if json:
        print_json(description_json(found))
    else:
        _print(console(), found, asked)


def _length(length: int | None) -> int:
    if length is not None and not 1 <= length <= MOST:
        fail(f"--length must be between 1 and {MOST:,}, not {length:,}", USAGE)
    return LENGTH if length is None else length


def _pictures(found: RecipeDescription, asked: bool, cells: Callable[[int], int]) -> list[Picture]:
    """Of the mixer itself where the user chose its size, else of the example; those without a pattern are always small."""
    if asked and found.pattern is not None:
        return mixer_pictures(found.mixer, found.length, cells(count_pictures(found.pattern)))
    return example_pictures(
        found.recipe, min(TOKENS, found.length), cells, causal=found.mixer.causal
    )


# ---------------------------------------------------------------------------------------------- in the terminal
def _print(out: Console, found: RecipeDescription, asked: bool) -> None:
    recipe, colour = found.recipe, terminal.supports_colour(out)
    drawn = _pictures(found, asked, lambda count: terminal.max_cells(count, colour))
    out.print(
        Text.assemble(
            (recipe.name, "bold cyan"), f"  {recipe.family}: {FAMILIES.get(recipe.family, '')}"
        )
    )
    out.print(
        Text.assemble(recipe.paper, "  ", (paper_url(recipe) or "", "underline")), soft_wrap=True
    )
    out.print()
    out.print(Text(f"  {recipe.formula}", "italic"))
    out.print()
    out.print(Text(inspect.getdoc(recipe.build) or ""))
    out.print()
    out.print(_sheet(found))
    out.print()
    out.print(Text(_caption(found, drawn, asked), "dim"))
    out.print(terminal.render_pictures(drawn, colour))


def _caption(found: RecipeDescription, drawn: list[Picture], asked: bool) -> str:
    """What the picture shows."""
    words = f"{drawn[0].tokens:,} tokens, rows are queries and columns are keys"
    if found.pattern is None:
        return f"it has no pattern; what it does in a small example: {words}"
    per = -(-drawn[0].tokens // drawn[0].cells)
    return f"{words}{f', {per:,} x {per:,} to a cell' if per > 1 else ''}" + (
        "" if asked else "; a small example"
    )


def _sheet(found: RecipeDescription) -> Table:
    """The facts, a line each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, value in _lines(found):
        table.add_row(label, value)
    return table


def _lines(found: RecipeDescription) -> list[tuple[str, RenderableType]]:
    shown = ", ".join(f"{name}={value!r}" for name, value in found.arguments.items())
    pattern = (
        "none: who looks at whom is not told by a pattern"
        if found.pattern is None
        else repr(found.pattern)
    )
    return [
        ("promises", _promises(found)),
        ("built with", Text(shown + (", causal=True" if found.mixer.causal else ""))),
        ("parameters", f"{found.parameters:,}"),
        ("pattern", Text(pattern)),
        ("cache", Text(found.cache().words())),
        *_costs(found),
    ]


def _promises(found: RecipeDescription) -> Text:
    """A line each: kept, or the reason why not."""
    lines = []
    for promise, meaning in CAPABILITIES.items():
        reason = found.can.reason(promise)
        tick, words = (
            (("✓", "green"), meaning) if reason is None else (("✗", "red"), f"no: {reason}")
        )
        lines.append(Text.assemble(tick, f" {promise:<7} ", words))
    return Text("\n").join(lines)


def _costs(found: RecipeDescription) -> list[tuple[str, RenderableType]]:
    keys, forward, training = found.keys(), found.runs(grad=False), found.runs(grad=True)
    if keys is None or forward is None or training is None:
        return [("runs on", "its own code: there is no choice of executor")]
    about = "" if keys.exact else ", from a sample of the queries"
    global_attention_mask = (
        ", and every marked token"
        if found.pattern is not None and found.pattern.needs_global_mask
        else ""
    )
    return [
        (
            "keys a query",
            f"{keys.mean:,.1f} in the mean, {keys.most:,} at most, of {found.length:,}{about}{global_attention_mask}",
        ),
        ("density", f"{keys.density:.2%} of all pairs"),
        ("forward", _runs(forward)),
        ("with backward", _runs(training)),
    ]


def _runs(choice: BackendChoice) -> str:
    """The executor, and why: the estimates where there are two."""
    if choice.dense_seconds is None or choice.sparse_seconds is None:
        return f"{choice.backend}: {choice.reason}"
    sparse, dense = (
        _milliseconds(seconds) for seconds in (choice.sparse_seconds, choice.dense_seconds)
    )
    return f"{choice.backend}, estimated for one example: {sparse} by tiles, {dense} dense"


def _milliseconds(seconds: float) -> str:
    """Two figures that mean something."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms"
