"""regard gallery: a whole family at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.output import console, user_errors
from regard.show import draw_family, save_family


def gallery(
    family: Annotated[str, typer.Option(help='A family, such as C or "sparse by position".')] = "C",
    png: Annotated[
        Path | None, typer.Option(help="Draw to this PNG file instead of to the terminal.")
    ] = None,
) -> None:
    """Draw every recipe of a family.

    Example: regard gallery --family C --png docs/images/patterns.png
    """
    with user_errors():
        if png is None:
            draw_family(family, console())
            return
        save_family(png, family)
    typer.echo(f"wrote {png}")
