"""regard demo: a comparison small enough to watch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.comparing import compare, format_command


def demo(
    budget: Annotated[str, typer.Option(help="Time for the whole comparison.")] = "150s",
    out: Annotated[Path, typer.Option(help="Folder of the comparison.")] = Path("runs/demo"),
) -> None:
    """Compare seven mixers on two tasks, in about three minutes on two cores.

    Example: regard demo --budget 5m
    """
    arguments: dict[str, Any] = {
        "mixers": "local:window=8,sparse_strided:stride=8,linear,performer,retnet,delta_rule",
        "tasks": "copy:length=49:symbols=8,selective_copy:length=32:symbols=8:count=4",
        "budget": budget,
        "steps": 100_000,  # more than there is time for
        "batch_size": 64,
        "lr": 5e-3,
        "dim": 32,
        "heads": 2,
        "jobs": min(2, os.cpu_count() or 1),
        "out": out,
    }
    typer.echo(f"{format_command(compare, arguments)}\n")
    compare(**arguments)
