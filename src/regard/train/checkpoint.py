"""Checkpoints: folders of safetensors and JSON that are either complete or absent.

All files are written into a temporary folder and flushed; the manifest with the checksums of the
other files comes last, then the folder is renamed. If the process is killed at any moment, the
newest folder with a manifest is intact.
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

from regard.json_files import PARTIAL_PREFIX, CorruptFile, flush_to_disk, read_json, write_json

PREFIX, MANIFEST = "step-", "manifest.json"


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    metadata: Mapping[str, Any],
    *,
    keep: int = 2,
) -> Path:
    """Write a checkpoint and delete all but the last `keep`.

    Args:
        root: Folder of the checkpoints of a run.
        step: Number of completed steps.
        tensors: File name -> tensors by name.
        metadata: Values for the manifest, as JSON.
    """
    partial, final = root / f"{PARTIAL_PREFIX}{step}", checkpoint_path(root, step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        complete = set(list_checkpoints(root))
        for left_over in {*root.glob(f"{PARTIAL_PREFIX}*"), *root.glob(f"{PREFIX}*")} - complete:
            shutil.rmtree(left_over)  # of a process that was killed
        partial.mkdir()
        for name, each in tensors.items():
            path = partial / f"{name}.safetensors"
            save_file({key: value.detach().contiguous() for key, value in each.items()}, path)
            flush_to_disk(path)
        checksums = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
        manifest = {"step": step, "files": checksums, "metadata": dict(metadata)}
        write_json(partial / MANIFEST, manifest)
        flush_to_disk(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        shutil.rmtree(partial, ignore_errors=True)
        last = list_checkpoints(root)
        remaining = (
            f"The last checkpoint is {last[-1]}" if last else "There is no earlier checkpoint"
        )
        raise CheckpointWriteError(
            f"Cannot write the checkpoint of step {step}: {error}. {remaining}."
        ) from error
    flush_to_disk(root)
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoint_path(root: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return root / f"{PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if (path / MANIFEST).is_file())


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors and metadata of a checkpoint; raises `CorruptFile` if a checksum does not match."""
    manifest = read_json(path / MANIFEST)
    try:
        checksums, metadata = manifest["files"], manifest["metadata"]
        for name, expected in checksums.items():
            if Path(name).name != name or _checksum(path / name) != expected:
                raise CorruptFile(
                    f"{path / name} does not match its checksum: it was modified or truncated."
                )
        return {Path(name).stem: load_file(path / name) for name in checksums}, metadata
    except (KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CorruptFile(f"{path} is not a checkpoint: {error!r}") from None


def latest_checkpoint(root: Path, warn: Callable[[str], None] = lambda text: None) -> Path | None:
    """The last checkpoint that can be loaded; `warn` is called for each one that cannot."""
    for path in reversed(list_checkpoints(root)):
        try:
            load(path)
            return path
        except CorruptFile as error:
            warn(f"Skipped: {error}")
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
