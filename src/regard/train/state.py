"""The training state in a checkpoint, as full tensors: any number of processes can resume from
it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.device import get_rng_state, set_rng_state
from regard.json_files import CorruptFile
from regard.train.ema import WeightEMA
from regard.train.settings import TrainSettings
from regard.train.strategy import ParallelStrategy

RESUMABLE = ("steps", "max_seconds", "parallel", "device", "tensorboard")  # may change on resume
SEED_STRIDE = 1_000_003  # between the seeds of two processes

Files = Mapping[str, Mapping[str, Tensor]]


def set_seed(settings: TrainSettings, rank: int, step: int = 0) -> None:
    """Seed this process; dropout differs from process to process."""
    torch.manual_seed(settings.seed + SEED_STRIDE * rank + step)


def collect_state(
    strategy: ParallelStrategy, optimizer: torch.optim.Optimizer, ema: WeightEMA | None
) -> dict[str, Mapping[str, Tensor]]:
    """The files of a checkpoint: model, optimizer, random number generators and averaged weights.

    All tensors are on the CPU, so that a run can resume on another device. "rng" has the state of
    the CPU's generator by rank, and of the accelerator's as "cuda.0" for rank 0.
    """
    parameters = _numbered_parameters(optimizer)
    moments = {
        f"{number}.{key}": strategy.full_tensor(value, parameters[number])
        for number, values in sorted(optimizer.state_dict()["state"].items())
        for key, value in values.items()
    }
    group = strategy.group
    rng = {str(rank): s for rank, s in enumerate(group.all_gather(torch.get_rng_state()))}
    if (device_state := get_rng_state(group.device)) is not None:
        for rank, each in enumerate(group.all_gather(device_state)):
            rng[f"{group.device.type}.{rank}"] = each
    files: dict[str, Mapping[str, Tensor]] = {
        "model": strategy.full_state(),
        "optimizer": moments,
        "rng": rng,
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


def restore_rng(
    files: Files, settings: TrainSettings, rank: int, step: int, device: torch.device
) -> None:
    """Restore the generators of this process and its device; new ones get a fresh seed."""
    set_seed(settings, rank, step)
    if (own := files["rng"].get(str(rank))) is not None:
        torch.set_rng_state(own)
    if (on_device := files["rng"].get(f"{device.type}.{rank}")) is not None:
        set_rng_state(device, on_device)


def _numbered_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters in the order in which the optimizer numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def check_settings(path: Path, metadata: Mapping[str, Any], settings: TrainSettings) -> None:
    """Refuse to resume a run with settings that it was not started with."""
    try:
        before = metadata["settings"]
        current = settings.model_dump(mode="json")
        unknown = sorted(before.keys() ^ current.keys())
        if unknown:
            raise CorruptFile(
                f"{path} was written by another version of Regard, or edited: its settings differ "
                f"in {', '.join(unknown)}."
            )
        changed = [k for k, v in current.items() if k not in RESUMABLE and before[k] != v]
    except (KeyError, AttributeError) as error:
        raise CorruptFile(f"{path} does not contain its training settings: {error!r}") from None
    if changed:
        raise ValueError(
            f"{path} was trained with a different {', '.join(changed)}: "
            "resume it with the same settings."
        )
