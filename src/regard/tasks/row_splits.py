"""The splits of data that has none: rows are drawn by a hash, so that all splits are alike.

The tasks on rows and on folders of files share what is here: splits, rows that are left out,
classes, and copies of training rows in other splits.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np

from regard.errors import did_you_mean
from regard.models.sampling import uniform
from regard.tasks.rows import Row, get_column, is_missing

GROUP = 10  # of so many rows of a stratum, one is for each of valid and test if they have no file
MAX_NAMED = 5  # rows named in a message
MAX_HINTS = 50  # with more labels, the message about an unknown label names none
MANY_LABELS = 20  # a column with more labels than this, most of them once, is no label
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain them alone
MISSING = ("error", "drop")

T = TypeVar("T")


class UnusableRow(ValueError):
    """A row that cannot be an example: a value is missing or no number, a file is damaged."""


class SplitRows(Generic[T]):
    """The rows of each split, read one by one.

    Splits that are missing get one of ten training rows of each stratum, chosen by a hash. The
    strata have the same shares in all splits, also if the file is sorted, and a row stays in its
    split when rows are appended. The first row of a stratum is for training.

    Args:
        rows: Rows by split, or under "all".
        columns: The columns that every row needs.
        parse: Maps where a row is and the values of its columns to an item, or raises
            `UnusableRow`.
        stratify: The column whose values are the strata. None: there is one stratum.
        drop: Leave unusable rows out instead of raising an error.
        seed: Seed of the splits.

    Attributes:
        dropped: Number of rows that were left out, by split, once it was read.
        reasons: Why the first of them were, by split.
    """

    def __init__(
        self,
        rows: Mapping[str, Iterable[tuple[str, Row]]],
        columns: Sequence[str],
        parse: Callable[[str, list[Any]], T],
        *,
        stratify: str | None = None,
        drop: bool,
        seed: int,
    ) -> None:
        self.rows, self.columns, self.parse = rows, tuple(columns), parse
        self.stratify, self.drop, self.seed = stratify, drop, seed
        self.held_out = [split for split in ("valid", "test") if split not in rows]
        self.dropped: dict[str, int] = {}
        self.reasons: dict[str, list[str]] = {}

    def walk(self, split: str) -> Iterator[tuple[str, T]]:
        """All usable rows of a split, and where they are."""
        incomplete: list[str] = []  # rows without a value, the first of them
        reasons: list[str] = []
        count = absent = unusable = usable = 0
        without_column: tuple[str, Row] | None = None
        rows = self.rows.get(split) or self.rows.get("train") or self.rows["all"]
        seen: Counter[str] = Counter()  # rows of each stratum
        for where, row in rows:
            stratum = "" if self.stratify is None else str(row.get(self.stratify))
            seen[stratum] += 1
            if self._split_of_row(stratum, seen[stratum] - 1, split) != split:
                continue
            if self.drop and not row.keys() >= set(self.columns):  # possible in JSON lines
                without_column = without_column or (where, row)
                absent += 1
                continue
            values = [get_column(row, name, where) for name in self.columns]
            if any(is_blank(value) for value in values):
                count += 1
                if len(incomplete) < MAX_NAMED:
                    incomplete.append(where)
                continue
            try:
                item = self.parse(where, values)
            except UnusableRow as error:
                if not self.drop:
                    raise ValueError(
                        f"{where}: {error} Correct it, or omit missing='error'."
                    ) from None
                unusable += 1
                if len(reasons) < MAX_NAMED:
                    reasons.append(f"{where}: {error}")
                continue
            usable += 1
            yield where, item
        if without_column and not usable:  # then the name of the column is wrong
            where, row = without_column
            for name in self.columns:
                get_column(row, name, where)
        if unusable and not usable:
            raise ValueError(
                f"No row of the {split} split can be used, for example {reasons[0].rstrip('.')}."
            )
        self.dropped[split], self.reasons[split] = count + absent + unusable, reasons
        if count and not self.drop:
            places = ", ".join(incomplete)
            more = f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
            names = " or ".join(f"no {name!r}" for name in self.columns)
            raise ValueError(
                f"{names[0].upper()}{names[1:]} in {places}{more}: "
                "fill in the values, or omit missing='error'."
            )

    def notes(self) -> list[str]:
        """A sentence about the rows that were left out, if there are any."""
        dropped = sum(self.dropped.values())
        if not dropped:
            return []
        names = " or ".join(map(repr, self.columns[:MAX_NAMED]))
        names += " or others" if len(self.columns) > MAX_NAMED else ""
        reasons = [reason for each in self.reasons.values() for reason in each][:MAX_NAMED]
        if not reasons:
            return [f"{dropped:,} rows without {names} were left out."]
        return [
            f"{dropped:,} rows without usable {names} were left out, for example "
            f"{'; '.join(reason.rstrip('.') for reason in reasons)}."
        ]

    def _split_of_row(self, stratum: str, number: int, wanted: str) -> str:
        """The split of row `number` of a stratum; files of a split belong to it as a whole."""
        if not self.held_out or (wanted in self.rows and wanted != "train"):
            return wanted
        group, place = divmod(number, GROUP)
        key = self.seed, zlib.crc32(stratum.encode("utf-8", "surrogatepass")), group
        first = int((GROUP - 1) * uniform(*key))
        second = (first + 1 + int((GROUP - 2) * uniform(*key, 1))) % (GROUP - 1)
        for split, chosen in zip(self.held_out, (first, second), strict=False):
            if place == chosen + 1:  # the first of the group is for training
                return split
        return "train"


def is_blank(value: Any) -> bool:
    """Whether a value is missing: None, NaN, or a text of white space."""
    return is_missing(value) or (isinstance(value, str) and value.isspace())


# ------------------------------------------------------------------------------------------ values
def to_text(where: str, name: str, value: Any) -> str:
    """A value of a column as text; anything but a text or a number is a ValueError."""
    if not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ValueError(f"{where}: {name!r} must be text or a number, not {kind}.")
    return str(value)


def to_label(where: str, name: str, value: Any) -> str:
    """A value of a column as the name of a class."""
    label = to_text(where, name, value)
    if SURROGATE.search(label):
        raise ValueError(
            f"{where}: {name!r} is {label!r}, which has half of a surrogate pair and cannot be "
            "written as UTF-8."
        )
    return label


def hash_bytes(content: bytes) -> int:
    """64 bits that stand for a content, to find copies."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


# ----------------------------------------------------------------------------------------- classes
class Labels:
    """Numbers the labels of a split: those of the training split, then only known ones.

    Args:
        names: The labels, by class. Empty: they are collected.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.is_open = not names
        self.known = {label: number for number, label in enumerate(names)}

    def number(self, where: str, label: str) -> int:
        """The class of a label."""
        if not self.is_open and label not in self.known:
            known = self.known
            hint = f": {did_you_mean(label, known)}" if len(known) < MAX_HINTS else "."
            raise ValueError(f"{where} has label {label!r}, which no training row has{hint}")
        return self.known.setdefault(label, len(self.known))

    def order_by_frequency(self, classes: np.ndarray, column: str) -> tuple[np.ndarray, list[str]]:
        """The classes (n) and their labels, most frequent first; for the training split.

        One label, or labels that occur once each, are a ValueError.
        """
        labels = list(self.known)
        if len(labels) < 2:
            raise ValueError(f"All training rows have the label {labels[0]!r}: there is one class.")
        if len(labels) > max(MANY_LABELS, len(classes) // 2):
            raise ValueError(
                f"{column!r} has {len(labels):,} different values in {len(classes):,} training "
                "rows, so it is no label: name another column, or use the task regress if the "
                "values are numbers."
            )
        counts = np.bincount(classes)
        order = sorted(range(len(labels)), key=lambda i: (-counts[i], labels[i]))
        return np.argsort(order)[classes], [labels[i] for i in order]


# ------------------------------------------------------------------------------------------- notes
def check_not_empty(split: str, count: int) -> None:
    """Raise a ValueError for a split without rows."""
    if not count:
        raise ValueError(f"The {split} split has no rows: there are too few, or all were dropped.")


def copy_notes(hashes: Mapping[str, np.ndarray], what: str) -> list[str]:
    """Sentences about examples of valid and test that are also in the train split."""
    notes = []
    for split in ("valid", "test"):
        copies = int(np.isin(hashes[split], hashes["train"]).sum())
        if copies:
            notes.append(
                f"{copies:,} of {len(hashes[split]):,} {what} of the {split} split are also in "
                "the train split: its score is too good."
            )
    return notes


def small_split_notes(sizes: Mapping[str, int], classes: int) -> list[str]:
    """Sentences about splits with fewer rows than classes."""
    return [
        f"The {split} split has {sizes[split]:,} row{'' if sizes[split] == 1 else 's'} for "
        f"{classes:,} classes: its score says little."
        for split in ("valid", "test")
        if sizes[split] < classes
    ]
