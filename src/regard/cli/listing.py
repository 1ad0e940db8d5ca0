"""regard list: what there is."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from regard.cli.output import console, print_json, user_errors
from regard.errors import did_you_mean
from regard.mixer import CAPABILITIES, Can
from regard.registry import FAMILIES, Recipe, get_recipe, list_recipes
from regard.show.build import build_example, mixer_capabilities
from regard.show.description import recipe_json

Entries = list[tuple[Recipe, Can]]


def list_command(
    family: Annotated[
        str | None, typer.Option(help='A family, such as C or "sparse by position".')
    ] = None,
    can: Annotated[
        str, typer.Option(help="Only those that keep all these promises, such as causal,stream.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON array to stdout.")] = False,
) -> None:
    """List the recipes, with what each promises.

    Example: regard list --family C --can causal,stream
    """
    with user_errors():
        found = entries(family, can)
    if json:
        print_json([recipe_json(recipe, promised) for recipe, promised in found])
    elif found:
        console().print(_table(found))
    else:
        typer.echo("no recipe is like that", err=True)


def entries(family: str | None, can: str) -> Entries:
    """The recipes of a family that promise all of `can`, and what they promise."""
    wanted = [promise.strip() for promise in can.split(",") if promise.strip()]
    for promise in wanted:
        if promise not in CAPABILITIES:
            raise ValueError(f"no promise {promise!r}: {did_you_mean(promise, CAPABILITIES)}")
    found = ((recipe, _can(recipe)) for recipe in map(get_recipe, list_recipes(family)))
    return [
        (recipe, promised)
        for recipe, promised in found
        if all(getattr(promised, p) for p in wanted)
    ]


def _can(recipe: Recipe) -> Can:
    mixer = build_example(recipe, 32)
    heads = mixer.dim // 8
    arguments = {**recipe.example_kwargs, "dim": mixer.dim, "heads": heads}
    return mixer_capabilities(recipe, mixer, arguments)


def _table(found: Entries) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("paper")
    for promise in CAPABILITIES:
        table.add_column(promise, justify="center", no_wrap=True)
    family = ""
    for recipe, can in found:
        if recipe.family != family:
            family = recipe.family
            table.add_row()
            table.add_row(Text(f"{family}  {FAMILIES.get(family, '')}", "bold cyan"))
        ticks = (
            Text("✓", "green") if getattr(can, promise) else Text("·", "dim")
            for promise in CAPABILITIES
        )
        table.add_row(f"  {recipe.name}", Text(recipe.paper), *ticks)
    return table
