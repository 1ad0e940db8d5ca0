"""Pictures of attention patterns, in the terminal and as PNG.

from regard.show import draw, draw_family

draw(Band(2, 2) | Global(1), 32)
draw_family("sparse")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from pathlib import Path

from rich.console import Console
from rich.text import Text

from regard.console import PlainConsole
from regard.mixer import Mixer
from regard.pattern import Pattern
from regard.recipe_index import find_family
from regard.registry import FAMILIES, Recipe, get_recipe, list_recipes
from regard.show import image, terminal
from regard.show.build import build_example, pattern_of
from regard.show.description import paper_url
from regard.show.picture import (
    Picture,
    count_pictures,
    map_picture,
    pattern_picture,
    pattern_pictures,
)

__all__ = [
    "Picture",
    "draw",
    "draw_family",
    "map_picture",
    "overlay_picture",
    "pattern_picture",
    "pattern_pictures",
    "save_family",
    "save_png",
]

TOKENS = 48  # in the picture of a small example
GALLERY_TOKENS = 40  # in each picture of a gallery


def draw(pattern: Pattern, n: int, console: Console | None = None) -> None:
    """Print a pattern for n tokens. If they do not fit, several tokens share a cell."""
    console = console or PlainConsole()
    colour = terminal.supports_colour(console)
    cells = terminal.max_cells(count_pictures(pattern), colour)
    console.print(terminal.render_pictures(pattern_pictures(pattern, n, cells), colour))


def draw_family(family: str, console: Console | None = None) -> None:
    """Print name, paper, summary and picture of all recipes of a family."""
    console = console or PlainConsole()
    colour = terminal.supports_colour(console)
    for name in list_recipes(family=family):
        recipe = get_recipe(name)
        url = paper_url(recipe) or ""
        console.print(Text.assemble((name, "bold"), f"  {recipe.paper}  ", (url, "dim")))
        console.print(Text(f"{recipe.summary}.\n"), soft_wrap=True)
        pictures = example_pictures(recipe, TOKENS, lambda n: terminal.max_cells(n, colour))
        console.print(terminal.render_pictures(pictures, colour))
        console.print()


def example_pictures(
    recipe: Recipe, n: int, max_cells: Callable[[int], int], *, causal: bool = False
) -> list[Picture]:
    """Pictures of the recipe's example with at most n tokens, one per cell.

    `max_cells(count)` is the number of cells per side that fit if there are `count` pictures.
    """
    pattern = pattern_of(build_example(recipe, n, causal=causal))
    n = min(n, max_cells(count_pictures(pattern)))
    return mixer_pictures(build_example(recipe, n, causal=causal), n)


def mixer_pictures(mixer: Mixer, n: int, cells: int | None = None) -> list[Picture]:
    """Pictures of a mixer's pattern, one per kind of head, or of its map if it has no pattern."""
    pattern = pattern_of(mixer)
    if pattern is None:
        return [map_picture(mixer, n)]
    return pattern_pictures(pattern, n, n if cells is None else cells)


def overlay_picture(mixer: Mixer, n: int) -> Picture:
    """One picture of a mixer for n tokens, with the patterns of all heads overlaid."""
    pattern = pattern_of(mixer)
    if pattern is None:
        return map_picture(mixer, n)
    return pattern_picture(reduce(or_, pattern.parts) if pattern.heads else pattern, n, n)


def save_png(path: Path, recipe: Recipe, pictures: list[Picture]) -> None:
    """Save pictures of a recipe with its name, paper and density."""
    paper = recipe.paper + (f"  ·  arXiv {recipe.arxiv}" if recipe.arxiv else "")
    subtitle = f"{paper}  ·  {pictures[0].tokens:,} tokens"
    if pictures[0].parts[0].kind != "weight":  # patterns, with global tokens
        patterns = [reduce(or_, (part.pattern for part in p.parts)) for p in pictures]
        density = sum(p.density(pictures[0].tokens) for p in patterns) / len(patterns)
        subtitle += f"  ·  {density:.1%} of all pairs"
    image.save(path, pictures, recipe.name, subtitle)


def save_family(path: Path, family: str) -> None:
    """Save a gallery of all recipes of a family as one PNG."""
    recipes = [get_recipe(name) for name in list_recipes(family=family)]
    named = [
        (r.name, r.paper, overlay_picture(build_example(r, GALLERY_TOKENS), GALLERY_TOKENS))
        for r in recipes
    ]
    image.save_gallery(path, named, FAMILIES[find_family(family)].capitalize())
