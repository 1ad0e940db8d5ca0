"""What a watch model is told: which fields of an event mean what, limits, budget and levels."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LEVELS = ("leaf", "sequence", "path", "series", "user")


class WatchSettings(BaseModel):
    """Settings of `Detector.learn`, stored with the model.

    Fields are named by their path in the JSON object, such as "request.user"; a setting with
    several paths is separated by spaces, and the values are joined. "" means that the format
    decides: for CloudTrail, the entity is `userIdentity.arn` and the endpoint is `eventSource
    eventName`.

    Attributes:
        entity: Who acts: a user, an API key, an address.
        endpoint: What is called, such as "method path". Ids in it are replaced by `{id}`.
        time: The event's own clock.
        tenant: Namespace of vocabularies and hashes.
        format: Format of the events, or "auto".
        ignore: Paths that are left out, with all beneath them.
        max_bytes: Longest line.
        max_depth: Deepest nesting.
        max_leaves: Most leaves of one event; the rest is left out, and a signal says so.
        max_string: Longest string in characters; longer ones are cut, and a signal says so.
        max_events: Most events that `learn` keeps in memory: the newest.
        levels: Levels of the detector; those that are not there yet are named by an error.
        mixer: Recipe of the networks, or None: the floor alone.
        order: Order of the Markov model over endpoints.
        alerts_per_day: How many alerts a day someone can read.
        volume_per_day: Events per day, or None: measured from the events' clocks.
        new_events: Events of a new endpoint that can be alerts, because it is new.
        learning_events: Events of a new endpoint until it is scored; before, they are "learning".
        shadow_events: Events of an endpoint until its alerts count; before, they are "shadow".
        repeats_per_day: Alerts a day of one entity; further ones have the status "repeated". So
            have those with the same finding, of any entity, beyond a quarter of `alerts_per_day`.
        calibration_size: Normal values kept for each calibration group.
        max_groups: Calibration groups of a level; the parts of further ones share a group.
        hash_values: Whether strings are replaced by a keyed hash before they enter a vocabulary.
            The key is a secret of the tenant and is not stored with the model.
        seed: Seed of the reservoirs and of the networks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    entity: str = ""
    endpoint: str = ""
    time: str = ""
    tenant: str = ""
    format: str = "auto"
    ignore: tuple[str, ...] = ()
    max_bytes: Annotated[int, Field(ge=64)] = 1_000_000
    max_depth: Annotated[int, Field(ge=1)] = 64
    max_leaves: Annotated[int, Field(ge=1)] = 1_024
    max_string: Annotated[int, Field(ge=16)] = 8_192
    max_events: Annotated[int, Field(ge=1)] = 300_000

    levels: tuple[str, ...] = LEVELS
    mixer: str | None = None
    order: Annotated[int, Field(ge=1, le=8)] = 3
    alerts_per_day: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    volume_per_day: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    new_events: Annotated[int, Field(ge=0)] = 3
    learning_events: Annotated[int, Field(ge=0)] = 30
    shadow_events: Annotated[int, Field(ge=0)] = 100
    repeats_per_day: Annotated[int, Field(ge=1)] = 3
    calibration_size: Annotated[int, Field(ge=20)] = 1_000
    max_groups: Annotated[int, Field(ge=16)] = 4_096
    hash_values: bool = False
    seed: int = 0
