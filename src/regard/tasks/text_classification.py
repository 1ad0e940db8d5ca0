"""Classification of the user's own texts, or of sentences with and without a mistake."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.errors import check_choice, check_int, did_you_mean
from regard.models.sampling import uniform
from regard.tasks.base import SPLITS, Example, Task, example_rng, to_int64
from regard.tasks.files import ArrayBuilder
from regard.tasks.grammar import sentence
from regard.tasks.rows import Row, Rows, get_column, is_missing, read_rows
from regard.tasks.tokenizers import TextProcessor, train_tokenizer

SHARE = 0.1  # of the rows: what valid and test get, each, where they have no file of their own
FEW = 5  # rows that are named where something is wrong with many
SENTENCES = {"train": 2000, "valid": 200, "test": 400}


class LabelledText(NamedTuple):
    """A text with its label, and where it stands."""

    place: str
    text: str
    label: str


class EncodedTexts(NamedTuple):
    """The tokens of many texts, one behind the other: text i is tokens[ends[i] : ends[i + 1]]; and their classes."""

    tokens: np.ndarray
    ends: np.ndarray
    classes: np.ndarray


class TextClassification(Task):
    """A label for each text.

    data      CSV, JSON lines, a JSON array or Parquet, a folder of them, or hf:name.  None: sentences of
              `regard.tasks.grammar`, to be told from those whose last verb does not agree
    text      the column of the text, and `spec_label` of the label
    length    the most tokens of a text; what comes after is not read
    level     tokens are "byte", "char" or "bpe", learned from the training split
    missing   rows without a text or a label: "refuse" or "drop"

    Splits are files named train, valid and test.  Those that are missing are drawn from the training rows, 10 % each, by a
    hash of the seed and of the row's number: a row stays in its split when rows are appended.  Classes are the labels of the
    training split, the most frequent first; a label that it lacks is an error in the others: no model could ever say it.
    """

    output = "sequence"

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        text: str = "text",
        label: str = "label",
        length: int = 512,
        level: str = "byte",
        missing: str = "refuse",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, ("refuse", "drop"))
        check_int(0, seed=seed)
        check_int(1, length=length)
        if data is None and (text, label, missing, encoding) != (
            "text",
            "label",
            "refuse",
            "utf-8",
        ):
            raise ValueError(
                "text, label, missing and encoding tell how to read data: give data too"
            )
        rows = dict(built_in(seed)) if data is None else read_rows(data, encoding)
        self.source = LabelledRows(rows, text, label, drop=missing == "drop", seed=seed)
        codec = train_tokenizer(level, lambda: (row.text for row in self.source.walk("train")))
        processor = TextProcessor(codec, length)
        first, labels = read(self.source, "train", processor, None)
        super().__init__(vocab_size=codec.vocab_size, classes=len(labels), length=length)
        self.processor = TextProcessor(codec, length, labels)
        self.texts = {"train": first} | {
            s: read(self.source, s, self.processor, labels)[0] for s in ("valid", "test")
        }

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.texts[split].classes)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        found = self.texts[split]
        if not 0 <= index < len(found.classes):
            raise IndexError(
                f"the {split} split has {len(found.classes)} examples, and {index} is not among them"
            )
        tokens = found.tokens[found.ends[index] : found.ends[index + 1]]
        return Example(to_int64(tokens), torch.tensor(int(found.classes[index])))

    def show(self, example: Example) -> str:
        """The text, and its label."""
        assert self.processor is not None
        return f"{self.processor.codec.decode(example.tokens.tolist())} → {self.processor.decode(int(example.target))}"


class LabelledRows:
    """The labelled texts of each split, read row by row, as often as one likes."""

    def __init__(
        self, rows: dict[str, Rows], text: str, label: str, *, drop: bool, seed: int
    ) -> None:
        self.rows, self.text, self.label, self.drop, self.seed = rows, text, label, drop, seed
        self.drawn = [
            split for split in ("valid", "test") if split not in rows
        ]  # from the rows for training

    def walk(self, split: str) -> Iterator[LabelledText]:
        """All of a split; where rows lack something they are dropped, or refused at the end, when all of them are known."""
        lacking: list[str] = []
        count = found = 0
        without: tuple[str, Row] | None = (
            None  # the first row that lacks a whole column, as lines of JSON may
        )
        for number, (place, row) in enumerate(
            self.rows.get(split) or self.rows.get("train") or self.rows["all"]
        ):
            if self.split_of(number, split) != split:
                continue
            if self.drop and not {self.text, self.label} <= row.keys():
                without = without or (place, row)
                continue
            text, label = get_column(row, self.text, place), get_column(row, self.label, place)
            if is_missing(text) or is_missing(label):
                count += 1
                lacking += [place] if len(lacking) < FEW else []
            else:
                found += 1
                yield LabelledText(
                    place, worded(text, self.text, place), worded(label, self.label, place)
                )
        if without and not found:  # then it is a wrong name
            place, row = without
            get_column(row, self.text, place), get_column(row, self.label, place)
        if count and not self.drop:
            more = f" and {count - FEW} more" if count > FEW else ""
            where = f"{', '.join(lacking)}{more}"
            raise ValueError(
                f"no {self.text!r} or no {self.label!r} in {where}: fill it in, or give missing='drop'"
            )

    def split_of(self, number: int, asked: str) -> str:
        """Where a row belongs; a split with a file of its own has all rows of it."""
        if asked in self.rows and asked != "train":
            return asked
        place = int(uniform(self.seed, number) / SHARE)
        return self.drawn[place] if place < len(self.drawn) else "train"


def worded(value: Any, name: str, place: str) -> str:
    """A value as text; lists and objects are none."""
    if not isinstance(value, str | int | float):
        raise ValueError(f"{place}: {name!r} must be text or a number, not {type(value).__name__}")
    return str(value)


def read(
    source: LabelledRows, split: str, processor: TextProcessor, labels: list[str] | None
) -> tuple[EncodedTexts, list[str]]:
    """The tokens and classes of a split; labels None: those of this split, the most frequent first."""
    store, ends, names = ArrayBuilder(processor.codec.dtype), array("q", [0]), LabelEncoder(labels)
    for row in source.walk(split):
        tokens = processor.encode(row.text)
        store.append(tokens)
        ends.append(ends[-1] + len(tokens))
        names.add(row)
    if not names.numbers:
        raise ValueError(
            f"the {split} split has no rows: there are too few to split, or all were dropped"
        )
    classes, labels = names.finish()
    return EncodedTexts(store.finish(), np.array(ends), classes), labels


class LabelEncoder:
    """Labels as numbers, in the order in which they come until they are finished."""

    def __init__(self, labels: list[str] | None) -> None:
        self.labels, self.known = labels, {label: i for i, label in enumerate(labels or [])}
        self.numbers = array("q")

    def add(self, row: LabelledText) -> None:
        """The label of one row more."""
        if self.labels is None:
            self.known.setdefault(row.label, len(self.known))
        elif row.label not in self.known:
            hint = f": {did_you_mean(row.label, self.labels)}" if len(self.labels) < 50 else ""
            raise ValueError(
                f"{row.place} has the label {row.label!r}, which no training row has{hint}"
            )
        self.numbers.append(self.known[row.label])

    def finish(self) -> tuple[np.ndarray, list[str]]:
        """The classes, and what they are called; where the labels were not given, the most frequent is class 0."""
        found = np.array(self.numbers)
        if self.labels is not None:
            return found, self.labels
        counts = Counter(self.numbers)
        if len(counts) < 2:
            raise ValueError(
                f"all training rows have the label {next(iter(self.known))!r}: there is nothing to tell apart"
            )
        order = sorted(self.known, key=lambda label: (-counts[self.known[label]], label))
        place = np.empty(len(order), dtype=np.int64)
        place[[self.known[label] for label in order]] = np.arange(len(order))
        return place[found], order


class Sentences(Rows):
    """The built-in rows: sentences that are right, and as many whose last verb does not agree with the subject."""

    def __init__(self, split: str, seed: int) -> None:
        self.split, self.seed = split, seed

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """See `Rows`."""
        for number in range(SENTENCES[self.split]):
            right = number % 2 == 0
            drawn = sentence(example_rng(self.seed, self.split, number), agrees=right)
            yield f"sentence {number}", {"text": drawn, "label": "right" if right else "wrong"}


def built_in(seed: int) -> Iterator[tuple[str, Rows]]:
    """The three splits."""
    return ((split, Sentences(split, seed)) for split in SPLITS)
