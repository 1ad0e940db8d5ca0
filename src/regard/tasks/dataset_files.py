"""Where real data are, and how their files are read: plain, .gz or .xz; never pickle."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from regard.errors import did_you_mean
from regard.tasks.files import existing_path, open_bytes, open_text

VARIABLE = "REGARD_DATA"  # names the folder of data sets
BUILT_IN = "built-in"
NAMES = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test", "t10k"),
}  # of files, by split


def resolve_dataset(data: str, known: Mapping[str, str]) -> Path:
    """The file or folder that a user names: one of the known data sets, by its folder in REGARD_DATA, or a path."""
    if data in known:
        root = os.environ.get(VARIABLE)
        if not root:
            raise ValueError(
                f"data={data!r} is looked for in the folder that the variable {VARIABLE} names, and it is not set"
            )
        return existing_path(Path(root) / known[data])
    if not Path(data).exists() and not set(data) & {"/", "\\", "."}:
        raise ValueError(
            f"no data {data!r}, and no file or folder of that name: {did_you_mean(data, (BUILT_IN, *known))}"
        )
    return existing_path(Path(data))


def split_files(folder: Path, endings: Iterable[str]) -> dict[str, Path]:
    """The file of each split, by how its name begins; splits without a file are left out."""
    endings = tuple(f"{ending}{pack}" for ending in endings for pack in ("", ".gz", ".xz"))
    files = sorted(file for file in folder.iterdir() if file.name.endswith(endings))
    found = {}
    for split, names in NAMES.items():
        mine = [file for file in files if file.name.lower().startswith(names)]
        if mine:
            found[split] = mine[0]
    return found


def read_bytes(path: Path) -> bytes:
    """All of a file, unpacked."""
    with open_bytes(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """A file of UTF-8."""
    with open_text(path) as file:
        return file.read()


def read_labelled_texts(path: Path) -> list[tuple[str, str]]:
    """The text and the label, as text, of each line of JSON."""
    return _rows(path, _state(path))


def _state(path: Path) -> tuple[int, int]:
    """What changes when a file does, so that one that was read before is read again."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(8)
def _rows(path: Path, state: tuple[int, int]) -> list[tuple[str, str]]:
    lines = [
        (number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()
    ]
    if not lines:
        raise ValueError(f"{path} is empty")
    return [_row(f"{path}, line {number}", line) for number, line in lines]


def _row(where: str, line: str) -> tuple[str, str]:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{where}: an object with 'text' and 'label' is expected, not {type(found).__name__}"
        )
    for column in ("text", "label"):
        if column not in found:
            raise ValueError(
                f"{where} has no {column!r}: it has {', '.join(map(repr, found)) or 'nothing'}"
            )
    if not isinstance(found["text"], str) or not found["text"]:
        raise ValueError(f"{where}: the text must be a string that is not empty")
    return found["text"], str(found["label"])


# ---------------------------------------------------------------------------------------------- arrays
def read_array(path: Path) -> np.ndarray:
    """An array from .npy, or from the IDX format of MNIST: each packed or not."""
    return _array(path, _state(path))


@lru_cache(8)
def _array(path: Path, state: tuple[int, int]) -> np.ndarray:
    content = read_bytes(path)
    if ".npy" not in path.suffixes:
        return _idx(content, path)
    try:
        return np.asarray(np.load(io.BytesIO(content), allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from None


def _idx(content: bytes, path: Path) -> np.ndarray:
    """Two zeros, 8 for bytes, the number of dimensions, each of them in four bytes, and then the bytes."""
    dims = content[3] if len(content) > 3 else 0
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
    start = 4 + 4 * dims
    if content[:3] != b"\0\0\x08" or len(content) != start + int(np.prod(shape)):
        raise ValueError(f"{path} is no whole IDX file of bytes")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
