"""The command line: `regard compare`, `regard train`, `regard predict`, `regard list`, `regard show` and others."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import regard
from regard.cli.comparing import compare
from regard.cli.family import gallery
from regard.cli.listing import list_command
from regard.cli.runs import runs
from regard.cli.showing import show
from regard.cli.tour import demo
from regard.cli.training import eval_command, train
from regard.cli.using import generate, predict

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(compare)
app.command()(train)
app.command("eval")(eval_command)
app.command()(predict)
app.command()(generate)
app.add_typer(runs, name="runs")
app.command("list")(list_command)
app.command()(show)
app.command()(gallery)
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Every way that a network can mix its tokens: list them, and look at them.

    Example: regard show bigbird --length 8192
    """


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters shows ? and goes on
    app()
