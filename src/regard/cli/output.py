"""Output of the command line: results to stdout, errors and progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

USAGE = 2  # exit code of a wrong option
INTERRUPTED = 130  # exit code after Ctrl-C


def console() -> Console:
    """Return the console for results; a pipe or file gets lines of 100 characters."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def progress_bar(*, visible: bool, count: bool = False) -> Progress:
    """Return a progress bar on stderr that disappears when it is done.

    Args:
        visible: Whether to show it at all.
        count: Show "3/7" beside the bar.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *([MofNCompleteColumn()] if count else []),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not visible,
    )


def print_json(value: Any) -> None:
    """Print a value as JSON to stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error as one line to stderr and exit."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """Report errors in the user's input as one line; use it only around code that handles input.

    Elsewhere a ValueError or TypeError is a bug, and its traceback is needed.
    """
    try:
        yield
    except (ValueError, TypeError, OverflowError, ImportError) as error:
        fail(str(error))
    except OSError as error:
        if error.errno is None:  # raised by Regard, with a message of its own
            fail(str(error))
        fail(f"cannot read or write {error.filename or 'the file'}: {error.strerror}")
