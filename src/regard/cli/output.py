"""How the command line talks: results to stdout, what went wrong in one line to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console

USAGE = 2  # the exit code of a wrong option
INTERRUPTED = 130  # and of one that was stopped by Ctrl-C


def console() -> Console:
    """The terminal; a pipe or a file gets lines of a hundred characters, whatever the window."""
    wide = None if sys.stdout.isatty() else 100
    return Console(highlight=False, width=wide)


def print_json(value: Any) -> None:
    """One value on stdout, and nothing else."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def fail(message: str, code: int = 1) -> NoReturn:
    """One line to stderr, and the end."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """Around what is done with the user's own values: there a ValueError or TypeError is an answer and not a bug."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, ImportError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write {error.filename or 'the file'}: {error.strerror or error}")
