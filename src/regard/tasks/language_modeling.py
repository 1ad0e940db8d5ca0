"""Language modeling on your own text, or on a small language whose entropy is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.errors import check_int
from regard.tasks.base import (
    SPLITS,
    Example,
    TokenTask,
    check_index,
    example_rng,
    token_example,
    with_prediction,
)
from regard.tasks.baselines import NGRAM, Baseline, NGramModel, spread_blocks
from regard.tasks.corpus import encode_corpus, iter_texts, load_corpus
from regard.tasks.files import is_utf8
from regard.tasks.grammar import entropy_per_character, generate_text
from regard.tasks.metrics import Bits, Perplexity
from regard.tasks.processors import Prediction, TextProcessor
from regard.tasks.rendering import Rendered
from regard.tasks.tokenizers import ByteTokenizer, train_tokenizer, unknown_notes

ENDLESS = 1 << 40
SENTENCES = {"train": 4000, "valid": 400, "test": 400}  # of about 45 characters


class LanguageModeling(TokenTask):
    """Predict the next token at every position.

    Splits are files named train, valid and test. Missing splits are cut from the end of the
    training text, 5 % each. A training example starts at a random position. The windows of the
    other splits do not overlap: each token except the first is predicted once, without the text
    before its window, so a longer `length` scores better.

    The metric is bits per byte of UTF-8, or bits per character for tokenizer="char". "byte" and
    "bpe" are comparable; so is "char" if the text is ASCII.

    Args:
        data: A text file or a folder of them, also .xz or .gz; with `text`, rows (CSV, JSON,
            Parquet, hf:name). None: the language of `regard.tasks.grammar`.
        tokenizer: "char", "byte", or "bpe" (byte pairs learned from the training split). "word" is
            for classification: it does not keep case and rare words.
        length: Number of tokens of an example.
        vocab_size: Number of tokens for "bpe".
        text: The column of the text, if the data is rows.
        encoding: Encoding of the files. With tokenizer="byte", UTF-8 is not checked, so that any
            file can be read.
        seed: Seed of the training windows and of the built-in language.

    Attributes:
        best: The best possible metric, known for the built-in language; otherwise None.
    """

    output = "token"
    causal = True
    is_language_model = True

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        tokenizer: str = "char",
        length: int = 256,
        vocab_size: int | None = None,
        text: str | None = None,
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_int(0, seed=seed)
        if data is None:
            if text is not None or encoding != "utf-8":
                raise ValueError("text and encoding describe the data: also give data.")
            corpus = {
                split: np.frombuffer(
                    generate_text(example_rng(seed, split, 0), count).encode(), np.uint8
                )
                for split, count in SENTENCES.items()
            }
        else:
            raw = tokenizer == ByteTokenizer.name and is_utf8(encoding)
            corpus = load_corpus(data, text=text, encoding=encoding, raw=raw)
        where = {split: f"{data or 'the built-in language'} ({split})" for split in SPLITS}
        trained = train_tokenizer(
            tokenizer,
            lambda: iter_texts(corpus["train"], where["train"]),
            vocab_size,
        )
        super().__init__(vocab_size=trained.vocab_size, classes=trained.vocab_size, length=length)
        self.seed, self.tokenizer = seed, trained
        self.processor = TextProcessor(trained, length)
        self.target_units = torch.as_tensor(trained.token_units())
        self.metrics = (Bits(trained.unit, self.target_units), Perplexity())
        self.streams = {s: encode_corpus(corpus[s], trained, where[s]) for s in SPLITS}
        self.offset = int(isinstance(trained, ByteTokenizer))  # tokens - stored values
        self.best = entropy_per_character() if data is None and tokenizer != "bpe" else None
        for split, minimum in (("train", length + 1), ("valid", 2), ("test", 2)):
            count = len(self.streams[split])
            if count < minimum:
                raise ValueError(
                    f"The {split} split has {count} tokens, but at least {minimum} are needed."
                )

    def size(self, split: str) -> int:
        """Number of windows; endless for training."""
        return ENDLESS if split == "train" else -(-(len(self.streams[split]) - 1) // self.length)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        check_index(split, index, self.size(split))
        stream, start = self.streams[split], index * self.length
        if split == "train":
            rng = example_rng(self.seed, split, index)
            start = int(rng.integers(0, len(stream) - self.length))
        window = stream[start : start + self.length + 1].astype(np.int64) + self.offset
        return token_example(window[:-1], window[1:])

    def notes(self) -> list[str]:
        """See `Task`."""
        return unknown_notes(self.tokenizer, self.streams)

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`."""
        return {**super().baselines(), NGRAM: self._ngram_score}

    def _ngram_score(self, test: Sequence[int]) -> torch.Tensor:
        """Statistics of `Bits` of n-grams, which see the same window as the models."""
        train = (spread_blocks(self.streams["train"]).astype(np.int64) + self.offset).tolist()
        model = NGramModel(train, self.vocab_size)
        statistics = []
        for index in test:
            example = self.example("test", index)
            tokens, target = example.inputs["x"].tolist(), example.targets["labels"].tolist()
            bits = 0.0
            for i, token in enumerate(target):
                context = tokens[max(0, i + 1 - model.order) : i + 1]
                bits -= math.log2(model.probability(context, token))
            statistics.append((bits, float(self.target_units[target].sum())))
        return torch.tensor(statistics, dtype=torch.float64)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> TextProcessor:
        """See `Task`."""
        return TextProcessor.from_dict(content)

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The text, and the last token to predict."""
        decode = self.tokenizer.decode
        text, last = example.inputs["x"].tolist(), example.targets["labels"][-1:].tolist()
        return with_prediction(f"{decode(text)} → {decode(last)!r}", prediction)
