"""The command line: `regard compare`, `regard train`, `regard list` and others.

Commands are imported when they are called, so that `regard --help` and `regard list` do not wait
for torch.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import regard
from regard.cli import startup
from regard.cli.renamed import Command
from regard.console import escape_controls


class CommandEntry(NamedTuple):
    """Where a command is defined.

    Attributes:
        target: "module:function" in this package; the function may also be a `typer.Typer`.
        slow: Whether it loads torch: then a line is printed at once.
        settings: Context settings of the command.
    """

    target: str
    slow: bool = True
    settings: dict[str, Any] | None = None

    def load(self) -> Any:
        """Import the module and return the function."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(f"regard.cli.{module}"), name)

    def summary(self) -> str:
        """Return the first paragraph of the docstring, read from the source without an import."""
        module, _, name = self.target.partition(":")
        tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return first_paragraph(ast.get_docstring(node))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                keywords = getattr(node.value, "keywords", [])  # name = typer.Typer(help=...)
                texts = [each.value for each in keywords if each.arg == "help"]
                return first_paragraph(ast.literal_eval(texts[0])) if texts else ""
        return ""


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a text as one line."""
    return " ".join((text or "").partition("\n\n")[0].split())


EXTRA_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
COMMANDS = {
    "compare": CommandEntry("comparing:compare"),
    "report": CommandEntry("reporting:report"),
    "train": CommandEntry("training:train"),
    "eval": CommandEntry("training:eval_command"),
    "predict": CommandEntry("inference:predict"),
    "generate": CommandEntry("inference:generate"),
    "sample": CommandEntry("sampling:sample"),
    "topics": CommandEntry("topics:topics"),
    "runs": CommandEntry("runs:runs", slow=False),
    "swap": CommandEntry("swap:swap_command", settings=EXTRA_ARGUMENTS),
    "few-shot": CommandEntry("few_shot:few_shot"),
    "export": CommandEntry("exporting:export_command"),
    "list": CommandEntry("listing:list_command", slow=False),
    "show": CommandEntry("showing:show", slow=False),
    "look": CommandEntry("looking:look_command"),
    "watch": CommandEntry("watching:watch", slow=False),
    "gallery": CommandEntry("gallery:gallery", slow=False),
    "cost": CommandEntry("costing:cost_command", slow=False),
    "bench": CommandEntry("benching:bench"),
    "demo": CommandEntry("demo:demo"),
    "tour": CommandEntry("tour:tour"),
}


@contextmanager
def escaped_usage_errors() -> Iterator[None]:
    """Show control characters of arguments as escapes in the errors that typer prints."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):  # typer has its own copy of click's exceptions
            error.message = escape_controls(error.message)  # type: ignore[attr-defined]
        raise


class LazyGroup(TyperGroup):
    """The `regard` command. It imports a subcommand when it is called, and none for `--help`."""

    on_loaded: Callable[[], object] = staticmethod(lambda: None)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            entry = COMMANDS[cmd_name]
            target = entry.load()
            self.on_loaded()
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
        if args[0] not in COMMANDS:
            self.commands = dict.fromkeys(COMMANDS, TyperCommand(""))  # names for a suggestion
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with escaped_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            with escaped_usage_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:  # commands that save something say so themselves
            from regard.cli.output import INTERRUPTED, fail

            fail("interrupted.", INTERRUPTED)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        imported = self.commands
        self.commands = {
            name: TyperCommand(name, help=entry.summary()) for name, entry in COMMANDS.items()
        }
        super().format_help(ctx, formatter)
        self.commands = imported


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
        print(f"regard {regard.__version__}")
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


def main(on_loaded: Callable[[], object] = lambda: None) -> None:
    """Run the command line.

    Args:
        on_loaded: Called when the modules of the command are imported, before it runs.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # show ? on a terminal without Unicode
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *given: escape_controls(format_warning(*given))
    arguments = sys.argv[1:]
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is not None and command.slow and "--help" not in arguments:
        print(f"regard {arguments[0]}: loading PyTorch ...", file=sys.stderr, flush=True)
    startup.record_startup()
    LazyGroup.on_loaded = staticmethod(on_loaded)
    app()
