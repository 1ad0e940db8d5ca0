"""A model as a folder: JSON and safetensors, and a manifest with their checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from regard.json_files import (
    PARTIAL_PREFIX,
    CorruptFile,
    flush_to_disk,
    name_file,
    read_json,
    write_json,
)

MANIFEST = "manifest.json"
FORMAT, VERSION = "regard watch model", 1


class StoredPart(NamedTuple):
    """A part of a model: what is stored as JSON, and its arrays."""

    content: Any
    tensors: dict[str, npt.NDArray[Any]]


def write_model(folder: Path, parts: dict[str, StoredPart], model_id: str) -> None:
    """Write a model, so that an interrupted write leaves the old one as it was: the new folder is
    complete before it takes the place of the old one."""
    folder = folder.absolute()
    partial = folder.with_name(f"{PARTIAL_PREFIX}{folder.name}")
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    checksums = {}
    for name, part in parts.items():
        tensors = {key: np.ascontiguousarray(value) for key, value in part.tensors.items()}
        files = {f"{name}.json": json.dumps(part.content, allow_nan=False).encode()}
        if tensors:
            files[f"{name}.safetensors"] = save(tensors)
        for file, content in files.items():
            with name_file(partial / file):
                (partial / file).write_bytes(content)
                flush_to_disk(partial / file)
            checksums[file] = hashlib.sha256(content).hexdigest()
    manifest = {"format": FORMAT, "version": VERSION, "model": model_id, "files": checksums}
    write_json(partial / MANIFEST, manifest)
    old = folder.with_name(f"{PARTIAL_PREFIX}old-{folder.name}")
    if old.is_dir():
        shutil.rmtree(old)
    if folder.is_dir():
        os.replace(folder, old)
    os.replace(partial, folder)
    flush_to_disk(folder.parent)
    if old.is_dir():
        shutil.rmtree(old)


def read_model(folder: Path) -> dict[str, StoredPart]:
    """Read a model; raise `CorruptFile` if it is damaged, or of another version."""
    given, folder = folder, folder.absolute()  # "." has no name
    old = folder.with_name(f"{PARTIAL_PREFIX}old-{folder.name}")
    if not folder.exists() and old.is_dir():
        folder = old  # the writer was killed between its two last steps
    if not folder.is_dir():
        raise CorruptFile(f"There is no model at {given}: make one with regard watch learn.")
    if not (folder / MANIFEST).is_file():
        raise CorruptFile(f"{given} is not a model of regard watch: it has no {MANIFEST}.")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CorruptFile(f"{given} is not a model of regard watch.")
    if manifest.get("version") != VERSION:
        raise CorruptFile(
            f"{given} has version {manifest.get('version')!r} of the format, and this Regard "
            f"reads version {VERSION}: learn it again, or install the Regard that wrote it."
        )
    contents: dict[str, bytes] = {}
    for file, checksum in manifest["files"].items():
        try:
            contents[file] = (folder / file).read_bytes()
        except OSError as error:
            raise CorruptFile(f"{given} is damaged: {file}: {error.strerror}.") from None
        if hashlib.sha256(contents[file]).hexdigest() != checksum:
            raise CorruptFile(
                f"{given} is damaged: {file} is not what was written. Learn the model again."
            )
    parts = {}
    for name in [file.removesuffix(".json") for file in contents if file.endswith(".json")]:
        arrays = contents.get(f"{name}.safetensors")
        tensors = load(arrays) if arrays is not None else {}
        parts[name] = StoredPart(json.loads(contents[f"{name}.json"]), tensors)
    return parts
