"""Events of `regard watch` for tasks: read from files, and split in order of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard.tasks.base import SPLITS

if TYPE_CHECKING:
    from regard.watch.event import Event

TRAIN, VALID = 0.8, 0.1  # shares of the events

EventSplits = Mapping[str, "Sequence[Event]"]


def read_event_splits(
    data: str | Path | EventSplits, *, entity: str, endpoint: str, time: str, format: str
) -> dict[str, Sequence[Event]]:
    """The events of each split.

    Args:
        data: A file or folder that `regard watch` reads; its events are split in order of time.
            Or the events of each split.
        entity, endpoint, time, format: See `regard.watch.settings.WatchSettings`.
    """
    if isinstance(data, Mapping):
        missing = [split for split in SPLITS if not data.get(split)]
        if missing:
            raise ValueError(f"There are no events for {' and '.join(missing)}.")
        return dict(data)
    from regard.watch.events import read_events
    from regard.watch.settings import WatchSettings

    settings = WatchSettings(entity=entity, endpoint=endpoint, time=time, format=format)
    return split_by_time(list(read_events(data, settings)), str(data))


def split_by_time(events: Sequence[Event], where: str) -> dict[str, Sequence[Event]]:
    """The first 80 % of the events for training, then 10 % each for valid and test."""
    if len(events) < 10:
        raise ValueError(f"{where} has {len(events)} events; 10 are needed for three splits.")
    ordered = sorted(events, key=lambda event: event.time)
    first, second = round(TRAIN * len(ordered)), round((TRAIN + VALID) * len(ordered))
    return {"train": ordered[:first], "valid": ordered[first:second], "test": ordered[second:]}
