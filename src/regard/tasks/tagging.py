"""Tagging: a label for each word, such as the names of people and places in a text."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.losses import IGNORE_INDEX
from regard.tasks.base import LABELS, SPLITS, Example, TokenTask, check_index, token_example
from regard.tasks.baselines import Baseline
from regard.tasks.conll import LABELS as LABEL_COLUMN, TOKENS, read_sentences
from regard.tasks.entities import OUTSIDE, EntityF1, are_tags, find_entities
from regard.tasks.files import ArrayBuilder
from regard.tasks.metrics import Accuracy, MacroF1
from regard.tasks.processors import Prediction, Processor
from regard.tasks.rendering import Rendered, RenderedParts, RenderedText
from regard.tasks.row_splits import (
    MISSING,
    SplitRows,
    UnusableRow,
    check_not_empty,
    copy_notes,
    hash_bytes,
    to_label,
    to_text,
)
from regard.tasks.tokenizers import Tokenizer, tokenizer_from_dict, train_tokenizer

WORD = re.compile(r"[@#]?\w+(?:[-'’.]\w+)*|[^\w\s]")  # of a text that is not yet in words
SPACE = re.compile(r"\s")
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"  # for a space inside a word
WORD_LABEL = "most frequent label of the word"
MAX_LABELS = 1000


class Sentence(NamedTuple):
    """Words (n) and their labels (n)."""

    words: list[str]
    labels: list[str]


class WordTagger(Processor):
    """Words for a model that labels the first token of each.

    Every word is encoded with a space before it, which shows where words start.

    Args:
        tokenizer: Converts words to tokens.
        length: Maximum number of tokens; the words after it are left out.
        labels: Names of the classes.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, labels: Sequence[str]) -> None:
        self.tokenizer, self.length, self.labels = tokenizer, length, tuple(labels)
        texts = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
        self.starts_word = np.array([text.startswith(" ") for text in texts])
        self.has_entities = are_tags(self.labels)

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (n) of words, and the places of the first token of each word that fits."""
        pieces: list[int] = []
        starts = []
        for word in words:
            encoded = self.tokenizer.encode(" " + SPACE.sub(NO_BREAK_SPACE, word)).tolist()
            if pieces and len(pieces) + len(encoded) > self.length:
                break
            starts.append(len(pieces))
            pieces += encoded[: self.length]
        return np.array(pieces, dtype=np.int64), np.array(starts, dtype=np.int64)

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: a list of words, or a text to split into words and punctuation."""
        if isinstance(raw, str):
            raw = WORD.findall(raw)
        if not isinstance(raw, Sequence) or not all(isinstance(word, str) for word in raw):
            raise TypeError(f"Expected a text or a list of words, not {raw!r:.60}.")
        tokens, _ = self.encode_words(raw or ["."])
        return {"x": torch.as_tensor(tokens)}

    def words(self, tokens: Sequence[int]) -> tuple[list[str], list[int]]:
        """The words of tokens (n), and the place of their first tokens."""
        starts = [i for i, token in enumerate(tokens) if self.starts_word[token]]
        ends = [*starts[1:], len(tokens)]
        spans = zip(starts, ends, strict=True)
        return [self.tokenizer.decode(tokens[i:j])[1:] for i, j in spans], starts

    def describe(self, words: Sequence[str], labels: Sequence[str]) -> Prediction:
        """Words and labels, the text, and its spans with offsets in it."""
        ends = np.cumsum([len(word) + 1 for word in words]) - 1
        text, spans = " ".join(words), []
        for first, last, name in self.find_spans(labels):
            start, end = int(ends[first]) - len(words[first]), int(ends[last - 1])
            spans.append({"start": start, "end": end, "label": name, "text": text[start:end]})
        return {"text": text, "words": list(words), "labels": list(labels), "spans": spans}

    def find_spans(self, labels: Sequence[str]) -> list[tuple[int, int, str]]:
        """The entities; or every word that has a label, if the labels mark no entities."""
        if self.has_entities:
            return [(each.start, each.end, each.kind) for each in find_entities(labels)]
        return [(i, i + 1, label) for i, label in enumerate(labels) if label != OUTSIDE]

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the words, their labels, and the spans of entities."""
        x, mask = inputs["x"], inputs.get("mask")
        assert x is not None
        lengths = [x.shape[1]] * len(x) if mask is None else mask.sum(1).tolist()
        predictions = []
        for row, chosen, length in zip(
            x.tolist(), output.argmax(-1).tolist(), lengths, strict=True
        ):
            words, starts = self.words(row[:length])
            predictions.append(self.describe(words, [self.labels[chosen[i]] for i in starts]))
        return predictions

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        tokenizer = self.tokenizer.to_dict()
        return {"tokenizer": tokenizer, "length": self.length, "labels": list(self.labels)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> WordTagger:
        """The processor that `to_dict` described."""
        try:
            tokenizer = tokenizer_from_dict(content["tokenizer"])
            return cls(tokenizer, content["length"], list(map(str, content["labels"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of words: {error!r}") from None


class EncodedSentences(NamedTuple):
    """Concatenated tokens, and the class of the first token of each word, elsewhere IGNORE_INDEX;
    sentence i is ends[i] .. ends[i + 1]. Hashes (n), and whether it has a label but "O" (n)."""

    tokens: np.ndarray
    labels: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    is_labelled: np.ndarray


class Tagging(TokenTask):
    """Predict the label of each word of a sentence.

    If the labels mark entities ("O", "B-person", "I-person", also IOB1, BIOES and BILOU), the
    metric is the F1 of entities, else accuracy and macro F1 of words. The classes are the labels of
    all splits.

    Splits are files named train, valid and test. Missing splits get one of ten training sentences,
    chosen by a hash.

    Args:
        data: A CoNLL file (.conll, .iob, .bio or .txt: a word per line, its label in the last
            column, a blank line after each sentence); JSON lines, a JSON array or Parquet with
            lists; a folder of these, or hf:name.
        tokens: The column of the words, if the data is rows.
        labels: The column of the labels, if the data is rows.
        length: Maximum number of tokens; the words after it are left out.
        tokenizer: "byte", "char" or "bpe", learned from the training split.
        missing: What to do with rows without words or with another number of labels: "drop" or
            "error".
        encoding: Encoding of the files.
        seed: Seed of the splits.
    """

    output = "token"
    processor: WordTagger

    def __init__(
        self,
        data: str | Path,
        *,
        tokens: str = TOKENS,
        labels: str = LABEL_COLUMN,
        length: int = 256,
        tokenizer: str = "bpe",
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        check_int(0, seed=seed)
        check_int(1, length=length)
        rows = read_sentences(data, encoding, tokens, labels)
        self.source = SplitRows(
            rows,
            (tokens, labels),
            lambda where, values: _parse(where, tokens, labels, values),
            drop=missing == "drop",
            seed=seed,
        )
        found = {split: _collect_labels(self.source, split) for split in SPLITS}
        known = sorted(set().union(*found.values()), key=lambda label: (label != OUTSIDE, label))
        if len(found["train"]) < 2:
            raise ValueError(f"All training words have the label {known[0]!r}: there is one class.")
        if len(known) > MAX_LABELS:
            raise ValueError(
                f"There are {len(known):,} different labels, such as {known[1]!r}: is the label in "
                "the last column?"
            )
        trained = train_tokenizer(
            tokenizer,
            lambda: (" " + " ".join(row.words) for _, row in self.source.walk("train")),
        )
        super().__init__(vocab_size=trained.vocab_size, classes=len(known), length=length)
        self.processor = WordTagger(trained, length, known)
        self.metrics = (Accuracy(), MacroF1(len(known)))
        if self.processor.has_entities:
            self.metrics = (EntityF1(known), Accuracy())
        self.truncated = 0
        self.sentences = {split: self._encode_split(split) for split in SPLITS}

    def _encode_split(self, split: str) -> EncodedSentences:
        """The tokens and classes of a split."""
        numbers = {label: number for number, label in enumerate(self.processor.labels)}
        tokens, classes = ArrayBuilder(self.processor.tokenizer.dtype), ArrayBuilder(np.int32)
        ends, hashes, is_labelled = array("q", [0]), array("Q"), array("b")
        for _, row in self.source.walk(split):
            encoded, starts = self.processor.encode_words(row.words)
            target = np.full(len(encoded), IGNORE_INDEX)
            target[starts] = [numbers[label] for label in row.labels[: len(starts)]]
            self.truncated += len(starts) < len(row.words)
            tokens.append(encoded)
            classes.append(target)
            ends.append(ends[-1] + len(encoded))
            hashes.append(hash_bytes(" ".join(row.words).encode("utf-8", "surrogatepass")))
            is_labelled.append(any(label != OUTSIDE for label in row.labels))
        return EncodedSentences(
            tokens.finish(),
            classes.finish(),
            np.array(ends),
            np.array(hashes),
            np.array(is_labelled),
        )

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.sentences[split].hashes)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        check_index(split, index, self.size(split))
        sentences = self.sentences[split]
        place = slice(sentences.ends[index], sentences.ends[index + 1])
        return token_example(sentences.tokens[place], sentences.labels[place])

    def classes_of(self, split: str) -> np.ndarray:
        """See `Task`: whether a sentence has a label but "O"."""
        return self.sentences[split].is_labelled

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`."""
        return {**super().baselines(), WORD_LABEL: self._word_label_score}

    def _word_label_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of the most frequent label of each word in the training split; for new words,
        the most frequent of all."""
        numbers = {label: number for number, label in enumerate(self.processor.labels)}
        counts: dict[str, Counter[int]] = {}
        total: Counter[int] = Counter()
        for _, row in self.source.walk("train"):
            for word, label in zip(row.words, row.labels, strict=True):
                counts.setdefault(word, Counter())[numbers[label]] += 1
                total[numbers[label]] += 1
        usual = total.most_common(1)[0][0]
        wanted = {index: [""] for index in test}
        for index, (_, row) in enumerate(self.source.walk("test")):
            if index in wanted:
                wanted[index] = row.words
        parts = []
        for index in test:
            batch = self.batch("test", [index])
            labels = batch.targets[LABELS]
            chosen = torch.full_like(labels, usual)
            starts = torch.nonzero(labels[0] != IGNORE_INDEX)[:, 0].tolist()
            for place, word in zip(starts, wanted[index], strict=False):
                if word in counts:
                    chosen[0, place] = counts[word].most_common(1)[0][0]
            output = torch.nn.functional.one_hot(chosen, self.classes).float()
            parts.append(self.metric.update(output, batch, []))
        return self.metric.merge(parts)

    def notes(self) -> list[str]:
        """See `Task`."""
        hashes = {split: each.hashes for split, each in self.sentences.items()}
        notes = [*self.source.notes(), *copy_notes(hashes, "sentences")]
        if self.truncated:
            notes.append(
                f"{self.truncated:,} sentences have more than {self.length} tokens: the words "
                "after them are left out, and do not count."
            )
        return notes

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The text with the spans of its labels, and with those that are predicted."""
        words, starts = self.processor.words(example.inputs["x"].tolist())
        labels = [self.processor.labels[i] for i in example.targets[LABELS][starts].tolist()]
        parts = [_render(self.processor.describe(words, labels))]
        if prediction is not None:
            parts += [RenderedText("predicted:"), _render(prediction)]
        return RenderedParts(parts)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> WordTagger:
        """See `Task`."""
        return WordTagger.from_dict(content)


def _render(prediction: Prediction) -> RenderedText:
    """The text of a prediction with its spans."""
    spans = [(span["start"], span["end"], span["label"]) for span in prediction["spans"]]
    return RenderedText(prediction["text"], spans)


def _parse(where: str, tokens: str, labels: str, values: list[Any]) -> Sentence:
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


def _collect_labels(source: SplitRows[Sentence], split: str) -> set[str]:
    """The labels of a split."""
    found: set[str] = set()
    count = 0
    for _, row in source.walk(split):
        found.update(row.labels)
        count += 1
    check_not_empty(split, count)
    return found
