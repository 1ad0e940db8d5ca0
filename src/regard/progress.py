"""Progress on stderr, shared by all long commands. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ProgressBar:
    """One line per stage, each with a bar, the elapsed time and the remaining time.

    Attributes:
        visible: Whether the bar is drawn. If not, callers may print lines instead.
    """

    def __init__(self, progress: Any, visible: bool) -> None:
        self.progress, self.visible = progress, visible
        self.tasks: dict[str, Any] = {}

    def update(
        self, completed: float, description: str, *, total: float = 1.0, stage: str = ""
    ) -> None:
        """Set how much of `total` is completed; a new `stage` adds a line."""
        if stage not in self.tasks:
            self.tasks[stage] = self.progress.add_task(description, total=total)
        self.progress.update(self.tasks[stage], completed=completed, description=description)

    def stop(self) -> None:
        """Remove the bar, before an error message is printed."""
        self.progress.stop()


@contextmanager
def progress_bar(*, quiet: bool = False, count: bool = False) -> Iterator[ProgressBar]:
    """Draw a progress bar on stderr while the block runs.

    Args:
        quiet: Draw nothing. The same happens if stderr is not a terminal.
        count: Show "3/12" instead of a percentage.
    """
    from rich import progress as rich_progress

    from regard.console import PlainConsole

    console = PlainConsole(stderr=True)
    visible = console.is_terminal and not quiet
    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn() if count else rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(
        *columns, console=console, transient=True, disable=not visible
    ) as shown:
        yield ProgressBar(shown, visible)
