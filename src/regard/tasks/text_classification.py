"""Classification of your own texts, or of sentences with and without a grammatical error."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.errors import check_choice, check_int, did_you_mean
from regard.models.sampling import uniform
from regard.tasks.base import SPLITS, Example, Task, check_index, example_rng, to_int64
from regard.tasks.files import ArrayBuilder
from regard.tasks.grammar import generate_sentence
from regard.tasks.rows import Row, RowIterator, Rows, get_column, is_missing, read_rows
from regard.tasks.tokenizers import TextProcessor, train_tokenizer

HELD_OUT = 0.1  # share of the rows for each of valid and test, if they have no file
MAX_NAMED = 5  # rows named in an error message
SENTENCES = {"train": 2000, "valid": 200, "test": 400}


class LabelledText(NamedTuple):
    """A text with its label, and where it is."""

    where: str
    text: str
    label: str


class EncodedTexts(NamedTuple):
    """Concatenated tokens; text i is tokens[ends[i] : ends[i + 1]] and has class classes[i]."""

    tokens: np.ndarray
    ends: np.ndarray
    classes: np.ndarray


class TextClassification(Task):
    """Predict the label of a text.

    Splits are files named train, valid and test. Missing splits get 10 % of the training rows
    each, by a hash of the seed and the row number: a row stays in its split when rows are
    appended. The classes are the labels of the training split, most frequent first. A label that
    only occurs in another split is an error.

    Args:
        data: CSV, JSON lines, a JSON array or Parquet, a folder of them, or hf:name. None:
            sentences of `regard.tasks.grammar`, of which half have a wrong last verb.
        text: The column of the text.
        label: The column of the label.
        length: Maximum number of tokens; longer texts are truncated.
        tokenizer: "byte", "char" or "bpe", learned from the training split.
        missing: What to do with rows without text or label: "error" or "drop".
        encoding: Encoding of the files.
        seed: Seed of the splits and of the built-in sentences.
    """

    output = "sequence"

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        text: str = "text",
        label: str = "label",
        length: int = 512,
        tokenizer: str = "byte",
        missing: str = "error",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, ("error", "drop"))
        check_int(0, seed=seed)
        check_int(1, length=length)
        if data is not None:
            rows = read_rows(data, encoding)
        elif (text, label, missing, encoding) != ("text", "label", "error", "utf-8"):
            raise ValueError("text, label, missing and encoding describe the data: also give data.")
        else:
            rows = {split: Rows(partial(_built_in_rows, split, seed)) for split in SPLITS}
        source = LabelledRows(rows, text, label, drop=missing == "drop", seed=seed)
        trained = train_tokenizer(tokenizer, lambda: (row.text for row in source.walk("train")))
        train, labels = _encode_split(source, "train", TextProcessor(trained, length))
        super().__init__(vocab_size=trained.vocab_size, classes=len(labels), length=length)
        self.processor = TextProcessor(trained, length, labels)
        self.texts = {"train": train}
        for split in ("valid", "test"):
            self.texts[split] = _encode_split(source, split, self.processor)[0]

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.texts[split].classes)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        check_index(split, index, self.size(split))
        tokens, ends, classes = self.texts[split]
        target = torch.tensor(int(classes[index]))
        return Example(to_int64(tokens[ends[index] : ends[index + 1]]), target)

    def show(self, example: Example) -> str:
        """The text and its label."""
        assert self.processor is not None
        text = self.processor.tokenizer.decode(example.tokens.tolist())
        return f"{text} → {self.processor.labels[int(example.target)]}"


class LabelledRows:
    """The labelled texts of each split, read row by row.

    Args:
        rows: Rows by split, or under "all".
        text: The column of the text.
        label: The column of the label.
        drop: Drop rows without text or label instead of raising an error.
        seed: Seed for the splits that are missing.
    """

    def __init__(
        self,
        rows: Mapping[str, Iterable[tuple[str, Row]]],
        text: str,
        label: str,
        *,
        drop: bool,
        seed: int,
    ) -> None:
        self.rows, self.text, self.label, self.drop, self.seed = rows, text, label, drop, seed
        self.held_out = [split for split in ("valid", "test") if split not in rows]

    def walk(self, split: str) -> Iterator[LabelledText]:
        """All texts of a split; incomplete rows are dropped, or raise an error at the end."""
        incomplete: list[str] = []  # the first of them
        count = complete = 0
        without_column: tuple[str, Row] | None = None
        rows = self.rows.get(split) or self.rows.get("train") or self.rows["all"]
        for number, (where, row) in enumerate(rows):
            if self._split_of_row(number, split) != split:
                continue
            if self.drop and not {self.text, self.label} <= row.keys():  # possible in JSON lines
                without_column = without_column or (where, row)
                continue
            values = [get_column(row, name, where) for name in (self.text, self.label)]
            if any(map(is_missing, values)):
                count += 1
                if len(incomplete) < MAX_NAMED:
                    incomplete.append(where)
                continue
            complete += 1
            for name, value in zip((self.text, self.label), values, strict=True):
                if not isinstance(value, str | int | float):
                    kind = type(value).__name__
                    raise ValueError(f"{where}: {name!r} must be text or a number, not {kind}.")
            yield LabelledText(where, *map(str, values))
        if without_column and not complete:  # then the name of the column is wrong
            where, row = without_column
            for name in (self.text, self.label):
                get_column(row, name, where)
        if count and not self.drop:
            places = ", ".join(incomplete)
            more = f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
            raise ValueError(
                f"No {self.text!r} or no {self.label!r} in {places}{more}: "
                "fill in the values, or set missing='drop'."
            )

    def _split_of_row(self, number: int, wanted: str) -> str:
        """The split of a row, by a hash of its number; files of a split belong to it as a whole."""
        if wanted in self.rows and wanted != "train":
            return wanted
        tenth = int(uniform(self.seed, number) / HELD_OUT)
        return self.held_out[tenth] if tenth < len(self.held_out) else "train"


def _encode_split(
    source: LabelledRows, split: str, processor: TextProcessor
) -> tuple[EncodedTexts, list[str]]:
    """The tokens and classes of a split, and the labels.

    Without labels in the processor, they are those of this split, most frequent first.
    """
    builder, ends = ArrayBuilder(processor.tokenizer.dtype), array("q", [0])
    numbers = array("q")
    known = {label: number for number, label in enumerate(processor.labels)}
    for row in source.walk(split):
        tokens = processor.encode(row.text)
        builder.append(tokens)
        ends.append(ends[-1] + len(tokens))
        if processor.labels and row.label not in known:
            hint = f": {did_you_mean(row.label, known)}" if len(known) < 50 else "."
            raise ValueError(
                f"{row.where} has label {row.label!r}, which no training row has{hint}"
            )
        numbers.append(known.setdefault(row.label, len(known)))
    if not numbers:
        raise ValueError(f"The {split} split has no rows: there are too few, or all were dropped.")
    classes, labels = np.array(numbers), list(known)
    if not processor.labels:
        if len(labels) < 2:
            raise ValueError(f"All training rows have the label {labels[0]!r}: there is one class.")
        counts = np.bincount(classes)
        order = sorted(range(len(labels)), key=lambda i: (-counts[i], labels[i]))
        classes, labels = np.argsort(order)[classes], [labels[i] for i in order]
    return EncodedTexts(builder.finish(), np.array(ends), classes), labels


def _built_in_rows(split: str, seed: int) -> RowIterator:
    """Correct sentences, and as many whose last verb does not agree with the subject."""
    for number in range(SENTENCES[split]):
        correct = number % 2 == 0
        text = generate_sentence(example_rng(seed, split, number), agree=correct)
        row: dict[str, Any] = {"text": text, "label": "right" if correct else "wrong"}
        yield f"sentence {number}", row
