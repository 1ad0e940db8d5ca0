"""Tasks to train on, by name: synthetic probes, Long Range Arena, and your own data."""

from __future__ import annotations

import inspect
import re
import warnings
from functools import lru_cache
from importlib import metadata
from typing import Any

from regard.errors import did_you_mean
from regard.tasks.base import IGNORE_INDEX, Batch, Example, ModelNeeds, Task, TokenTask
from regard.tasks.byte_text import ByteTextClassification
from regard.tasks.detection import Detection
from regard.tasks.draw import DRAWTask
from regard.tasks.forecast import Forecast
from regard.tasks.image_classification import ImageClassification
from regard.tasks.image_folder import ImageFolder
from regard.tasks.language_modeling import LanguageModeling
from regard.tasks.listops import ListOps
from regard.tasks.masked_language_modeling import MaskedLanguageModeling
from regard.tasks.masked_leaves import MaskedLeaves
from regard.tasks.metrics import MeanMetric, Metric, UndefinedMetric
from regard.tasks.ner import NamedEntities
from regard.tasks.next_event import NextEvent
from regard.tasks.pathfinder import Pathfinder
from regard.tasks.probes import CopyTask, DyckTask, ParityTask, RecallTask, SelectiveCopyTask
from regard.tasks.processors import Prediction, Processor, TextProcessor
from regard.tasks.regression import Regression
from regard.tasks.retrieval import TextRetrieval
from regard.tasks.segmentation import Segmentation
from regard.tasks.sound_folder import SoundFolder
from regard.tasks.speakers import SpeakerTagging
from regard.tasks.summarisation import Summarisation
from regard.tasks.tagging import Tagging
from regard.tasks.text_classification import TextClassification
from regard.tasks.text_pairs import TextPairClassification
from regard.tasks.translation import TextToText, Translation
from regard.tasks.video import VideoTask

ENTRY_POINT_GROUP = "regard.tasks"
NAME = re.compile(r"[a-zA-Z][\w-]*")
ALIKE = (("label", "target", "labels"), ("text", "source", "tokens"))  # arguments, in other tasks

TASKS: dict[str, type[Task]] = {
    "copy": CopyTask,
    "selective_copy": SelectiveCopyTask,
    "recall": RecallTask,
    "parity": ParityTask,
    "dyck": DyckTask,
    "classify": TextClassification,
    "pair": TextPairClassification,
    "regress": Regression,
    "tag": Tagging,
    "ner": NamedEntities,
    "image_folder": ImageFolder,
    "sound_folder": SoundFolder,
    "lm": LanguageModeling,
    "speakers": SpeakerTagging,
    "seq2seq": TextToText,
    "translate": Translation,
    "summarise": Summarisation,
    "mlm": MaskedLanguageModeling,
    "masked_leaves": MaskedLeaves,
    "next_event": NextEvent,
    "forecast": Forecast,
    "listops": ListOps,
    "pathfinder": Pathfinder,
    "image": ImageClassification,
    "draw": DRAWTask,
    "segmentation": Segmentation,
    "detection": Detection,
    "video": VideoTask,
    "text": ByteTextClassification,
    "retrieval": TextRetrieval,
}

__all__ = [
    "IGNORE_INDEX",
    "TASKS",
    "Batch",
    "Example",
    "MeanMetric",
    "Metric",
    "ModelNeeds",
    "Prediction",
    "Processor",
    "Task",
    "TextProcessor",
    "TokenTask",
    "UndefinedMetric",
    "create_task",
    "find_task",
    "list_tasks",
    "register_task",
]


def register_task(name: str, task: type[Task]) -> None:
    """Make a task known by name, for `create_task` and the command line.

    Other packages do so with an entry point of the group "regard.tasks" instead, which also works
    in the processes that a comparison starts.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"The name of a task has letters, digits, '_' and '-', and starts with a letter: "
            f"not {name!r}."
        )
    if not isinstance(task, type) or not issubclass(task, Task):
        raise TypeError(f"Task {name!r} must be a subclass of regard.tasks.Task, not {task!r}.")
    if missing := sorted(getattr(task, "__abstractmethods__", ())):
        raise TypeError(f"Task {name!r}: {task.__name__} does not define {', '.join(missing)}.")
    known = TASKS.get(name)
    # a notebook may define the class again
    is_same = known is not None and known.__qualname__ == task.__qualname__
    if known is not None and not (is_same and task.__module__ in (known.__module__, "__main__")):
        raise ValueError(f"Task {name!r} is already registered by {known.__module__}.")
    TASKS[name] = task


@lru_cache(1)
def _load_entry_points() -> None:
    """Register the tasks of other packages."""
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            register_task(entry.name, entry.load())
        except Exception as error:  # a broken package must not hide the other tasks
            warnings.warn(
                f"Could not load task {entry.name!r} from {entry.value!r}: {error}", stacklevel=2
            )


def list_tasks() -> list[str]:
    """Names of all tasks, those of other packages included."""
    _load_entry_points()
    return sorted(TASKS)


def find_task(name: str) -> type[Task]:
    """The class of a task by name."""
    if name not in TASKS:
        _load_entry_points()
    if name not in TASKS:
        raise ValueError(f"No task {name!r}: {did_you_mean(str(name), TASKS)}")
    return TASKS[name]


def create_task(name: str, /, **arguments: Any) -> Task:
    """Create a task by name: `create_task("recall", length=256, pairs=32)`.

    Unknown and missing arguments are a TypeError that names the closest match.
    """
    task = find_task(name)
    for argument in arguments:
        if not takes_argument(name, argument):
            raise TypeError(
                f"Task {name!r} takes no argument {argument!r}: {similar_argument(name, argument)}"
            )
    missing = [
        each.name
        for each in inspect.signature(task).parameters.values()
        if each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and each.name not in arguments
    ]
    if missing:
        raise TypeError(f"Task {name!r} needs the arguments {', '.join(missing)}.")
    return task(**arguments)


def takes_argument(task: str, argument: str) -> bool:
    """Whether a task takes an argument."""
    known = inspect.signature(find_task(task)).parameters
    return argument in known or any(each.kind is each.VAR_KEYWORD for each in known.values())


def similar_argument(task: str, argument: str) -> str:
    """A hint for an argument that a task does not take: another task's name of it, or one that is
    spelled alike, and all arguments."""
    known = sorted(inspect.signature(find_task(task)).parameters)
    alike = [name for names in ALIKE if argument in names for name in names if name in known]
    hint = f"did you mean {alike[0]!r}?" if alike else did_you_mean(argument, known)
    if not hint.startswith("did you mean"):
        return f"its arguments are {', '.join(known)}."
    return f"{hint} Its arguments are {', '.join(known)}."
