"""Output of the command line: results to stdout, errors and progress to stderr."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from regard.console import PlainConsole, escape_controls, escape_controls_in_json

if TYPE_CHECKING:
    from rich.progress import Progress

USAGE = 2  # exit code of a wrong option
INTERRUPTED = 130  # exit code after Ctrl-C


def console() -> Console:
    """Return the console for results; a pipe or file gets lines of 100 characters."""
    return PlainConsole(width=None if sys.stdout.isatty() else 100)


def stderr_console() -> Console:
    """Return the console for progress."""
    return PlainConsole(stderr=True)


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
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *([MofNCompleteColumn()] if count else []),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=stderr_console(),
        transient=True,
        disable=not visible,
    )


def echo(message: str = "", *, err: bool = False) -> None:
    """Print a line to stdout or stderr; control characters are shown as escapes."""
    typer.echo(escape_controls(message), err=err)


def echo_data(text: str) -> None:
    """Print a part of the result to stdout: as it is to a file or pipe, escaped to a terminal."""
    typer.echo(escape_controls(text) if sys.stdout.isatty() else text, nl=False)
    sys.stdout.flush()


def confirm(question: str) -> bool:
    """Ask a question on stderr."""
    return typer.confirm(escape_controls(question), err=True)


def print_json(value: Any) -> None:
    """Print a value as JSON to stdout."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    typer.echo(escape_controls_in_json(text))


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error as one line to stderr and exit."""
    echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """Report errors in the user's input as one line; use it only around code that handles input.

    Elsewhere a ValueError or TypeError is a bug, and its traceback is needed.
    """
    try:
        yield
    except (ValueError, TypeError, OverflowError, ImportError) as error:
        if type(error).__name__ == "ValidationError":  # of pydantic, which takes long to import
            from regard.errors import format_validation_error

            fail(format_validation_error(error))  # type: ignore[arg-type]
        fail(str(error))
    except OSError as error:
        if error.errno is None:  # raised by Regard, with a message of its own
            fail(str(error))
        if error.errno == errno.ENOSPC:
            fail(f"the disk is full: cannot write {error.filename or 'the file'}")
        fail(f"cannot read or write {error.filename or 'the file'}: {error.strerror}")
