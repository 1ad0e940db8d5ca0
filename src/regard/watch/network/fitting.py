"""Networks for the levels of a detector: trained, measured, and kept where they help."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from regard.errors import Unsupported, did_you_mean
from regard.literals import parse_literal
from regard.models.spec import ModuleSpec
from regard.registry import get_recipe
from regard.train.trainer import TrainProgress
from regard.watch.event import Event
from regard.watch.leaves import LeafLevel
from regard.watch.level import Level
from regard.watch.network.leaf_network import LeafNetwork
from regard.watch.network.mixture import Gain
from regard.watch.network.sequence_network import SequenceNetwork
from regard.watch.network.settings import NetworkSettings
from regard.watch.sequences.level import SequenceLevel

NETWORKS: Mapping[str, type[LeafNetwork] | type[SequenceNetwork]] = {
    "leaf": LeafNetwork,
    "sequence": SequenceNetwork,
}

OnProgress = Callable[[str, int, int], None]
"""Called with a stage, and how many of how many steps are done."""


class LevelReport(NamedTuple):
    """What came of the network of a level.

    Attributes:
        level: Name of the level.
        mixer: Name of the recipe.
        kept: Whether the network is used.
        reason: One sentence: what it saves, why the floor suffices, or why the mixer does not fit.
        gain: What it saves on held-out events; None if it was not trained.
        parameters: Number of its parameters.
        seconds: Time of its training.
    """

    level: str
    mixer: str
    kept: bool
    reason: str
    gain: Gain | None = None
    parameters: int = 0
    seconds: float = 0.0

    def describe(self) -> str:
        """The recipe and the reason, as a line."""
        size = f", {self.parameters:,} parameters, {self.seconds:.0f} s" if self.gain else ""
        return f"{self.mixer}{size}: {self.reason}"


def fit_network_levels(
    floor_levels: Sequence[Level],
    events: Sequence[Event],
    settings: NetworkSettings,
    *,
    folder: Path | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> tuple[list[Level], list[LevelReport]]:
    """Train a network on each level that can have one, and keep it where it helps.

    A network is kept if it surely saves more than `settings.min_gain` of the bits of its floor on
    held-out events; see `Gain.suffices`. Otherwise the floor suffices and stays alone.

    Args:
        floor_levels: Levels without networks, already fitted on the events. They are not changed.
        events: Normal events in order of time, without those that calibrate the detector later.
        settings: How to build and train the networks.
        folder: Folder for checkpoints, from which an interrupted training resumes. None: none.
        on_progress: Called after each training step.

    Returns:
        The levels, in the same order, and a report on each that can have a network.
    """
    check_mixers(settings)
    levels: list[Level] = []
    reports = []
    for floor in floor_levels:
        if not isinstance(floor, LeafLevel | SequenceLevel):
            levels.append(floor)
            continue
        spec = settings.mixers.get(floor.name, settings.mixer)
        own = settings.model_copy(update={"mixer": spec})
        network = (
            LeafNetwork(floor, own) if isinstance(floor, LeafLevel) else SequenceNetwork(floor, own)
        )

        def on_step(progress: TrainProgress, name: str = floor.name) -> None:
            on_progress(f"network of the level {name}", progress.step, progress.steps)

        start = time.monotonic()
        try:
            gain = network.fit_network(
                events, folder=None if folder is None else folder / floor.name, on_step=on_step
            )
        except (Unsupported, ValueError) as error:
            if floor.name in settings.mixers and isinstance(error, Unsupported):
                raise  # it was asked for by name
            levels.append(floor)
            reports.append(LevelReport(floor.name, spec.name, False, str(error)))
            continue
        kept = not gain.suffices(settings.min_gain)
        levels.append(network if kept else floor)
        parameters = network.count_parameters()
        seconds = time.monotonic() - start
        reason = describe_gain(gain, settings.min_gain)
        reports.append(LevelReport(floor.name, spec.name, kept, reason, gain, parameters, seconds))
    return levels, reports


def parse_mixers(text: str) -> dict[str, Any]:
    """The settings `mixer` and `mixers` of a text: a recipe for all levels, or several after the
    names of levels.

    >>> parse_mixers("local:window=16,sequence=delta_rule")["mixers"]["sequence"].name
    'delta_rule'
    """
    found: dict[str, Any] = {"mixers": {}}
    for part in text.split(","):
        first, *arguments = part.strip().split(":")
        level, equals, name = first.rpartition("=")
        message = f"Write a mixer as name:key=value, or after a level: leaf=name, not {part!r}."
        values = {}
        for argument in arguments:
            key, has_value, value = argument.partition("=")
            if not has_value:
                raise ValueError(message)
            values[key.strip()] = parse_literal(value.strip())
        if not name.strip() or (equals and not level.strip()) or (not equals and "mixer" in found):
            raise ValueError(message)
        spec = ModuleSpec(name=name.strip(), arguments=values)
        if equals:
            found["mixers"][level.strip()] = spec
        else:
            found["mixer"] = spec
    return found


def load_network_level(
    name: str, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]
) -> Level | None:
    """The level of a network from what `to_json` and `tensors` gave, None if these are those of a
    level without one."""
    if name not in NETWORKS or not {"floor", "model"} <= content.keys():
        return None
    return NETWORKS[name].from_json(content, tensors)


def check_mixers(settings: NetworkSettings) -> None:
    """Raise a ValueError for recipes and levels that do not exist."""
    for level in settings.mixers:
        if level not in NETWORKS:
            raise ValueError(f"No level {level!r} has a network: {did_you_mean(level, NETWORKS)}")
    for spec in (settings.mixer, *settings.mixers.values()):
        get_recipe(spec.name)


def describe_gain(gain: Gain, min_gain: float) -> str:
    """What a network saves, as one sentence."""
    share = gain.saved / gain.floor if gain.floor else 0.0
    saved = (
        f"saves {gain.saved:.2f} of {gain.floor:.2f} bits an event ({share:.1%}) on "
        f"{gain.events:,} held-out events"
    )
    if gain.suffices(min_gain):
        return f"The floor suffices: the network {saved}, not surely more than {min_gain:.0%}."
    return f"The network {saved}."
