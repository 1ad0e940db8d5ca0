"""The command line: `regard compare`, `regard train`, `regard list` and others.

Commands are imported when they are called, so that `regard --help` and `regard list` do not wait
for torch.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import regard
from regard.cli import startup
from regard.cli.renamed import Command


class CommandEntry(NamedTuple):
    """Where a command is defined, and its line in `regard --help`.

    Attributes:
        target: "module:function" in this package; the function may also be a `typer.Typer`.
        summary: The first sentence of its docstring.
        slow: Whether it loads torch: then a line is printed at once.
        settings: Context settings of the command.
    """

    target: str
    summary: str
    slow: bool = False
    settings: dict[str, Any] | None = None


EXTRA_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
COMMANDS = {
    "compare": CommandEntry(
        "comparing:compare", "Train mixers on the same tasks and recommend one.", slow=True
    ),
    "report": CommandEntry(
        "reporting:report", "Write the HTML page of a comparison again.", slow=True
    ),
    "train": CommandEntry("training:train", "", slow=True),
    "eval": CommandEntry("training:eval_command", "", slow=True),
    "predict": CommandEntry("inference:predict", "", slow=True),
    "generate": CommandEntry("inference:generate", "", slow=True),
    "runs": CommandEntry("runs:runs", ""),
    "swap": CommandEntry("swap:swap_command", "", slow=True, settings=EXTRA_ARGUMENTS),
    "export": CommandEntry("exporting:export_command", "", slow=True),
    "list": CommandEntry("listing:list_command", ""),
    "show": CommandEntry("showing:show", ""),
    "gallery": CommandEntry("gallery:gallery", ""),
    "cost": CommandEntry("costing:cost_command", ""),
    "bench": CommandEntry("benching:bench", "", slow=True),
    "demo": CommandEntry(
        "demo:demo",
        "Compare seven mixers on two tasks, in about three minutes on two cores.",
        slow=True,
    ),
    "tour": CommandEntry("tour:tour", "", slow=True),
}


class LazyGroup(TyperGroup):
    """The `regard` command. It imports a subcommand when it is called, and none for `--help`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            entry = COMMANDS[cmd_name]
            module, _, name = entry.target.partition(":")
            target = getattr(import_module(f"regard.cli.{module}"), name)
            if not isinstance(target, typer.Typer):
                parent = typer.Typer(rich_markup_mode=self.rich_markup_mode, add_completion=False)
                parent.command(cmd_name, cls=Command, context_settings=entry.settings)(target)
                target = parent
            command = typer.main.get_command(target)
            for each in (command, *getattr(command, "commands", {}).values()):
                each.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(each.help or ""))
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:  # suggestions are made from self.commands
            self.commands = {name: self._stub(name) for name in COMMANDS}
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        imported = self.commands
        self.commands = {name: self._stub(name) for name in COMMANDS}
        super().format_help(ctx, formatter)
        self.commands = imported

    def _stub(self, name: str) -> TyperCommand:
        return TyperCommand(name, help=COMMANDS[name].summary)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def print_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Attention and token-mixing mechanisms for PyTorch: compare, train, inspect and measure them.

    Example: regard compare --mixers local,linear --tasks recall --lengths 128 --budget 3m
    """


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # show ? on a terminal without Unicode
    arguments = sys.argv[1:]
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is not None and command.slow and "--help" not in arguments:
        print(f"regard {arguments[0]}: loading PyTorch ...", file=sys.stderr, flush=True)
    startup.record_startup()
    app()
