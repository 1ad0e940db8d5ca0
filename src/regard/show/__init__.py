"""Pictures of who looks at whom, in the terminal and as PNG.

from regard.show import draw, draw_family
draw(Band(2, 2) | Global(1), 32)
draw_family("C")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from pathlib import Path

from rich.console import Console
from rich.text import Text

from regard.mixer import Mixer
from regard.pattern import Pattern
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
    "pattern_picture",
    "pattern_pictures",
    "save_family",
    "save_png",
    "terminal_pictures",
]

TOKENS = 48  # in the picture of a small example
GALLERY = 40  # and in one of many


def draw(pattern: Pattern, n: int, console: Console | None = None) -> None:
    """Print a pattern on n tokens; more than fit are drawn as shares of a cell."""
    console = console or Console(highlight=False)
    colour = terminal.supports_colour(console)
    console.print(
        terminal.render_pictures(
            pattern_pictures(pattern, n, terminal.max_cells(count_pictures(pattern), colour)),
            colour,
        )
    )


def draw_family(family: str, console: Console | None = None) -> None:
    """Print the pictures of all recipes of a family: their names, their papers, and their small examples."""
    console = console or Console(highlight=False)
    colour = terminal.supports_colour(console)
    for name in _members(family):
        recipe = get_recipe(name)
        console.print(
            Text.assemble((name, "bold"), f"  {recipe.paper}  ", (paper_url(recipe) or "", "dim"))
        )
        console.print(Text(f"{recipe.summary}.\n"), soft_wrap=True)
        console.print(terminal.render_pictures(terminal_pictures(recipe, colour), colour))
        console.print()


def terminal_pictures(recipe: Recipe, colour: bool, *, causal: bool = False) -> list[Picture]:
    """The recipe's example, in as many tokens as a terminal shows well."""
    return example_pictures(
        recipe, TOKENS, lambda count: terminal.max_cells(count, colour), causal=causal
    )


def example_pictures(
    recipe: Recipe, n: int, cells: Callable[[int], int], *, causal: bool = False
) -> list[Picture]:
    """The recipe's example on at most n tokens, each with a cell of its own: `cells(pictures)` of them fit."""
    n = min(n, cells(count_pictures(pattern_of(build_example(recipe, n, causal=causal)))))
    return mixer_pictures(build_example(recipe, n, causal=causal), n)


def mixer_pictures(mixer: Mixer, n: int, cells: int | None = None) -> list[Picture]:
    """Of the pattern of a mixer; of one without a pattern, what it does to random tokens."""
    pattern = pattern_of(mixer)
    return (
        [map_picture(mixer, n)]
        if pattern is None
        else pattern_pictures(pattern, n, n if cells is None else cells)
    )


def save_png(path: Path, recipe: Recipe, drawn: list[Picture]) -> None:
    """One recipe's pictures, with its name, paper and density."""
    paper = recipe.paper + (f"  ·  arXiv {recipe.arxiv}" if recipe.arxiv else "")
    seen = (
        "" if drawn[0].parts[0].kind == "weight" else f"  ·  {mean_density(drawn):.1%} of all pairs"
    )
    image.save(path, drawn, recipe.name, f"{paper}  ·  {drawn[0].tokens:,} tokens{seen}")


def mean_density(drawn: list[Picture]) -> float:
    """The density of the patterns of these pictures, marked tokens included; of heads, the mean over their kinds."""
    each = [reduce(or_, (part.pattern for part in p.parts)).density(p.tokens) for p in drawn]
    return sum(each) / len(each)


def save_family(path: Path, family: str) -> None:
    """A gallery: the small examples of all recipes of a family in one PNG.  Heads that differ are laid over each other."""
    named = []
    for name in _members(family):
        recipe = get_recipe(name)
        named.append((name, recipe.paper, _overlaid(build_example(recipe, GALLERY), GALLERY)))
    image.save_gallery(path, named, FAMILIES[get_recipe(named[0][0]).family].capitalize())


def _members(family: str) -> list[str]:
    names = list_recipes(family)
    if not names:
        raise ValueError(f"there is no recipe of family {family!r} yet")
    return names


def _overlaid(mixer: Mixer, n: int) -> Picture:
    pattern = pattern_of(mixer)
    if pattern is None:
        return map_picture(mixer, n)
    return pattern_picture(reduce(or_, pattern.parts) if pattern.heads else pattern, n, n)
