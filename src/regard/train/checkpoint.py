"""Checkpoints: folders of safetensors and JSON that are either complete or absent.

All files are written into a temporary folder and flushed; the manifest with the checksums of the
other files comes last, then the folder is renamed. An old checkpoint is renamed before it is
deleted. If the process is killed at any moment, all folders named `step-...` are intact.

Only folders that this module wrote are deleted: temporary folders, and checkpoints that contain the
files of their manifest and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.json_files import PARTIAL_PREFIX, CorruptFile, flush_to_disk, read_json, write_json

PREFIX, MANIFEST, BROKEN_PREFIX = "step-", "manifest.json", "broken-"
CHECKPOINT_NAME = re.compile(rf"{PREFIX}(\d{{8,}})")
PARTIAL_NAME = re.compile(rf"{re.escape(PARTIAL_PREFIX)}\d+(-old)?")
FILE_NAME = re.compile(  # safetensors writes to .tmp...
    rf"\w+\.safetensors|({re.escape(PARTIAL_PREFIX)})?{re.escape(MANIFEST)}|\.tmp\w{{6}}"
)


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
        remove_partial(root)
        partial.mkdir()
        for name, each in tensors.items():
            path = partial / f"{name}.safetensors"
            save_file({key: value.detach().contiguous() for key, value in each.items()}, path)
            flush_to_disk(path)
        checksums = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
        manifest = {"step": step, "files": checksums, "metadata": dict(metadata)}
        manifest["checksum"] = _manifest_checksum(manifest)
        write_json(partial / MANIFEST, manifest)
        flush_to_disk(partial)
        if final.is_symlink() or final.exists():  # of the same step with fewer evaluations
            if _is_ours(final):
                final.rename(root / f"{PARTIAL_PREFIX}{step}-old")
            else:
                set_aside(final)
        partial.rename(final)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        if partial.is_dir() and not partial.is_symlink():
            remove_partial(root)
        last = list_checkpoints(root)
        remaining = (
            f"The last checkpoint is {last[-1]}" if last else "There is no earlier checkpoint"
        )
        raise CheckpointWriteError(
            f"Cannot write the checkpoint of step {step}: {error}. {remaining}."
        ) from error
    flush_to_disk(root)
    for old in list_checkpoints(root)[:-keep]:
        if _is_ours(old):
            old.rename(root / f"{PARTIAL_PREFIX}{_step(old)}-old")
    remove_partial(root)
    return final


def remove_partial(root: Path) -> None:
    """Delete the temporary folders of this process, and of one that was killed."""
    for path in root.iterdir() if root.is_dir() else ():
        is_ours = PARTIAL_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if is_ours and all(FILE_NAME.fullmatch(e.name) and e.is_file() for e in path.iterdir()):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that it is neither read nor deleted."""
    number, aside = 1, path.with_name(f"{BROKEN_PREFIX}{path.name}")
    while aside.is_symlink() or aside.exists():
        number, aside = number + 1, path.with_name(f"{BROKEN_PREFIX}{path.name}-{number}")
    path.rename(aside)
    return aside


def checkpoint_path(root: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return root / f"{PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """All checkpoints of a run by their names, oldest first; some may be damaged."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if CHECKPOINT_NAME.fullmatch(p.name)), key=_step)


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors and metadata of a checkpoint; raises `CorruptFile` if a checksum does not match."""
    if path.is_symlink():
        raise CorruptFile(f"{path} is a symbolic link.")
    if not (path / MANIFEST).exists():
        raise CorruptFile(f"{path} is not a checkpoint: it has no {MANIFEST}.")
    manifest = read_json(path / MANIFEST)
    try:
        checksums, metadata = manifest["files"], manifest["metadata"]
        if manifest.get("checksum", _manifest_checksum(manifest)) != _manifest_checksum(manifest):
            raise CorruptFile(f"{path / MANIFEST} does not match its checksum: it was modified.")
        if manifest["step"] != _step(path):
            raise CorruptFile(f"{path} contains the checkpoint of step {manifest['step']!r}.")
        for name, expected in checksums.items():
            if Path(name).name != name or _checksum(path / name) != expected:
                raise CorruptFile(
                    f"{path / name} does not match its checksum: it was modified or truncated."
                )
        return {Path(name).stem: load_file(path / name) for name in checksums}, metadata
    except (KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CorruptFile(f"{path} is not a checkpoint: {error!r}.") from None


def latest_checkpoint(
    root: Path, on_skip: Callable[[Path, str], None] = lambda path, reason: None
) -> Path | None:
    """The last checkpoint that can be loaded; `on_skip` gets each later one, and what is wrong."""
    for path in reversed(list_checkpoints(root)):
        try:
            load(path)
            return path
        except CorruptFile as error:
            on_skip(path, str(error))
    return None


def _step(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _is_ours(path: Path) -> bool:
    """Whether a folder contains the files of its manifest and nothing else."""
    try:
        entries = list(path.iterdir())
        names = {entry.name for entry in entries}
        are_files = all(entry.is_file() and not entry.is_symlink() for entry in entries)
        known = {MANIFEST, *read_json(path / MANIFEST)["files"]}
        return not path.is_symlink() and are_files and names <= known
    except (OSError, CorruptFile, KeyError, TypeError):
        return False


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
