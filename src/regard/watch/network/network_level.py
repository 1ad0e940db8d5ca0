"""What the levels with a network share: the floor beneath, and how they are trained and saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy.typing as npt

from regard.models import Model
from regard.watch.event import Event
from regard.watch.level import Level
from regard.watch.network.mixture import Gain
from regard.watch.network.settings import NetworkSettings
from regard.watch.network.training import OnStep
from regard.watch.network.weights import model_tensors

F = TypeVar("F", bound=Level)


class NetworkLevel(Level, Generic[F]):
    """A level whose bits are -log2 of a mixture of a network and a level without one.

    Args:
        floor: The level without a network.
        settings: How to build and train the network.

    Attributes:
        gain: What the network saves on held-out events; None before `fit_network`.
    """

    def __init__(self, floor: F, settings: NetworkSettings) -> None:
        self.floor, self.settings, self.name = floor, settings, floor.name
        self.gain: Gain | None = None

    @abstractmethod
    def fit_network(
        self,
        events: Sequence[Event],
        *,
        folder: Path | None = None,
        on_step: OnStep = lambda progress: None,
    ) -> Gain:
        """Train the network on a floor that has been fitted, and measure what it saves.

        The first 80 % of the events are for training. The weights of the mixture are fitted on the
        next tenth, which also chooses the best weights of the network, and the gain is measured on
        the last tenth.

        Args:
            events: Normal events in order of time.
            folder: Folder for checkpoints, from which an interrupted training resumes. None: none.
            on_step: Called after each training step.
        """

    @property
    @abstractmethod
    def model(self) -> Model:
        """The network."""

    def fit(self, events: Sequence[Event]) -> None:
        """Fit the floor on all events, and the network on the first 80 % of them."""
        self.floor.fit(events)
        self.fit_network(events)

    def group_names(self) -> Sequence[str]:
        """See `Level`: those of the floor."""
        return self.floor.group_names()

    def count_parameters(self) -> int:
        """Number of parameters of the network."""
        return sum(each.numel() for each in self.model.parameters())

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """See `Level`: those of the floor and the weights of the network."""
        return {
            **{f"floor.{name}": each for name, each in self.floor.tensors().items()},
            **{f"model.{name}": each for name, each in model_tensors(self.model).items()},
        }
