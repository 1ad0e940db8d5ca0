"""regard report: the page of a comparison, written again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.say import print_json, user_errors

PAGE = "report.html"


def report(
    folder: Annotated[Path, typer.Argument(help="The folder that `regard compare` wrote.", show_default=False)],
    html: Annotated[Path | None, typer.Option(help="Where the page goes; FOLDER/report.html unless given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The data behind the page to stdout, and no page.")] = False,
) -> None:
    """Write the page of a comparison again: recommendation, tables, plots and maps in one file that opens offline.

    Example: regard report runs/compare --html page.html
    """
    if json and html is not None:
        with user_errors():
            raise ValueError("--json writes no page: leave out --html")
    if json:
        from regard.report import gather, to_json

        with user_errors():
            print_json(to_json(gather(folder)))
    else:
        write_page(folder, html or folder / PAGE)


def write_page(folder: Path, path: Path) -> None:
    """Write it, and say where it is."""
    from regard.report import gather, write  # plots take a second to import, and not every command draws

    with user_errors():
        size = write(gather(folder), path)
    typer.echo(f"wrote {path} ({size / 1e6:.1f} MB)", err=True)


def command(context: typer.Context) -> str:
    """What to type for the same again: the options of this call that are not their defaults."""
    words = ["regard", str(context.info_name)]
    for option in context.command.params:
        value = context.params.get(str(option.name))
        if value is not None and value != option.default:
            words += _option(option, value)
    return shlex.join(words)


def _option(option: Any, value: object) -> list[str]:
    """`--name value`, `--flag` or `--no-flag`."""
    if isinstance(value, bool):
        return [option.opts[0] if value else option.secondary_opts[0]]
    return [option.opts[0], str(value)]
