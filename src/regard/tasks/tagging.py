"""Tagging: a label for each word, such as its part of speech."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.errors import check_choice, check_int
from regard.tasks.base import SPLITS
from regard.tasks.conll import LABELS as LABEL_COLUMN, TOKENS, read_sentences
from regard.tasks.entities import OUTSIDE, EntityF1
from regard.tasks.metrics import Accuracy, MacroF1
from regard.tasks.row_splits import (
    MISSING,
    SplitRows,
    UnusableRow,
    check_not_empty,
    to_label,
    to_text,
)
from regard.tasks.word_labels import Sentence, WordLabelling

MAX_LABELS = 1000


class Tagging(WordLabelling):
    """Label each word of a sentence: parts of speech, names, ...

    For names, the task `ner` has more formats and baselines. If the labels mark entities here as
    well (IOB1, IOB2, BIOES or BILOU), the first metric is the F1 of entities, else accuracy.

    Splits are files named train, valid and test. Missing splits get one of ten training sentences,
    chosen by a hash.

    Args:
        data: A CoNLL file, with a word in each line, its label last, and a blank line after each
            sentence; or JSON lines, a JSON array, Parquet or hf:name with lists; or a folder.
        tokens: Column with the list of words, in rows.
        labels: Column with the list of labels, in rows.
        length: Maximum number of tokens of a sentence.
        tokenizer: "byte", "char" or "bpe" for word pieces, learned from the training split, or
            "features" for one token per word; see `regard.tasks.word_encoders`.
        overflow: Sentences with more tokens: "truncate" leaves the words after them out, "stride"
            reads them in windows that overlap.
        missing: What to do with rows without words or with another number of labels: "drop" or
            "error".
        encoding: Encoding of the files.
        seed: Seed of the splits.
    """

    def __init__(
        self,
        data: str | Path,
        *,
        tokens: str = TOKENS,
        labels: str = LABEL_COLUMN,
        length: int = 256,
        tokenizer: str = "bpe",
        overflow: str = "truncate",
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        check_int(0, seed=seed)
        source = SplitRows(
            read_sentences(data, encoding, tokens, labels),
            (tokens, labels),
            lambda where, values: parse_sentence(where, tokens, labels, values),
            drop=missing == "drop",
            seed=seed,
        )
        found = {split: collect_labels(source, split) for split in SPLITS}
        known = sorted(set().union(*found.values()), key=lambda label: (label != OUTSIDE, label))
        if len(found["train"]) < 2:
            raise ValueError(f"All training words have the label {known[0]!r}: there is one class.")
        if len(known) > MAX_LABELS:
            raise ValueError(
                f"There are {len(known):,} different labels, such as {known[1]!r}: is the label in "
                "the last column?"
            )
        super().__init__(source, known, tokenizer=tokenizer, length=length, overflow=overflow)
        self.metrics = (Accuracy(), MacroF1(len(known)))
        if self.processor.has_entities:
            self.metrics = (EntityF1(known), Accuracy())


def parse_sentence(where: str, tokens: str, labels: str, values: list[Any]) -> Sentence:
    """A sentence from the values of its row."""
    for name, value in zip((tokens, labels), values, strict=True):
        if not isinstance(value, list):
            raise ValueError(
                f"{where}: {name!r} must be a list with an entry per word, not "
                f"{type(value).__name__}."
            )
    if len(values[0]) != len(values[1]):
        raise UnusableRow(f"{len(values[0])} words have {len(values[1])} labels.")
    if not values[0]:
        raise UnusableRow(f"{tokens!r} is empty.")
    return Sentence(
        [to_text(where, tokens, word) for word in values[0]],
        [to_label(where, labels, label) for label in values[1]],
    )


def collect_labels(source: SplitRows[Sentence], split: str) -> set[str]:
    """The labels of a split; a split without sentences is a ValueError."""
    found: set[str] = set()
    count = 0
    for _, row in source.walk(split):
        found.update(row.labels)
        count += 1
    check_not_empty(split, count)
    return found
