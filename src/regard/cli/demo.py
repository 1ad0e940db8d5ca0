"""regard demo: a comparison on real text, small enough to watch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.comparing import compare, format_command
from regard.cli.output import echo
from regard.environment import cores


def demo(
    budget: Annotated[str, typer.Option(help="Time for the whole comparison.")] = "150s",
    out: Annotated[Path, typer.Option(help="Folder of the comparison.")] = Path("runs/demo"),
) -> None:
    """Compare seven mixers on speeches, in about four minutes on two cores.

    A text of 768 words (about 4,000 characters) is pieced together from passages of State of the
    Union addresses, which come with the package; the models tell for each word which of six
    presidents said it.

    Example: regard demo --budget 5m
    """
    arguments: dict[str, Any] = {
        "mixers": "local:window=32,bigbird,sparse_strided:stride=32,nystrom,linear,cosformer",
        "tasks": "speakers",
        "budget": budget,
        "steps": 100_000,  # more than there is time for
        "batch_size": 4,
        "lr": 8e-3,
        "dim": 32,
        "heads": 2,
        "position": "rope",  # all of these mixers take it, and dense softmax needs it here
        "jobs": min(2, cores()),
        "out": out,
    }
    echo(f"{format_command(compare, arguments)}\n")
    compare(**arguments)
