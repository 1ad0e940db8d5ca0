"""regard report: write the page of a comparison again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.output import echo, print_json, user_errors
from regard.cli.plugins import PluginOption

if TYPE_CHECKING:
    from regard.report import ComparisonReport

PAGE = "report.html"


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder written by `regard compare`.", show_default=False)
    ],
    html: Annotated[
        Path | None,
        typer.Option(help="Where to write the page.", show_default="FOLDER/report.html"),
    ] = None,
    plugin: PluginOption = [],  # noqa: B006
    json: Annotated[
        bool, typer.Option("--json", help="Print the data of the page as JSON; write no page.")
    ] = False,
) -> None:
    """Write the HTML page of a comparison again.

    It has the recommendation, tables, plots and attention maps in one file that works offline.

    Example: regard report runs/compare --html page.html
    """
    with user_errors():
        if json and html is not None:
            raise ValueError("--json writes no page: leave out --html")
        from regard.plugins import load_plugins
        from regard.report import load_report, report_to_json

        load_plugins(plugin)
        content = load_report(folder)
    if json:
        print_json(report_to_json(content))
    else:
        write_report(content, html or folder / PAGE)


def write_report(content: ComparisonReport, path: Path) -> None:
    """Write the page and print its path."""
    from regard.report import write_page

    with user_errors():
        size = write_page(content, path)
    echo(f"Wrote {path} ({size / 1e6:.1f} MB)", err=True)
