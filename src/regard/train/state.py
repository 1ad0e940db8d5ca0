"""All that a run needs to go on, as whole tensors: so that any number of processes can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.json_files import CorruptFile
from regard.train.ema import WeightEMA
from regard.train.settings import TrainSettings
from regard.train.strategy import ParallelStrategy

FREE = (
    "steps",
    "seconds",
    "parallel",
    "tensorboard",
)  # settings that may change when a run goes on
APART = 1_000_003  # between the seeds of two processes


def seed(settings: TrainSettings, rank: int, step: int = 0) -> None:
    """Dropout differs from process to process."""
    torch.manual_seed(settings.seed + APART * rank + step)


def pack(
    place: ParallelStrategy, optimizer: torch.optim.Optimizer, average: WeightEMA | None
) -> dict[str, Mapping[str, Tensor]]:
    """The files of a checkpoint."""
    files: dict[str, Mapping[str, Tensor]] = {
        "model": place.collect(),
        "optimizer": moments(place, optimizer),
    }
    files["random"] = {
        str(rank): state for rank, state in enumerate(place.group.every(torch.get_rng_state()))
    }
    if average is not None:
        files["average"] = {
            place.public(name): place.kept(t, p) for name, p, t in average.pairs(place.model)
        }
        files["average"] = {**files["average"], "steps": average.weights["steps"]}
    return files


def unpack(
    files: Mapping[str, Mapping[str, Tensor]],
    place: ParallelStrategy,
    optimizer: torch.optim.Optimizer,
    average: WeightEMA | None,
) -> None:
    """The other way round, but for the random numbers."""
    place.put(files["model"])
    owners = numbered(optimizer)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in files["optimizer"].items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = place.share(value, owners[int(number)])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    if average is not None:
        for name, p, _ in average.pairs(place.model):
            average.weights[name] = (
                place.share(files["average"][place.public(name)], p).to(p.device).clone()
            )
        average.weights["steps"] = files["average"]["steps"]


def unpack_random(
    files: Mapping[str, Mapping[str, Tensor]], settings: TrainSettings, rank: int, step: int
) -> None:
    """Go on with the random numbers of this process; one that there was not has new ones."""
    mine = files["random"].get(str(rank))
    if mine is None:
        seed(settings, rank, step)
    else:
        torch.set_rng_state(mine)


def numbered(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters in the order in which the optimiser numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def moments(place: ParallelStrategy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimiser remembers, by the number of the parameter: {"3.exp_avg": ...}."""
    owners, state = numbered(optimizer), optimizer.state_dict()["state"]
    return {
        f"{n}.{key}": place.kept(value, owners[n])
        for n, each in sorted(state.items())
        for key, value in each.items()
    }


def check_settings(path: Path, facts: Mapping[str, Any], settings: TrainSettings) -> None:
    """A run goes on only with what it began with."""
    try:
        before = facts["settings"]
        changed = [
            k
            for k, v in settings.model_dump(mode="json").items()
            if k not in FREE and before.get(k) != v
        ]
    except (KeyError, AttributeError) as error:
        raise CorruptFile(f"{path} does not say what it was trained with: {error!r}") from None
    if changed:
        raise ValueError(
            f"{path} was trained with another {', '.join(changed)}: resume it with the same settings"
        )
