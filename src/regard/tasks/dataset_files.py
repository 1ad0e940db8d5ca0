"""Locate and read public datasets: JSON lines and arrays, also .gz and .xz; never pickle."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from regard.errors import did_you_mean
from regard.tasks.files import existing_path, open_bytes
from regard.tasks.rows import get_column, read_json_lines

DATA_VARIABLE = "REGARD_DATA"  # environment variable with the folder of the datasets
BUILT_IN = "built-in"
HELD_OUT = 10  # one example in ten goes to each split without a file
SPLIT_PREFIXES = {
    "train": ("train",),
    "valid": ("valid", "val", "dev"),
    "test": ("test", "t10k"),
}

T = TypeVar("T")


def resolve_dataset(data: str, known: Mapping[str, str]) -> Path:
    """The path of a dataset: a known name, as a folder in REGARD_DATA, or a path."""
    if data in known:
        root = os.environ.get(DATA_VARIABLE)
        if not root:
            raise ValueError(
                f"data={data!r} needs the environment variable {DATA_VARIABLE}, "
                "the folder of the datasets, which is not set."
            )
        return existing_path(Path(root) / known[data])
    if not Path(data).exists() and not set(data) & {"/", "\\", "."}:
        hint = did_you_mean(data, (BUILT_IN, *known))
        raise ValueError(f"data={data!r} is neither a known dataset nor a file or folder: {hint}")
    return existing_path(Path(data))


def find_split_files(folder: Path, suffix: str) -> dict[str, Path]:
    """The first file of each split by the prefix of its name: "trainset.jsonl.gz" -> "train"."""
    suffixes = (suffix, f"{suffix}.gz", f"{suffix}.xz")
    files = sorted(file for file in folder.iterdir() if file.name.endswith(suffixes))
    splits: dict[str, Path] = {}
    for split, prefixes in SPLIT_PREFIXES.items():
        matches = [file for file in files if file.name.lower().startswith(prefixes)]
        if matches:
            splits[split] = matches[0]
    return splits


def hold_out(
    items: Sequence[T], splits: Sequence[str], count: int, seed: int
) -> dict[str, list[T]]:
    """Move `count` random items to each of the splits; the rest is for training."""
    order = np.random.default_rng(seed).permutation(len(items)).tolist()
    parts = {split: order[i * count : (i + 1) * count] for i, split in enumerate(splits)}
    parts["train"] = order[len(splits) * count :]
    return {split: [items[i] for i in part] for split, part in parts.items()}


def read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed."""
    with open_bytes(path) as file:
        return file.read()


def _version(path: Path) -> tuple[int, int]:
    """Changes with the file, so that caches are not stale."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def read_labelled_texts(path: Path) -> list[tuple[str, str]]:
    """The columns "text" and "label" of a JSON lines file."""
    return _read_labelled_texts(path, _version(path))


@lru_cache(8)
def _read_labelled_texts(path: Path, version: tuple[int, int]) -> list[tuple[str, str]]:
    texts = []
    for where, row in read_json_lines(path):
        text, label = (get_column(row, name, where) for name in ("text", "label"))
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: 'text' must be a non-empty string.")
        texts.append((text, str(label)))
    if not texts:
        raise ValueError(f"{path} is empty.")
    return texts


def read_array(path: Path) -> np.ndarray:
    """An array from .npy, or from MNIST's IDX format; compressed or not."""
    return _read_array(path, _version(path))


@lru_cache(8)
def _read_array(path: Path, version: tuple[int, int]) -> np.ndarray:
    content = read_bytes(path)
    if ".npy" in path.suffixes:
        try:
            return np.asarray(np.load(io.BytesIO(content), allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a .npy file of numbers: {error}") from None
    # IDX: two zeros, 8 for bytes, the number of dimensions, each in four bytes, then the data
    dims = content[3] if len(content) > 3 else 0
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
    start = 4 + 4 * dims
    if content[:3] != b"\0\0\x08" or len(content) != start + int(np.prod(shape)):
        raise ValueError(f"{path} is not a complete IDX file of bytes.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
