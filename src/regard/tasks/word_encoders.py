"""Words as tokens of a model: word pieces of a tokenizer, or one token of features per word."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from regard.models.config import FeatureInput, InputConfig, TokenInput
from regard.tasks.tokenizers import (
    RUN_PREFIX,
    TOKENIZERS,
    Tokenizer,
    saved_tokenizer_of_run,
    tokenizer_from_dict,
    train_tokenizer,
)

WORD = re.compile(r"[@#]?\w+(?:[-'’.]\w+)*|[^\w\s]")  # of a text that is not yet in words
SPACE = re.compile(r"\s")
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"  # for a space inside a word
UNKNOWN_WORD = "\N{REPLACEMENT CHARACTER}"
FEATURES = "features"
WORD_ENCODERS = (FEATURES, *TOKENIZERS)
AFFIX_LENGTHS = (1, 2, 3, 4)
MIN_COUNT = 2  # a feature of a single training word is treated as unknown
LONG_RUN = re.compile(r"(.)\1{3,}")  # of equal characters of a shape


class SplitText(NamedTuple):
    """A text, and the start and end of each word in it."""

    text: str
    spans: list[tuple[int, int]]

    @property
    def words(self) -> list[str]:
        """The words."""
        return [self.text[start:end] for start, end in self.spans]


def split_text(text: str) -> SplitText:
    """Split a text into words and punctuation marks."""
    return SplitText(text, [found.span() for found in WORD.finditer(text)])


def join_words(words: Sequence[str]) -> SplitText:
    """Words with a space between them."""
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    spans = [(int(end) - len(word), int(end)) for word, end in zip(words, ends, strict=True)]
    return SplitText(" ".join(words), spans)


class WordEncoder(ABC):
    """Maps words to tokens.

    Attributes:
        rows: Number of ids of a token: an input x is (n) for 1, else (rows, n).
        vocab_size: Number of different ids.
    """

    rows: int
    vocab_size: int

    @property
    @abstractmethod
    def input(self) -> InputConfig:
        """The input of a model for these tokens."""

    @abstractmethod
    def encode(self, word: str) -> np.ndarray:
        """The tokens (p, rows) of a word, at least one."""

    @abstractmethod
    def starts(self, x: Tensor) -> list[int]:
        """The places of the first tokens of words, in the input of a sentence."""

    @abstractmethod
    def decode(self, x: Tensor) -> list[str]:
        """The words of the input of a sentence, as far as the tokens tell them."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON for `word_encoder_from_dict`."""


class WordPieces(WordEncoder):
    """The tokens of a tokenizer; every word is encoded with a space before it, which shows where
    words start."""

    rows = 1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        texts = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
        self.starts_word = np.array([text.startswith(" ") for text in texts])
        if not self.starts_word.any():
            raise ValueError(
                f"The {tokenizer.name} tokenizer has no token that shows where words start: use "
                "tokenizer=features, byte or bpe, or a run with such a tokenizer."
            )

    @property
    def input(self) -> InputConfig:
        """See `WordEncoder`."""
        return TokenInput(vocab_size=self.vocab_size)

    def encode(self, word: str) -> np.ndarray:
        """See `WordEncoder`."""
        return self.tokenizer.encode(" " + SPACE.sub(NO_BREAK_SPACE, word))[:, None]

    def starts(self, x: Tensor) -> list[int]:
        """See `WordEncoder`."""
        return np.flatnonzero(self.starts_word[x.cpu().numpy()]).tolist()

    def decode(self, x: Tensor) -> list[str]:
        """See `WordEncoder`."""
        starts = self.starts(x)
        pieces = np.split(x.cpu().numpy(), starts[1:])
        return [self.tokenizer.decode(each.tolist())[1:] for each in pieces]

    def to_dict(self) -> dict[str, Any]:
        """See `WordEncoder`."""
        return self.tokenizer.to_dict()


class WordFeatures(WordEncoder):
    """One token per word, with the ids of its features; see `word_features`.

    Args:
        features: The known features; feature i has id i + 1, all others have id 0.
    """

    def __init__(self, features: Sequence[str]) -> None:
        self.features, self.rows = tuple(features), len(word_features(""))
        self.ids = {feature: number for number, feature in enumerate(features, 1)}
        self.vocab_size = 1 + len(self.features)

    @classmethod
    def train(cls, words: Iterable[str]) -> WordFeatures:
        """The features of at least two of the training words."""
        counts = Counter(feature for word in words for feature in word_features(word))
        return cls(sorted(each for each, count in counts.items() if count >= MIN_COUNT))

    @property
    def input(self) -> InputConfig:
        """See `WordEncoder`."""
        return FeatureInput(num_features=self.vocab_size, features_per_token=self.rows)

    def encode(self, word: str) -> np.ndarray:
        """See `WordEncoder`."""
        return np.array([[self.ids.get(feature, 0) for feature in word_features(word)]])

    def starts(self, x: Tensor) -> list[int]:
        """See `WordEncoder`: every token is a word."""
        return list(range(x.shape[-1]))

    def decode(self, x: Tensor) -> list[str]:
        """See `WordEncoder`: known words in lower case."""
        names = ["", *self.features]
        return [names[i].removeprefix("word=") or UNKNOWN_WORD for i in x[0].tolist()]

    def to_dict(self) -> dict[str, Any]:
        """See `WordEncoder`."""
        return {"type": FEATURES, "features": list(self.features)}


def word_features(word: str) -> list[str]:
    """The features of a word: itself in lower case, its shape, its prefixes and suffixes."""
    lower = word.lower()
    prefixes = [f"prefix{n}={lower[:n]}" for n in AFFIX_LENGTHS]
    suffixes = [f"suffix{n}={lower[-n:]}" for n in AFFIX_LENGTHS]
    return [f"word={lower}", f"shape={word_shape(word)}", *prefixes, *suffixes]


def word_shape(word: str) -> str:
    """Letters as X and x, digits as 0, at most three equal in a row: "iPhone12" -> "xXxxx00"."""
    kinds = (
        "X" if c.isupper() else "x" if c.isalpha() else "0" if c.isdigit() else c for c in word
    )
    return LONG_RUN.sub(r"\1\1\1", "".join(kinds))


def train_word_encoder(name: str, words: Callable[[], Iterable[Sequence[str]]]) -> WordEncoder:
    """Train a word encoder by name.

    Args:
        name: "features", a tokenizer ("byte", "char", "bpe"), or "run:FOLDER" for that of a run.
        words: Returns an iterator over the words of each training sentence.
    """
    if isinstance(name, str) and name.startswith(RUN_PREFIX):
        return word_encoder_from_dict(saved_tokenizer_of_run(Path(name.removeprefix(RUN_PREFIX))))
    if name == FEATURES:
        return WordFeatures.train(word for sentence in words() for word in sentence)
    texts = lambda: (" " + " ".join(sentence) for sentence in words())  # noqa: E731
    return WordPieces(train_tokenizer(name, texts, choices=WORD_ENCODERS))


def word_encoder_from_dict(content: Mapping[str, Any]) -> WordEncoder:
    """The word encoder that `WordEncoder.to_dict` described."""
    if content.get("type") == FEATURES:
        return WordFeatures(list(map(str, content["features"])))
    return WordPieces(tokenizer_from_dict(dict(content)))


# ---------------------------------------------------------------------------------------- windows
class Window(NamedTuple):
    """Words start .. end - 1 are read together; those from first to last - 1 are labelled."""

    start: int
    end: int
    first: int
    last: int


def split_windows(
    sizes: Sequence[int], length: int, can_cut: Callable[[int], bool] = lambda place: True
) -> list[Window]:
    """Windows over words of `sizes` tokens, which have at most `length` tokens each.

    A quarter of a window is read again in the next. Each word is labelled in one window: the words
    that both read are divided near their middle, where `can_cut` allows it, so that both windows
    read what comes before and after a word.
    """
    ends = np.concatenate(([0], np.cumsum(np.minimum(sizes, length))))
    windows: list[Window] = []
    start = first = 0
    while True:
        end = int(np.searchsorted(ends, ends[start] + length, side="right")) - 1
        if end >= len(sizes):
            return [*windows, Window(start, len(sizes), first, len(sizes))]
        following = int(np.searchsorted(ends, ends[end] - length // 4))
        following = min(max(following, start + 1), end)
        middle = (following + end) // 2
        cuts = [place for place in range(max(following, first + 1), end + 1) if can_cut(place)]
        cut = min(cuts, key=lambda place: abs(place - middle), default=max(middle, first))
        if cut > first:
            windows.append(Window(start, end, first, cut))
        start, first = following, cut
