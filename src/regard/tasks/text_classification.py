"""Classification of your own texts, or of sentences with and without a grammatical error."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.errors import check_choice, check_int
from regard.tasks.base import (
    SPLITS,
    Example,
    TokenTask,
    check_index,
    example_rng,
    token_example,
    with_prediction,
)
from regard.tasks.baselines import MAX_TEXTS, TFIDF, Baseline, tfidf_linear
from regard.tasks.files import ArrayBuilder
from regard.tasks.grammar import generate_sentence
from regard.tasks.processors import Prediction, TextProcessor
from regard.tasks.rendering import Rendered
from regard.tasks.row_splits import (
    MISSING,
    Labels,
    SplitRows,
    check_not_empty,
    copy_notes,
    hash_bytes,
    small_split_notes,
    to_label,
    to_text,
)
from regard.tasks.rows import Row, RowIterator, Rows, read_rows
from regard.tasks.tokenizers import CLASSIFIER_TOKENIZERS, Tokenizer, train_tokenizer, unknown_notes

LENGTH_QUANTILE = 0.95  # share of the training texts that are read to the end, by default
LENGTH_MULTIPLE, MAX_LENGTH = 16, 1024
SENTENCES = {"train": 2000, "valid": 200, "test": 400}


class LabelledText(NamedTuple):
    """A text with its label."""

    text: str
    label: str


class EncodedTexts(NamedTuple):
    """Concatenated tokens; text i is tokens[ends[i] : ends[i + 1]] and has class classes[i] and
    hash hashes[i]. The first `truncated` counts texts with more tokens than the length."""

    tokens: np.ndarray
    ends: np.ndarray
    classes: np.ndarray
    hashes: np.ndarray
    truncated: int


class TextClassification(TokenTask):
    """Predict the label of a text.

    Splits are files named train, valid and test. Missing splits get one of ten training rows of
    each label, chosen by a hash: the labels have the same shares in all splits, also if the file is
    sorted, and a row stays in its split when rows are appended. The first row of a label is for
    training. The classes are the labels of the training split, most frequent first. A label that
    only occurs in another split is an error.

    Args:
        data: CSV, JSON lines, a JSON array or Parquet, a folder of them, or hf:name. None:
            sentences of `regard.tasks.grammar`, of which half have a wrong last verb.
        text: The column of the text.
        label: The column of the label.
        length: Maximum number of tokens; longer texts are truncated. None: that of all but 5 % of
            the training texts, rounded up to a multiple of 16, at most 1,024.
        tokenizer: "auto", "word", "byte", "char" or "bpe", learned from the training split. "auto"
            is "word", or "byte" for texts without words that occur again; see
            `regard.tasks.tokenizers.choose_tokenizer`.
        causal: Whether the model is a decoder, whose last token has seen the text (Radford et al.
            2018), instead of an encoder. `regard train --from` sets it for the weights of a
            decoder.
        missing: What to do with rows without text or label: "drop" or "error". A text of white
            space is none.
        encoding: Encoding of the files.
        seed: Seed of the splits and of the built-in sentences.
    """

    processor: TextProcessor

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        text: str = "text",
        label: str = "label",
        length: int | None = None,
        tokenizer: str = "auto",
        causal: bool = False,
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        if not isinstance(causal, bool):
            raise ValueError(f"causal must be True or False, not {causal!r}")
        self.causal = causal
        check_int(0, seed=seed)
        if length is not None:
            check_int(1, length=length)
        if data is not None:
            rows = read_rows(data, encoding)
        elif (text, label, missing, encoding) != ("text", "label", "drop", "utf-8"):
            raise ValueError("text, label, missing and encoding describe the data: also give data.")
        else:
            rows = {split: Rows(partial(_built_in_rows, split, seed)) for split in SPLITS}
        source = LabelledRows(rows, text, label, drop=missing == "drop", seed=seed)

        def training_texts() -> Iterator[str]:
            return (row.text for _, row in source.walk("train"))

        trained = train_tokenizer(tokenizer, training_texts, choices=CLASSIFIER_TOKENIZERS)
        length = length or choose_length(trained, training_texts())
        train, labels = _encode_split(source, "train", TextProcessor(trained, length))
        super().__init__(vocab_size=trained.vocab_size, classes=len(labels), length=length)
        self.processor = TextProcessor(trained, length, labels)
        self.texts = {"train": train}
        for split in ("valid", "test"):
            self.texts[split] = _encode_split(source, split, self.processor)[0]
        self.source = source

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`."""
        return {**super().baselines(), TFIDF: self._tfidf_score}

    def _tfidf_score(self, test: Sequence[int]) -> torch.Tensor:
        """Statistics of TF-IDF on whole texts, which are read again."""
        samples = {"train": self.sample("train", MAX_TEXTS).tolist(), "test": list(test)}
        data = []
        for split, indices in samples.items():
            wanted = dict.fromkeys(indices, "")
            for index, (_, row) in enumerate(self.source.walk(split)):
                if index in wanted:
                    wanted[index] = row.text
            data.append(([wanted[index] for index in indices], self.texts[split].classes[indices]))
        return tfidf_linear(*data)

    def notes(self) -> list[str]:
        """See `Task`."""
        truncated = sum(texts.truncated for texts in self.texts.values())
        sizes = {split: self.size(split) for split in SPLITS}
        return [
            *self.source.notes(),
            *self.processor.truncation_notes(truncated, sum(sizes.values())),
            *unknown_notes(
                self.processor.tokenizer, {split: each.tokens for split, each in self.texts.items()}
            ),
            *copy_notes({split: each.hashes for split, each in self.texts.items()}, "texts"),
            *small_split_notes(sizes, self.classes),
        ]

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.texts[split].classes)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        check_index(split, index, self.size(split))
        texts = self.texts[split]
        tokens = texts.tokens[texts.ends[index] : texts.ends[index + 1]]
        return token_example(tokens, int(texts.classes[index]))

    def classes_of(self, split: str) -> np.ndarray:
        """See `Task`."""
        return self.texts[split].classes

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The text and its label."""
        text = self.processor.tokenizer.decode(example.inputs["x"].tolist())
        label = self.processor.labels[int(example.targets["labels"])]
        return with_prediction(f"{text} → {label}", prediction)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> TextProcessor:
        """See `Task`."""
        return TextProcessor.from_dict(content)


class LabelledRows(SplitRows[LabelledText]):
    """The labelled texts of each split, stratified by label; see `SplitRows`.

    Args:
        rows: Rows by split, or under "all".
        text: The column of the text.
        label: The column of the label.
        drop: Leave rows without text or label out instead of raising an error.
        seed: Seed of the splits that are missing.
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
        def parse(where: str, values: list[Any]) -> LabelledText:
            return LabelledText(to_text(where, text, values[0]), to_label(where, label, values[1]))

        super().__init__(rows, (text, label), parse, stratify=label, drop=drop, seed=seed)


def _encode_split(
    source: LabelledRows, split: str, processor: TextProcessor
) -> tuple[EncodedTexts, list[str]]:
    """The tokens and classes of a split, and the labels.

    Without labels in the processor, they are those of this split, most frequent first.
    """
    builder, ends = ArrayBuilder(processor.tokenizer.dtype), array("q", [0])
    numbers, hashes, known = array("q"), array("Q"), Labels(processor.labels)
    truncated = 0
    for where, row in source.walk(split):
        tokens, is_truncated = processor.truncate(row.text)
        truncated += is_truncated
        builder.append(tokens)
        hashes.append(hash_bytes(row.text.encode("utf-8", "surrogatepass")))
        ends.append(ends[-1] + len(tokens))
        numbers.append(known.number(where, row.label))
    check_not_empty(split, len(numbers))
    classes, labels = np.array(numbers), list(known.known)
    if known.is_open:
        classes, labels = known.order_by_frequency(classes, source.columns[1])
    tokens = builder.finish()
    return EncodedTexts(tokens, np.array(ends), classes, np.array(hashes), truncated), labels


def choose_length(tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """The tokens of all but 5 % of the texts, rounded up to a multiple of 16, at most 1,024."""
    counts = [len(tokenizer.encode(text)) for text in texts]
    if not counts:
        return LENGTH_MULTIPLE  # of an empty split, which is refused later
    needed = math.ceil(np.quantile(counts, LENGTH_QUANTILE))
    return int(min(MAX_LENGTH, LENGTH_MULTIPLE * -(-needed // LENGTH_MULTIPLE)))


def _built_in_rows(split: str, seed: int) -> RowIterator:
    """Correct sentences, and as many whose last verb does not agree with the subject."""
    for number in range(SENTENCES[split]):
        correct = number % 2 == 0
        text = generate_sentence(example_rng(seed, split, number), agree=correct)
        row: dict[str, Any] = {"text": text, "label": "right" if correct else "wrong"}
        yield f"sentence {number}", row
