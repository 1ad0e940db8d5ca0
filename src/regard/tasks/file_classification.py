"""Classification of files in folders: the classes are the names of the sub-folders."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.errors import check_choice, check_int
from regard.models.config import SequenceClassificationHeadConfig
from regard.tasks.base import SPLITS, Task, check_index
from regard.tasks.files import SPLIT_NAMES, ArrayBuilder, existing_path
from regard.tasks.metrics import Accuracy, MacroF1
from regard.tasks.row_splits import (
    MISSING,
    Labels,
    SplitRows,
    check_not_empty,
    copy_notes,
    hash_bytes,
    small_split_notes,
    to_label,
)
from regard.tasks.rows import RowIterator, Rows

PATH, LABEL = "file", "class"


class LoadedFile(NamedTuple):
    """A file, its class, and its content."""

    path: Path
    label: str
    content: np.ndarray


class FileSplit(NamedTuple):
    """The files of a split: paths, classes (n), hashes of their contents (n), and where their
    arrays end (n + 1)."""

    paths: list[Path]
    classes: np.ndarray
    hashes: np.ndarray
    ends: np.ndarray


class FileClassification(Task):
    """Base class of tasks on folders of files with a sub-folder for each class.

    The sub-folders may be in folders named train, valid and test. Missing splits get one of ten
    training files of each class, chosen by a hash.

    Args:
        data: The folder.
        suffixes: Ends of the names of the files; others are ignored.
        load: Reads a file as an array (k, ...), or raises `UnusableRow`.
        missing: What to do with files that cannot be read: "drop" or "error".
        seed: Seed of the splits.

    Attributes:
        labels: Names of the classes.
        files: The files of each split.
        values: The arrays of each split, concatenated; file i is ends[i] .. ends[i + 1].
    """

    def __init__(
        self,
        data: str | Path,
        *,
        suffixes: Sequence[str],
        load: Callable[[Path], np.ndarray],
        missing: str,
        seed: int,
    ) -> None:
        check_choice("missing", missing, MISSING)
        check_int(0, seed=seed)
        self.load = load
        self.source = SplitRows(
            _files_by_class(data, suffixes),
            (PATH, LABEL),
            self._parse,
            stratify=LABEL,
            drop=missing == "drop",
            seed=seed,
        )
        self.files: dict[str, FileSplit] = {}
        self.values: dict[str, np.ndarray] = {}
        self.labels: tuple[str, ...] = ()
        for split in SPLITS:
            self.files[split] = self._read_split(split)
        self.metrics = (Accuracy(), MacroF1(len(self.labels)))

    def _parse(self, where: str, values: list[Any]) -> LoadedFile:
        path, label = values
        return LoadedFile(path, to_label(where, LABEL, label), self.load(path))

    def _read_split(self, split: str) -> FileSplit:
        """Read the files of a split one by one."""
        paths, numbers, hashes, ends = [], array("q"), array("Q"), array("q", [0])
        known, builder, shape = Labels(self.labels), None, (0,)
        for where, file in self.source.walk(split):
            builder = builder or ArrayBuilder(file.content.dtype)
            builder.append(file.content.reshape(-1))
            shape = file.content.shape[1:]
            paths.append(file.path)
            ends.append(ends[-1] + len(file.content))
            numbers.append(known.number(where, file.label))
            hashes.append(hash_bytes(file.path.read_bytes()))
        check_not_empty(split, len(numbers))
        assert builder is not None
        self.values[split] = builder.finish().reshape(-1, *shape)
        classes = np.array(numbers)
        if known.is_open:
            classes, labels = known.order_by_frequency(classes, LABEL)
            self.labels = tuple(labels)
        return FileSplit(paths, classes, np.array(hashes), np.array(ends))

    def value(self, split: str, index: int) -> np.ndarray:
        """The array (k, ...) of a file."""
        check_index(split, index, self.size(split))
        ends = self.files[split].ends
        return self.values[split][ends[index] : ends[index + 1]]

    @property
    def head(self) -> SequenceClassificationHeadConfig:
        """The head of the model."""
        return SequenceClassificationHeadConfig(num_classes=len(self.labels), pooling="mean")

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.files[split].paths)

    def classes_of(self, split: str) -> np.ndarray:
        """See `Task`."""
        return self.files[split].classes

    def notes(self) -> list[str]:
        """See `Task`."""
        hashes = {split: files.hashes for split, files in self.files.items()}
        sizes = {split: self.size(split) for split in SPLITS}
        dropped = sum(self.source.dropped.values())
        notes = []
        if dropped:
            reasons = [reason for each in self.source.reasons.values() for reason in each]
            shown = "; ".join(reason.rstrip(".") for reason in reasons[:5])
            notes.append(f"{dropped:,} files that cannot be read were left out: {shown}.")
        return [*notes, *copy_notes(hashes, "files"), *small_split_notes(sizes, len(self.labels))]


def _files_by_class(data: str | Path, suffixes: Sequence[str]) -> dict[str, Rows]:
    """Rows with the columns "file" and "class" by split, or under "all"."""
    folder = existing_path(data)
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a folder with a sub-folder for each class.")
    splits: dict[str, list[Path]] = {}
    for each in _folders(folder):
        if (split := SPLIT_NAMES.get(each.name.lower())) is not None:
            splits.setdefault(split, []).append(each)
    if "train" not in splits:
        splits = {"all": [folder]}
    files = {
        split: [
            (path, label.name)
            for each in folders
            for label in _folders(each)
            for path in sorted(label.rglob("*"))
            if path.is_file() and path.suffix.lower() in suffixes and path.name[0] != "."
        ]
        for split, folders in splits.items()
    }
    for split, found in files.items():
        if not found:
            where = folder if split == "all" else f"The {split} folder of {folder}"
            raise ValueError(
                f"{where} has no files in sub-folders that end in {', '.join(suffixes)}: expected "
                "a sub-folder for each class."
            )
    return {split: Rows(partial(_iter_files, found)) for split, found in files.items()}


def _folders(folder: Path) -> list[Path]:
    """The visible folders in a folder, in the order of their names."""
    return sorted(each for each in folder.iterdir() if each.is_dir() and each.name[0] != ".")


def _iter_files(files: Iterable[tuple[Path, str]]) -> RowIterator:
    for path, label in files:
        yield str(path), {PATH: path, LABEL: label}
