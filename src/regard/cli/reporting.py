"""regard report: the page of a comparison, written again."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.output import print_json, user_errors

PAGE = "report.html"


def report(
    folder: Annotated[
        Path, typer.Argument(help="The folder that `regard compare` wrote.", show_default=False)
    ],
    html: Annotated[
        Path | None, typer.Option(help="Where the page goes; FOLDER/report.html unless given.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="The data behind the page to stdout, and no page.")
    ] = False,
) -> None:
    """Write the page of a comparison again: recommendation, tables, plots and maps in one file that opens offline.

    Example: regard report runs/compare --html page.html
    """
    if json and html is not None:
        with user_errors():
            raise ValueError("--json writes no page: leave out --html")
    if json:
        from regard.report import load_report, report_to_json

        with user_errors():
            print_json(report_to_json(load_report(folder)))
    else:
        write_page(folder, html or folder / PAGE)


def write_page(folder: Path, path: Path) -> None:
    """Write it, and say where it is."""
    from regard.report import (  # plots take a second to import, and not every command draws
        load_report,
        write_page,
    )

    with user_errors():
        size = write_page(load_report(folder), path)
    typer.echo(f"wrote {path} ({size / 1e6:.1f} MB)", err=True)


def command(called: Callable[..., None], given: Mapping[str, object]) -> str:
    """What to type for the same again: the arguments of a command that are not its defaults."""
    words = ["regard", called.__name__]
    for name, parameter in inspect.signature(called).parameters.items():
        value = given[name]
        if value is not None and value != parameter.default:
            words += (
                [f"--{name}" if value else f"--no-{name}"]
                if isinstance(value, bool)
                else [f"--{name}", str(value)]
            )
    return shlex.join(words)
