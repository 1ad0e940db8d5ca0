"""regard list: the recipes with their papers and capabilities."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from regard.can import CAPABILITIES
from regard.cli.output import console, echo, print_json, user_errors
from regard.cli.plugins import PluginOption
from regard.recipe_index import Entry, find_entries

SHORT_NAMES = {"global_attention_mask": "global", "attn_mask": "pairs"}  # in table headers
# not in the table, which has to fit into 100 columns; `regard show` has them
HIDDEN = ("independent_queries", "onnx", "heads", "gqa", "rotary", "dropout")


def list_command(
    pattern: Annotated[
        str, typer.Argument(help="Name or wildcard: bigbird, 'synth*'.", show_default="all")
    ] = "",
    family: Annotated[
        str | None, typer.Option(help='Family, such as sparse or "sparse by position".')
    ] = None,
    can: Annotated[
        str, typer.Option(help="Only recipes with all these capabilities: causal,stream.")
    ] = "",
    plugin: PluginOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the recipes with their papers and capabilities.

    Example: regard list --family sparse --can causal,stream
    """
    with user_errors():
        capabilities = [name.strip() for name in can.split(",") if name.strip()]
        if plugin:
            from regard.plugins import load_plugins  # with torch, which the list does without

            load_plugins(plugin)
        entries = find_entries(pattern, family=family, can=capabilities, registered=bool(plugin))
    if json:
        print_json(entries)
    elif entries:
        console().print(recipe_tables(entries))
    else:
        echo("no recipe matches", err=True)


def recipe_tables(entries: list[Entry]) -> Group:
    """Return a table per family, with a tick for each capability."""
    parts: list[Text | Table] = []
    name_width = max(len(entry["name"]) for entry in entries)
    for family, group in groupby(entries, key=lambda entry: entry["family"]):
        rows = list(group)
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_header=not parts)
        table.add_column("name", width=name_width, no_wrap=True)
        table.add_column("paper", width=19)
        columns = [name for name in CAPABILITIES if name not in HIDDEN]
        for name in columns:
            header = SHORT_NAMES.get(name, name)
            table.add_column(header, width=len(header), justify="center", no_wrap=True)
        for entry in rows:
            ticks = (
                Text("✓", "green") if entry["can"][name] else Text("·", "dim") for name in columns
            )
            table.add_row(entry["name"], Text(entry["paper"]), *ticks)
        title = Text(f"\n{family}: {rows[0]['family_title']}", "bold cyan")
        parts += [title, table]
    return Group(*parts)
