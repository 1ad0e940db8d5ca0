"""Language modelling on a text of the user's own, or on a small language whose entropy is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from regard.errors import check_int
from regard.tasks.base import SPLITS, Example, Task, example_rng, to_int64
from regard.tasks.corpus import encode_corpus, iter_texts, load_corpus
from regard.tasks.files import is_utf8
from regard.tasks.grammar import entropy_per_character, text as sample
from regard.tasks.tokenizers import ByteTokenizer, TextProcessor, train_tokenizer

ENDLESS = 1 << 40
SENTENCES = {
    "train": 4000,
    "valid": 400,
    "test": 400,
}  # of the built-in language: about 45 characters each


class LanguageModeling(Task):
    """At each token, the next one.

    data      a text file or a folder of them, also .xz or .gz; with `text`, rows (CSV, JSON, Parquet, hf:name).  None: the
              language of `regard.tasks.grammar`
    level     tokens are "char", "byte" or "bpe": byte pairs, learned from the training split, `vocab` kinds of tokens
    encoding  of the files; at level "byte" UTF-8 is not checked, so that anything can be read

    Splits are files named train, valid and test; those that are missing are cut from the end of the training text, 5 % each.
    A training example stands anywhere in its split.  The windows of the other splits lie side by side, and each token but the
    first is foretold once; what stands before its window is not seen, so that a longer `length` sees more.

    The metric is in bits for each byte of UTF-8, at level "char" for each character.  So bytes and byte pairs compare as they
    are, and characters do where the text is ASCII.

    best      the metric that no model can beat, where it is known: for the built-in language
    """

    output = "token"
    causal = True
    metric = "bits"
    is_language_model = True

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        level: str = "char",
        length: int = 256,
        vocab_size: int | None = None,
        text: str | None = None,
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_int(0, seed=seed)
        if data is None and (text is not None or encoding != "utf-8"):
            raise ValueError("text and encoding tell how to read data: give data too")
        raw = level == ByteTokenizer.level and is_utf8(encoding)
        found = (
            built_in(seed)
            if data is None
            else load_corpus(data, text=text, encoding=encoding, raw=raw)
        )
        where = {split: f"{data or 'the sample'} ({split})" for split in SPLITS}
        codec = train_tokenizer(
            level, lambda: iter_texts(found["train"], where["train"]), vocab_size
        )
        super().__init__(vocab_size=codec.vocab_size, classes=codec.vocab_size, length=length)
        self.seed, self.processor, self.shift = (
            seed,
            TextProcessor(codec, length),
            int(isinstance(codec, ByteTokenizer)),
        )
        self.widths = torch.as_tensor(codec.widths())
        self.streams = {split: encode_corpus(found[split], codec, where[split]) for split in SPLITS}
        self.best = entropy_per_character() if data is None and level != "bpe" else None
        self._check()

    def _check(self) -> None:
        for split, least in {"train": self.length + 1, "valid": 2, "test": 2}.items():
            if len(self.streams[split]) < least:
                raise ValueError(
                    f"the {split} split has {len(self.streams[split])} tokens, and {least} are the least"
                )

    def size(self, split: str) -> int:
        """Windows; for training, endless."""
        return ENDLESS if split == "train" else -(-(len(self.streams[split]) - 1) // self.length)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        stream = self.streams[split]
        if not 0 <= index < self.size(split):
            raise IndexError(
                f"the {split} split has {self.size(split)} examples, and {index} is not among them"
            )
        at = index * self.length
        if split == "train":
            at = int(example_rng(self.seed, split, index).integers(0, len(stream) - self.length))
        window = stream[at : at + self.length + 1].astype(np.int64) + self.shift
        return Example(to_int64(window[:-1]), to_int64(window[1:]))

    def show(self, example: Example) -> str:
        """The text, and behind it the last token to be foretold."""
        assert self.processor is not None
        codec = self.processor.codec
        return f"{codec.decode(example.tokens.tolist())} → {codec.decode(example.target[-1:].tolist())!r}"


def built_in(seed: int) -> dict[str, np.ndarray]:
    """The bytes of the built-in language, each split drawn for itself."""
    drawn = (
        (split, sample(example_rng(seed, split, 0), count)) for split, count in SENTENCES.items()
    )
    return {split: np.frombuffer(text.encode(), np.uint8) for split, text in drawn}
