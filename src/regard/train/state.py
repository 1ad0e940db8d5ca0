"""The training state in a checkpoint, as full tensors: any number of processes can resume from
it."""

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

RESUMABLE = ("steps", "max_seconds", "parallel", "tensorboard")  # may change when a run resumes
SEED_STRIDE = 1_000_003  # between the seeds of two processes

Files = Mapping[str, Mapping[str, Tensor]]


def set_seed(settings: TrainSettings, rank: int, step: int = 0) -> None:
    """Seed this process; dropout differs from process to process."""
    torch.manual_seed(settings.seed + SEED_STRIDE * rank + step)


def collect_state(
    strategy: ParallelStrategy, optimizer: torch.optim.Optimizer, ema: WeightEMA | None
) -> dict[str, Mapping[str, Tensor]]:
    """The files of a checkpoint: model, optimizer, random number generators and averaged
    weights."""
    parameters = _numbered_parameters(optimizer)
    moments = {
        f"{number}.{key}": strategy.full_tensor(value, parameters[number])
        for number, values in sorted(optimizer.state_dict()["state"].items())
        for key, value in values.items()
    }
    rng_states = strategy.group.all_gather(torch.get_rng_state())
    files: dict[str, Mapping[str, Tensor]] = {
        "model": strategy.full_state(),
        "optimizer": moments,
        "rng": {str(rank): state for rank, state in enumerate(rng_states)},
    }
    if ema is not None:
        files["ema"] = {
            strategy.full_name(name): strategy.full_tensor(ema.weights[name], p)
            for name, p in strategy.model.named_parameters()
        } | {"steps": ema.weights["steps"]}
    return files


def restore_state(
    files: Files,
    strategy: ParallelStrategy,
    optimizer: torch.optim.Optimizer,
    ema: WeightEMA | None,
) -> None:
    """Load what `collect_state` returned, except the random number generators."""
    strategy.load_full_state(files["model"])
    parameters = _numbered_parameters(optimizer)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in files["optimizer"].items():
        number, key = name.split(".", 1)
        shard = strategy.local_shard(value, parameters[int(number)])
        state.setdefault(int(number), {})[key] = shard
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    if ema is not None:
        for name, p in strategy.model.named_parameters():
            shard = strategy.local_shard(files["ema"][strategy.full_name(name)], p)
            ema.weights[name] = shard.to(p.device).clone()
        ema.weights["steps"] = files["ema"]["steps"]


def restore_rng(files: Files, settings: TrainSettings, rank: int, step: int) -> None:
    """Restore the generator of this process; a process that is new to the run gets a fresh seed."""
    own = files["rng"].get(str(rank))
    if own is None:
        set_seed(settings, rank, step)
    else:
        torch.set_rng_state(own)


def _numbered_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters in the order in which the optimizer numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def check_settings(path: Path, metadata: Mapping[str, Any], settings: TrainSettings) -> None:
    """Refuse to resume a run with settings that it was not started with."""
    try:
        before = metadata["settings"]
        current = settings.model_dump(mode="json")
        changed = [k for k, v in current.items() if k not in RESUMABLE and before.get(k) != v]
    except (KeyError, AttributeError) as error:
        raise CorruptFile(f"{path} does not contain its training settings: {error!r}") from None
    if changed:
        raise ValueError(
            f"{path} was trained with a different {', '.join(changed)}: "
            "resume it with the same settings."
        )
