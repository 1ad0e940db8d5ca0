"""Tasks to train on, by name: synthetic probes, Long Range Arena, and your own data."""

from __future__ import annotations

import inspect
from typing import Any

from regard.errors import did_you_mean
from regard.tasks.base import IGNORE_INDEX, Batch, Example, Task
from regard.tasks.byte_text import ByteTextClassification
from regard.tasks.image_classification import ImageClassification
from regard.tasks.language_modeling import LanguageModeling
from regard.tasks.listops import ListOps
from regard.tasks.pathfinder import Pathfinder
from regard.tasks.probes import CopyTask, DyckTask, ParityTask, RecallTask, SelectiveCopyTask
from regard.tasks.retrieval import TextRetrieval
from regard.tasks.text_classification import TextClassification
from regard.tasks.tokenizers import TextProcessor, processor_from_dict

TASKS: dict[str, type[Task]] = {
    "copy": CopyTask,
    "selective_copy": SelectiveCopyTask,
    "recall": RecallTask,
    "parity": ParityTask,
    "dyck": DyckTask,
    "classify": TextClassification,
    "lm": LanguageModeling,
    "listops": ListOps,
    "pathfinder": Pathfinder,
    "image": ImageClassification,
    "text": ByteTextClassification,
    "retrieval": TextRetrieval,
}

__all__ = [
    "IGNORE_INDEX",
    "TASKS",
    "Batch",
    "Example",
    "Task",
    "TextProcessor",
    "create_task",
    "processor_from_dict",
]


def create_task(name: str, /, **arguments: Any) -> Task:
    """Create a task by name: `create_task("recall", length=256, pairs=32)`."""
    if name not in TASKS:
        raise ValueError(f"No task {name!r}: {did_you_mean(str(name), TASKS)}")
    known = inspect.signature(TASKS[name]).parameters
    for argument in arguments:
        if argument not in known:
            hint = did_you_mean(argument, known)
            raise TypeError(f"Task {name!r} takes no argument {argument!r}: {hint}")
    return TASKS[name](**arguments)
