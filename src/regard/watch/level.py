"""The interface of the levels of the detector: leaves, sequences, paths, series, users.

A level says how surprising each part of an event is, in bits. What a part is depends on the level:
a leaf, the step from one endpoint to the next, a column of a series. `regard.watch.calibration`
turns bits into p-values, group by group, so levels need not agree on a scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event


class Surprise(NamedTuple):
    """Surprise of the parts of several events, flat: the parts of event i are those from
    `offsets[i]` to `offsets[i + 1]`.

    Attributes:
        offsets: (events + 1) of int64.
        groups: Calibration group of each part, of int32; see `Level.group_names`.
        bits: Surprise of each part, -log2 of its probability or a score that grows with it, of
            float64 and finite.
    """

    offsets: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int32]
    bits: npt.NDArray[np.float64]


@dataclass
class Finding:
    """Why one part of an event is surprising.

    Attributes:
        level: Name of the level.
        kind: "value", "type", "unseen_key", "missing_key", "duplicate_key", "transition", "path",
            "session", "series", "cluster" ...
        path: Path of the leaf, or what the part is about.
        observed: What was observed.
        bits: Surprise.
        p: Its p-value in its group.
        expected: The most probable values, with probabilities.
        text: One sentence for people.
        context: Earlier events that mattered: (source, weight).
    """

    level: str
    kind: str
    path: str
    observed: Any
    bits: float
    p: float
    expected: list[tuple[Any, float]] = field(default_factory=list)
    text: str = ""
    context: list[tuple[str, float]] = field(default_factory=list)


class Level(ABC):
    """One level of the detector.

    A level is fitted on normal events. It then scores events in order, with a state for each
    entity that it carries forward. The state of an entity is a JSON value, or None at its start, so
    that it can be stored anywhere. `score` puts a new state in its place and leaves the old one as
    it is, because alerts are explained from the state before the batch.

    A level is built with the `WatchSettings` as its only argument.
    """

    name: str
    bits_bound_p: ClassVar[bool] = False  # whether a part with b bits has no p-value below 2 ** -b

    @abstractmethod
    def fit(self, events: Sequence[Event]) -> None:
        """Learn from normal events, in order of time."""

    @abstractmethod
    def score(self, events: Sequence[Event], states: dict[tuple[str, str], Any]) -> Surprise:
        """Surprise of events in order of time, each given what came before it.

        Args:
            events: A micro-batch; an entity may occur several times.
            states: State of each (tenant, entity) in the batch; the dict is updated, the states are
                replaced.
        """

    @abstractmethod
    def update(self, events: Sequence[Event]) -> None:
        """Learn from more events that were found normal, or were accepted by someone."""

    @abstractmethod
    def group_names(self) -> Sequence[str]:
        """Name of each calibration group so far; groups are only ever added."""

    @abstractmethod
    def explain(self, event: Event, part: int, state: Any) -> Finding:
        """Explain the surprise of one part of an event, given the state before it. `p` is left
        at 1."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What was learned, without tensors; see `tensors`."""

    @classmethod
    @abstractmethod
    def from_json(cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> Level:
        """The inverse of `to_json` and `tensors`."""

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays that are stored as safetensors."""
        return {}
