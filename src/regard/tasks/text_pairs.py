"""Classification of pairs of texts: entailment, paraphrases, a question and its answer."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.config import (
    HeadConfig,
    MatchingHeadConfig,
    SequenceClassificationHeadConfig,
    TokenInput,
)
from regard.tasks.base import (
    LABELS,
    SPLITS,
    Example,
    ModelNeeds,
    TokenTask,
    check_index,
    example_rng,
    to_int64,
    with_prediction,
)
from regard.tasks.baselines import MAX_TEXTS, Baseline, pair_linear
from regard.tasks.files import ArrayBuilder
from regard.tasks.processors import Prediction, Processor, predict_classes
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
from regard.tasks.rows import RowIterator, Rows, read_rows
from regard.tasks.text_classification import LENGTH_MULTIPLE, LENGTH_QUANTILE, MAX_LENGTH
from regard.tasks.tokenizers import (
    CLASSIFIER_TOKENIZERS,
    EMPTY,
    Tokenizer,
    tokenizer_from_dict,
    train_tokenizer,
    unknown_notes,
)

JOINT, DUAL = "joint", "dual"
ENCODERS = (JOINT, DUAL)
SPECIAL = {JOINT: 3, DUAL: 2}  # [CLS] first [SEP] second [SEP], or [CLS] text [SEP] each
OVERLAP = "TF-IDF + overlap + logistic regression"
PAIRS = {"train": 4000, "valid": 200, "test": 400}  # of the built-in sentences
NOUNS = (
    *("dog", "cat", "sailor", "king", "friend", "bird"),
    *("horse", "teacher", "child", "queen", "farmer", "doctor"),
)
VERBS = {
    **{"sees": "seen", "follows": "followed", "helps": "helped", "finds": "found"},
    **{"knows": "known", "calls": "called", "hears": "heard", "meets": "met"},
}
HELD_OUT = {"valid": (0,), "test": (1,), "train": range(2, 10)}  # tenths of the sentences


class LabelledPair(NamedTuple):
    """Two texts with their label."""

    first: str
    second: str
    label: str


class PairProcessor(Processor):
    """Rows with two texts for a classifier.

    Two tokens follow those of the tokenizer: [CLS], which starts a sequence, and [SEP], which ends
    a text.

    Args:
        tokenizer: Converts text to tokens.
        length: Maximum number of tokens of a sequence; longer texts are truncated, the longer one
            of a joint sequence first.
        labels: Names of the classes.
        encoder: "joint" or "dual", see `TextPairClassification`.
        columns: The columns of the first and the second text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        length: int,
        labels: Sequence[str],
        encoder: str,
        columns: Sequence[str],
    ) -> None:
        check_choice("encoder", encoder, ENCODERS)
        if length <= SPECIAL[encoder] + 1:
            raise ValueError(
                f"length must be at least {SPECIAL[encoder] + 2} for encoder={encoder!r}, which "
                f"adds {SPECIAL[encoder]} tokens: not {length}."
            )
        self.tokenizer, self.length, self.labels = tokenizer, length, tuple(labels)
        self.encoder, self.columns = encoder, tuple(columns)
        self.cls, self.sep = tokenizer.vocab_size, tokenizer.vocab_size + 1
        self.vocab_size = tokenizer.vocab_size + 2

    def truncate(self, first: str, second: str) -> tuple[np.ndarray, np.ndarray, bool]:
        """The tokens of both texts, at least one each, and whether there are more."""
        one, two = (self.tokenizer.encode(text) for text in (first, second))
        one, two = (each if len(each) else np.array([EMPTY]) for each in (one, two))
        room = self.length - SPECIAL[self.encoder]
        keep_one = keep_two = room
        if self.encoder == JOINT:  # the texts share the room, and the longer one is shortened
            keep_two = max(room // 2, room - len(one))
            keep_one = room - min(len(two), keep_two)
        is_truncated = len(one) > keep_one or len(two) > keep_two
        return one[:keep_one], two[:keep_two], is_truncated

    def join(self, first: np.ndarray, second: np.ndarray) -> dict[str, Tensor]:
        """The inputs of the model for the tokens of two texts.

        Joint: `x` (n) is [CLS] first [SEP] second [SEP], and `token_type_ids` (n) are 1 for the
        second text and its [SEP]. Dual: `x` (2, n) is [CLS] text [SEP] for each, padded with 0.
        """
        one = np.array([self.cls, *first, self.sep])
        if self.encoder == JOINT:
            types = np.repeat((0, 1), (len(one), len(second) + 1))
            x = np.array([*one, *second, self.sep])
            return {"x": to_int64(x), "token_type_ids": to_int64(types)}
        two = np.array([self.cls, *second, self.sep])
        x = np.zeros((2, max(len(one), len(two))), np.int64)
        x[0, : len(one)], x[1, : len(two)] = one, two
        return {"x": to_int64(x)}

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: a row with both texts."""
        if not isinstance(raw, Mapping) or not set(self.columns) <= set(raw):
            names = " and ".join(map(repr, self.columns))
            raise TypeError(f"Expected a row with the columns {names}, not {raw!r:.60}.")
        texts = [raw[name] for name in self.columns]
        for name, text in zip(self.columns, texts, strict=True):
            if not isinstance(text, str):
                raise TypeError(f"{name!r} must be a text, not {type(text).__name__}.")
        return self.join(*self.truncate(*texts)[:2])

    def truncates(self, raw: Any, /) -> bool:
        """See `Processor`."""
        return self.truncate(*(raw[name] for name in self.columns))[2]

    def split(self, x: Tensor) -> tuple[str, str]:
        """The two texts of the input of an example."""
        if self.encoder == DUAL:
            parts = [row[1:].tolist() for row in x]
            texts = [part[: part.index(self.sep)] for part in parts]
        else:
            tokens = x.tolist()[1:]
            middle = tokens.index(self.sep)
            texts = [tokens[:middle], tokens[middle + 1 : tokens.index(self.sep, middle + 1)]]
        first, second = map(self.tokenizer.decode, texts)
        return first, second

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the most probable label, its probability and those of all labels."""
        return predict_classes(output, self.labels)

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        return {
            "tokenizer": self.tokenizer.to_dict(),
            "length": self.length,
            "labels": list(self.labels),
            "encoder": self.encoder,
            "columns": list(self.columns),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PairProcessor:
        """The processor that `to_dict` described."""
        try:
            tokenizer = tokenizer_from_dict(content["tokenizer"])
            names = [list(map(str, content[name])) for name in ("labels", "columns")]
            return cls(tokenizer, content["length"], names[0], content["encoder"], names[1])
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of pairs: {error!r}") from None


class EncodedLabelledPairs(NamedTuple):
    """Concatenated tokens; text i is tokens[ends[i] : ends[i + 1]], and texts 2i and 2i + 1 are
    pair i, which has class classes[i] and hash hashes[i]. `truncated` counts shortened pairs."""

    tokens: np.ndarray
    ends: np.ndarray
    classes: np.ndarray
    hashes: np.ndarray
    truncated: int


class TextPairClassification(TokenTask):
    """Predict the label of a pair of texts, such as "entailment" or "paraphrase".

    With encoder="joint", an encoder reads both texts as one sequence, [CLS] first [SEP] second
    [SEP] with an embedding of the segment, and the output at [CLS] is classified (BERT, Devlin et
    al. 2019, arXiv 1810.04805): each token of a text can attend to the other text. With "dual", one
    encoder reads each text by itself, and a head compares the means of their tokens
    (Sentence-BERT, Reimers & Gurevych 2019, arXiv 1908.10084): cheaper for long texts.

    Splits, classes and missing values are as in the task `classify`.

    Args:
        data: CSV, JSON lines, a JSON array or Parquet, a folder of them, or hf:name. None:
            sentences in the active and in the passive voice, which say the same or the opposite in
            the same words.
        first: The column of the first text.
        second: The column of the second text.
        label: The column of the label.
        encoder: "joint" or "dual".
        length: Maximum number of tokens of a sequence, [CLS] and [SEP] included. None: that of all
            but 5 % of the training pairs, rounded up to a multiple of 16, at most 1,024.
        tokenizer: "auto", "word", "byte", "char" or "bpe", as in the task `classify`.
        causal: Whether the model is a decoder, whose last token is classified; for encoder="joint".
            `regard train --from` sets it for the weights of a decoder.
        missing: What to do with rows without a text or label: "drop" or "error".
        encoding: Encoding of the files.
        seed: Seed of the splits and of the built-in sentences.
    """

    processor: PairProcessor

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        first: str = "first",
        second: str = "second",
        label: str = "label",
        encoder: str = JOINT,
        length: int | None = None,
        tokenizer: str = "auto",
        causal: bool = False,
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        check_choice("encoder", encoder, ENCODERS)
        if not isinstance(causal, bool):
            raise ValueError(f"causal must be True or False, not {causal!r}")
        check_int(0, seed=seed)
        if length is not None:
            check_int(1, length=length)
        if causal and encoder == DUAL:
            raise ValueError("A dual encoder cannot be causal: use encoder='joint' for a decoder.")
        if first == second:
            raise ValueError(f"first and second are the same column, {first!r}: name two.")
        self.encoder, self.causal = encoder, causal
        if data is not None:
            rows = read_rows(data, encoding)
        elif (first, second, label, missing, encoding) != (
            *("first", "second", "label"),
            *("drop", "utf-8"),
        ):
            raise ValueError(
                "first, second, label, missing and encoding describe the data: also give data."
            )
        else:
            rows = {split: Rows(partial(_built_in_rows, split, seed)) for split in SPLITS}

        def parse(where: str, values: list[Any]) -> LabelledPair:
            one, two = (
                to_text(where, name, value)
                for name, value in zip((first, second), values, strict=False)
            )
            return LabelledPair(one, two, to_label(where, label, values[2]))

        self.source = SplitRows(
            rows, (first, second, label), parse, stratify=label, drop=missing == "drop", seed=seed
        )

        def training_texts() -> Iterator[str]:
            return (text for _, row in self.source.walk("train") for text in row[:2])

        trained = train_tokenizer(tokenizer, training_texts, choices=CLASSIFIER_TOKENIZERS)
        length = length or choose_pair_length(trained, training_texts(), encoder)
        unlabelled = PairProcessor(trained, length, (), encoder, (first, second))
        train, labels = self._encode_split("train", unlabelled)
        super().__init__(vocab_size=unlabelled.vocab_size, classes=len(labels), length=length)
        self.processor = PairProcessor(trained, length, labels, encoder, (first, second))
        self.pairs = {"train": train}
        for split in ("valid", "test"):
            self.pairs[split] = self._encode_split(split, self.processor)[0]

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder with two token types, a decoder, or a dual encoder."""
        head: HeadConfig
        kind: Literal["encoder", "decoder", "dual_encoder"]
        if self.encoder == DUAL:
            kind, head = "dual_encoder", MatchingHeadConfig(num_classes=self.classes)
        else:
            kind = "decoder" if self.causal else "encoder"
            pooling = "last" if self.causal else "cls"
            head = SequenceClassificationHeadConfig(num_classes=self.classes, pooling=pooling)
        types = 2 if self.encoder == JOINT else 0
        tokens = TokenInput(vocab_size=self.vocab_size, type_vocab_size=types)
        return ModelNeeds(kind=kind, input=tokens, head=head, length=self.length)

    def _encode_split(
        self, split: str, processor: PairProcessor
    ) -> tuple[EncodedLabelledPairs, list[str]]:
        """The tokens and classes of a split, and the labels: those of the processor, or else those
        of this split, most frequent first."""
        builder, ends = ArrayBuilder(processor.tokenizer.dtype), array("q", [0])
        numbers, hashes, known = array("q"), array("Q"), Labels(processor.labels)
        truncated = 0
        for where, row in self.source.walk(split):
            *texts, is_truncated = processor.truncate(row.first, row.second)
            truncated += is_truncated
            for tokens in texts:
                builder.append(tokens)
                ends.append(ends[-1] + len(tokens))
            both = f"{row.first}\0{row.second}"
            hashes.append(hash_bytes(both.encode("utf-8", "surrogatepass")))
            numbers.append(known.number(where, row.label))
        check_not_empty(split, len(numbers))
        classes, labels = np.array(numbers), list(known.known)
        if known.is_open:
            classes, labels = known.order_by_frequency(classes, self.source.columns[2])
        tokens = builder.finish()
        return EncodedLabelledPairs(
            tokens, np.array(ends), classes, np.array(hashes), truncated
        ), labels

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.pairs[split].classes)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        check_index(split, index, self.size(split))
        pairs = self.pairs[split]
        start, middle, end = pairs.ends[2 * index : 2 * index + 3]
        inputs = self.processor.join(pairs.tokens[start:middle], pairs.tokens[middle:end])
        return Example(inputs, {LABELS: torch.tensor(int(pairs.classes[index]))})

    def classes_of(self, split: str) -> np.ndarray:
        """See `Task`."""
        return self.pairs[split].classes

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`."""
        return {**super().baselines(), OVERLAP: self._overlap_score}

    def _overlap_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of a linear model of whole texts, which are read again."""
        samples = {"train": self.sample("train", MAX_TEXTS).tolist(), "test": list(test)}
        data = []
        for split, indices in samples.items():
            wanted = dict.fromkeys(indices, ("", ""))
            for index, (_, row) in enumerate(self.source.walk(split)):
                if index in wanted:
                    wanted[index] = row.first, row.second
            data.append(([wanted[index] for index in indices], self.pairs[split].classes[indices]))
        return pair_linear(*data)

    def notes(self) -> list[str]:
        """See `Task`."""
        notes = self.source.notes()
        truncated = sum(pairs.truncated for pairs in self.pairs.values())
        if truncated:
            notes.append(
                f"{truncated:,} of {sum(map(self.size, SPLITS)):,} pairs have more than "
                f"{self.length:,} tokens ({self.processor.tokenizer.name}) and are truncated."
            )
        return [
            *notes,
            *unknown_notes(
                self.processor.tokenizer, {split: each.tokens for split, each in self.pairs.items()}
            ),
            *copy_notes({split: each.hashes for split, each in self.pairs.items()}, "pairs"),
            *small_split_notes({split: self.size(split) for split in SPLITS}, self.classes),
        ]

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """Both texts and their label."""
        first, second = self.processor.split(example.inputs["x"])
        label = self.processor.labels[int(example.targets[LABELS])]
        return with_prediction(f"{first}\n--\n{second}\n→ {label}", prediction)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> PairProcessor:
        """See `Task`."""
        return PairProcessor.from_dict(content)


def choose_pair_length(tokenizer: Tokenizer, texts: Iterable[str], encoder: str) -> int:
    """The tokens of all but 5 % of the sequences, rounded up to a multiple of 16, at most 1,024.

    Args:
        texts: The first and the second text of each pair in turn.
    """
    counts = np.array([len(tokenizer.encode(text)) for text in texts]).reshape(-1, 2)
    if not len(counts):
        return LENGTH_MULTIPLE  # of an empty split, which is refused later
    longest = counts.sum(1) if encoder == JOINT else counts.max(1)
    needed = math.ceil(np.quantile(longest, LENGTH_QUANTILE)) + SPECIAL[encoder]
    return int(min(MAX_LENGTH, LENGTH_MULTIPLE * -(-needed // LENGTH_MULTIPLE)))


def _built_in_rows(split: str, seed: int) -> RowIterator:
    """Sentences whose second one says the same, or the opposite, in the other voice. No sentence is
    in two splits."""
    for number, same in zip(range(PAIRS[split]), itertools.cycle((True, False)), strict=False):
        rng = example_rng(seed, split, number)
        tenth = -1
        while tenth not in HELD_OUT[split]:
            one, two = rng.choice(len(NOUNS), 2, replace=False).tolist()
            verb = int(rng.integers(len(VERBS)))
            tenth = (one + two + verb) % 10  # the same for both directions
        active, passive = list(VERBS.items())[verb]
        names = NOUNS[one], NOUNS[two]
        agent, patient = names if same else reversed(names)
        texts = [
            f"the {names[0]} {active} the {names[1]}",
            f"the {patient} is {passive} by the {agent}",
        ]
        if rng.integers(2):
            texts.reverse()
        label = "same" if same else "opposite"
        yield f"pair {number}", {"first": texts[0], "second": texts[1], "label": label}
