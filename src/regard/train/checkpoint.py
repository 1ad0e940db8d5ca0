"""Checkpoints: a folder of safetensors and JSON that either is whole or is not there.

Everything is written into a folder of another name, flushed to the disk, and the manifest, which holds the sums of all other
files, is written last; then the folder is renamed.  Whatever moment the process is killed at, the newest folder that has a
manifest is a good one.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.json_files import (
    PARTIAL_PREFIX,
    CorruptFile,
    flush_to_disk,
    read_json,
    write_json,
)

PREFIX, MANIFEST = "step-", "manifest.json"


class CheckpointWriteError(OSError):
    """A checkpoint that could not be written, and why; those before it are as they were."""


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    facts: Mapping[str, Any],
    *,
    keep: int = 2,
) -> Path:
    """Write a checkpoint: files of tensors by name, and facts as JSON.  Older ones go, but for the last `write_record`."""
    partial, final = root / f"{PARTIAL_PREFIX}{step}", checkpoint_path(root, step)
    try:
        _write(partial, step, tensors, facts)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    except (OSError, SafetensorError) as error:  # safetensors tells of a full disk in its own way
        shutil.rmtree(partial, ignore_errors=True)
        last = list_checkpoints(root)
        kept = f"the last one is {last[-1]}" if last else "there is none before it"
        raise CheckpointWriteError(
            f"the checkpoint of step {step} could not be written: {error}; {kept}"
        ) from error
    flush_to_disk(root)
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final


def _write(
    partial: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]
) -> None:
    """All files of a checkpoint, the manifest last; what a process that was killed has left goes first."""
    root = partial.parent
    root.mkdir(parents=True, exist_ok=True)
    for left in {*root.glob(f"{PARTIAL_PREFIX}*"), *root.glob(f"{PREFIX}*")} - set(
        list_checkpoints(root)
    ):
        shutil.rmtree(left)
    partial.mkdir()
    for name, each in tensors.items():
        path = partial / f"{name}.safetensors"
        save_file({key: value.detach().contiguous() for key, value in each.items()}, path)
        flush_to_disk(path)
    sums = {path.name: _sum(path) for path in sorted(partial.iterdir())}
    write_json(partial / MANIFEST, {"step": step, "files": sums, "facts": dict(facts)})
    flush_to_disk(partial)


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return root / f"{PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """All whole checkpoints of a run, the oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if (path / MANIFEST).is_file())


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors and the facts of a checkpoint, after comparing the sums."""
    manifest = read_json(path / MANIFEST)
    try:
        sums, facts = manifest["files"], manifest["facts"]
        for name, expected in sums.items():
            if Path(name).name != name or _sum(path / name) != expected:
                raise CorruptFile(
                    f"{path / name} is not what the manifest says: it was changed or cut off"
                )
        return {Path(name).stem: load_file(path / name) for name in sums}, facts
    except (KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CorruptFile(f"{path} is not a checkpoint: {error!r}") from None


def latest_checkpoint(root: Path, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """The last checkpoint that can be read; `say` hears of those that cannot."""
    for path in reversed(list_checkpoints(root)):
        try:
            load(path)
            return path
        except CorruptFile as error:
            say(f"left out: {error}")
    return None


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
