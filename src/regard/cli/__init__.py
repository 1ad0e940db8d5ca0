"""The command line: `regard compare`, `regard train`, `regard predict`, `regard list`, `regard show` and others."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import regard
from regard.cli import startup
from regard.cli.benching import bench
from regard.cli.comparing import compare
from regard.cli.costing import cost_command
from regard.cli.demo import demo
from regard.cli.exporting import export_command
from regard.cli.gallery import gallery
from regard.cli.inference import generate, predict
from regard.cli.listing import list_command
from regard.cli.reporting import report
from regard.cli.runs import runs
from regard.cli.showing import show
from regard.cli.swap import swap_command
from regard.cli.tour import tour
from regard.cli.training import eval_command, train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(compare)
app.command()(report)
app.command()(train)
app.command("eval")(eval_command)
app.command()(predict)
app.command()(generate)
app.add_typer(runs, name="runs")
app.command("swap", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
    swap_command
)
app.command("export")(export_command)
app.command("list")(list_command)
app.command()(show)
app.command()(gallery)
app.command("cost")(cost_command)
app.command()(bench)
app.command()(demo)
app.command()(tour)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Every way that a network can mix its tokens: compare them, look at them, count what they cost.

    Example: regard compare --mixers local,linear --tasks recall --lengths 128 --budget 3m
    """


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal without Greek letters shows ? and goes on
    startup.record_startup()
    app()
