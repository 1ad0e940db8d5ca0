"""regard show: one recipe, with its capabilities, cost and picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.backends import BackendChoice
from regard.cli.output import USAGE, console, echo, fail, print_json, user_errors
from regard.cli.plugins import PluginOption
from regard.cli.recipe_arguments import parse_recipe_arguments
from regard.mixer import CAPABILITIES
from regard.plugins import load_plugins
from regard.registry import FAMILIES, get_recipe
from regard.show import TOKENS, example_pictures, image, mixer_pictures, save_png, terminal
from regard.show.description import RecipeDescription, describe_recipe, description_json, paper_url
from regard.show.picture import Picture, count_pictures

LENGTH = 4096
MAX_LENGTH = 131_072
DIM, HEADS = 512, 8


def show(
    name: Annotated[
        str, typer.Argument(help="Name of a recipe, see `regard list`.", show_default=False)
    ],
    length: Annotated[
        int | None,
        typer.Option(help=f"Number of tokens, at most {MAX_LENGTH:,}. Default: {LENGTH:,}."),
    ] = None,
    dim: Annotated[int, typer.Option(help="Model width.")] = DIM,
    heads: Annotated[
        int | None,
        typer.Option(help=f"Number of heads. Default: that of the recipe, else {HEADS}."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Build it with causal=True.")] = False,
    png: Annotated[Path | None, typer.Option(help="Also save the picture as a PNG file.")] = None,
    plugin: PluginOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another argument of the recipe, name=value. Repeatable."),
    ] = None,
) -> None:
    """Show a recipe: paper, capabilities, cost, backend, and a picture of its attention pattern.

    Without --length, --heads and --set, the picture shows a small example.

    Example: regard show bigbird --length 8192 --set random=2
    """
    if length is not None and not 1 <= length <= MAX_LENGTH:
        fail(f"--length must be between 1 and {MAX_LENGTH:,}, not {length:,}", USAGE)
    with user_errors():
        load_plugins(plugin)
        recipe = get_recipe(name)
        arguments = {
            "dim": dim,
            "heads": recipe.default_heads(HEADS) if heads is None else heads,
            **parse_recipe_arguments(recipe, set_ or []),
        }
        n = LENGTH if length is None else length
        description = describe_recipe(recipe, n, arguments, causal=causal)
    full_size = length is not None or heads is not None or bool(set_)
    if png is not None:
        pictures = _pictures(description, full_size, lambda n: image.CELLS if n == 1 else 48)
        with user_errors():
            save_png(png, recipe, pictures)
        echo(f"Wrote {png}", err=True)
    if json:
        print_json(description_json(description))
    else:
        _print(console(), description, full_size)


def _pictures(
    description: RecipeDescription, full_size: bool, max_cells: Callable[[int], int]
) -> list[Picture]:
    """Pictures of the mixer; of a small example at the default size or without a pattern."""
    if full_size and description.pattern is not None:
        cells = max_cells(count_pictures(description.pattern))
        return mixer_pictures(description.mixer, description.length, cells)
    tokens = min(TOKENS, description.length)
    causal = description.mixer.causal
    return example_pictures(description.recipe, tokens, max_cells, causal=causal)


def _print(out: Console, description: RecipeDescription, full_size: bool) -> None:
    recipe, colour = description.recipe, terminal.supports_colour(out)
    family = f"{recipe.family}: {FAMILIES.get(recipe.family, '')}"
    out.print(Text.assemble((recipe.name, "bold cyan"), f"  {family}"))
    url = paper_url(recipe) or ""
    out.print(Text.assemble(recipe.paper, "  ", (url, "underline")), soft_wrap=True)
    out.print()
    out.print(Text(f"  {recipe.formula}", "italic"))
    out.print()
    out.print(Text(inspect.getdoc(recipe.function) or ""))
    out.print()
    out.print(_table(description))
    out.print()
    pictures = _pictures(description, full_size, lambda n: terminal.max_cells(n, colour))
    out.print(Text(_caption(description, pictures[0], full_size), "dim"))
    out.print(terminal.render_pictures(pictures, colour))


def _caption(description: RecipeDescription, picture: Picture, full_size: bool) -> str:
    caption = f"{picture.tokens:,} tokens, rows are queries, columns are keys"
    if description.pattern is None:
        return f"No pattern. Influence between tokens in a small example: {caption}"
    per_cell = -(-picture.tokens // picture.cells)
    if per_cell > 1:
        caption += f", {per_cell:,} x {per_cell:,} per cell"
    return caption if full_size else f"{caption} (small example)"


def _table(description: RecipeDescription) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("capabilities", _capabilities(description))
    arguments = ", ".join(f"{name}={value!r}" for name, value in description.arguments.items())
    causal = ", causal=True" if description.mixer.causal else ""
    table.add_row("arguments", Text(arguments + causal))
    table.add_row("parameters", f"{description.parameters:,}")
    table.add_row(
        "look inside", f"regard look {description.recipe.name}, or a run: regard look RUN"
    )
    pattern, keys = description.pattern, description.keys()
    table.add_row("pattern", Text("none" if pattern is None else repr(pattern)))
    table.add_row("cache", Text(str(description.cache())))
    forward, training = description.backend(grad=False), description.backend(grad=True)
    if pattern is None or keys is None or forward is None or training is None:
        table.add_row("backend", "its own code, not selectable")
        return table
    sample = "" if keys.exact else ", from a sample of the queries"
    globals_ = ", plus the global tokens" if pattern.needs_global_mask else ""
    mean = f"{keys.mean:,.1f} on average, at most {keys.most:,} of {description.length:,}"
    table.add_row("keys per query", f"{mean}{sample}{globals_}")
    table.add_row("density", f"{keys.density:.2%} of all pairs")
    table.add_row("forward", _backend(forward))
    table.add_row("with backward", _backend(training))
    return table


def _capabilities(description: RecipeDescription) -> Text:
    """One line per capability: its meaning, or why it is not supported."""
    lines, width = [], max(map(len, CAPABILITIES))
    for name, meaning in CAPABILITIES.items():
        reason = description.can.reason(name)
        tick = ("✓", "green") if reason is None else ("✗", "red")
        text = meaning if reason is None else f"no: {reason}"
        lines.append(Text.assemble(tick, f" {name:<{width}}  ", text))
    return Text("\n").join(lines)


def _backend(choice: BackendChoice) -> str:
    """The backend, with the estimated times if there is a choice."""
    if choice.seconds() is None:
        return f"{choice.backend}. {choice.reason}"
    timed = sorted((c.seconds, c.backend) for c in choice.candidates if c.seconds is not None)
    times = ", ".join(f"{name} {_milliseconds(seconds)}" for seconds, name in timed)
    return f"{choice.backend} (estimate for one example: {times})"


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms"
