"""The option --plugin, which several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PluginOption = Annotated[
    list[Path],
    typer.Option(
        "--plugin",
        help="A Python file that registers recipes or tasks; it is executed. May be repeated.",
    ),
]
