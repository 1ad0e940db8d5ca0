"""regard gallery: the attention patterns of a family of recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.output import console, echo, user_errors
from regard.show import draw_family, save_family


def gallery(
    family: Annotated[
        str, typer.Option(help="Family of recipes, such as sparse or linear.")
    ] = "sparse",
    png: Annotated[
        Path | None, typer.Option(help="Save to this PNG file instead of printing.")
    ] = None,
) -> None:
    """Draw the attention patterns of all recipes of a family.

    Example: regard gallery --family sparse --png docs/images/patterns.png
    """
    with user_errors():
        if png is None:
            draw_family(family, console())
            return
        save_family(png, family)
    echo(f"Wrote {png}")
