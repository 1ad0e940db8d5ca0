"""Tasks by name."""

from __future__ import annotations

import inspect
from typing import Any

from regard.errors import nearest
from regard.tasks.base import IGNORE, Batch, Example, Task
from regard.tasks.classify import Classify
from regard.tasks.codec import Reading, reading_of
from regard.tasks.images import Image
from regard.tasks.language import Language
from regard.tasks.listops import ListOps
from regard.tasks.pathfinder import Pathfinder
from regard.tasks.probes import Copy, Dyck, Parity, Recall, SelectiveCopy
from regard.tasks.retrieval import Retrieval
from regard.tasks.texts import Text

TASKS: dict[str, type[Task]] = {
    "copy": Copy, "selective_copy": SelectiveCopy, "recall": Recall, "parity": Parity, "dyck": Dyck,
    "classify": Classify, "language": Language, "lm": Language,
    "listops": ListOps, "pathfinder": Pathfinder, "image": Image, "text": Text, "retrieval": Retrieval,
}  # fmt: skip

__all__ = ["IGNORE", "TASKS", "Batch", "Example", "Reading", "Task", "reading_of", "task"]


def task(name: str, /, **arguments: Any) -> Task:
    """Make a task by name: `task("recall", length=256, pairs=32)`.  Unknown names and arguments raise, with the nearest."""
    if name not in TASKS:
        raise ValueError(f"no task {name!r}: {nearest(str(name), TASKS)}")
    known = inspect.signature(TASKS[name]).parameters
    for argument in arguments:
        if argument not in known:
            raise TypeError(f"{name} takes no argument {argument!r}: {nearest(argument, known)}")
    return TASKS[name](**arguments)
