"""Settings of the networks of `regard watch`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from regard.models.spec import Depth, ModuleSpec, Size, StrictModel

Share = Annotated[float, Field(ge=0, le=1)]
AtLeastOne = Annotated[int, Field(ge=1)]


class NetworkSettings(StrictModel):
    """How the networks are built and trained.

    Attributes:
        mixer: Name and arguments of the recipe. The network of the leaves is bidirectional, that of
            the events is causal.
        mixers: Recipes of single levels by name, instead of `mixer`.
        dim: Model width.
        heads: Number of attention heads.
        layers: Number of layers.
        length: Maximum number of leaves of an event that the network reads; the others keep the
            bits of the floor.
        mask_groups: Passes in which all leaves of an event are predicted; each hides one part.
        window: Number of past events or patches that the network sees if its mixer has no state of
            fixed size.
        steps: Training steps of each network.
        batch_size: Examples of a training step.
        lr: Peak learning rate.
        max_seconds: Time limit of the training of each network. None: none.
        cascade: Share of the events that the network reads, those that the floor finds least
            likely. 1: all.
        audit: Share of the other events that the network reads as well, chosen by a hash of their
            source.
        min_gain: Share of the floor's bits that the mixture must save on held-out events; with
            less, the floor suffices and the network is dropped.
        seed: Seed of weights, order and masks.
        device: Device of training; networks score on the CPU.
    """

    mixer: ModuleSpec = ModuleSpec(name="vanilla")
    mixers: dict[str, ModuleSpec] = Field(default_factory=dict)
    dim: Size = 64
    heads: Size = 4
    layers: Depth = 2
    length: Annotated[int, Field(ge=2, le=4096)] = 64
    mask_groups: Annotated[int, Field(ge=2, le=64)] = 4
    window: Annotated[int, Field(ge=1, le=1024)] = 32
    steps: AtLeastOne = 1000
    batch_size: AtLeastOne = 64
    lr: Annotated[float, Field(gt=0)] = 2e-3
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    cascade: Share = 0.5
    audit: Share = 0.01
    min_gain: Share = 0.02
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    device: str = "auto"
