"""Tokenizers for texts: bytes, characters, or byte pairs.

In all of them token 0 is padding, and token 1 stands for an empty text (and, for characters, for
characters that are not in the vocabulary).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from regard.disk_cache import read_or_create
from regard.errors import check_int, did_you_mean

EMPTY = 1
CODEPOINTS = 0x110000
BPE_VOCAB_SIZE = 4096
TOKENIZERS = ("byte", "char", "bpe")


class Tokenizer(ABC):
    """Converts texts to tokens and back.

    Attributes:
        name: "byte", "char" or "bpe".
        vocab_size: Number of different tokens, including padding.
        unit: What `token_units` counts: "byte" or "character".
        dtype: The smallest integer type that holds a token.
    """

    name: str
    unit: str = "byte"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.dtype = np.min_scalar_type(vocab_size - 1)

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The tokens (n) of a text."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; incomplete characters become U+FFFD."""

    @abstractmethod
    def token_units(self) -> np.ndarray:
        """Number of bytes or characters of each token, (vocab_size)."""

    def to_dict(self) -> dict[str, Any]:
        """JSON for `tokenizer_from_dict`."""
        return {"type": self.name}

    def special_tokens(self) -> list[int]:
        """Tokens without text, which must not be generated."""
        return [0, EMPTY]


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8, plus one; byte 0 and an empty text share token 1."""

    name = "byte"

    def __init__(self) -> None:
        super().__init__(257)

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int64) + 1

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(token - 1 for token in tokens if token).decode("utf-8", "replace")

    def token_units(self) -> np.ndarray:
        """See `Tokenizer`."""
        return np.array([0] + [1] * 256)

    def special_tokens(self) -> list[int]:
        """See `Tokenizer`; any byte may be generated."""
        return [0]


class CharTokenizer(Tokenizer):
    """The characters of the training texts in Unicode order; others are token 1, U+FFFD."""

    name, unit = "char", "character"

    def __init__(self, characters: str) -> None:
        if len(set(characters)) != len(characters):
            raise ValueError("A character occurs twice in the vocabulary.")
        super().__init__(2 + len(characters))
        self.characters = characters
        self.table = np.full(CODEPOINTS, EMPTY, dtype=self.dtype)
        self.table[codepoints(characters)] = np.arange(2, self.vocab_size)

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharTokenizer:
        """A tokenizer with the characters that occur in the texts."""
        occurs = np.zeros(CODEPOINTS, dtype=bool)
        for text in texts:
            occurs[codepoints(text)] = True
        return cls("".join(map(chr, np.flatnonzero(occurs))))

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        return self.table[codepoints(text)].astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        letters = ["", "\N{REPLACEMENT CHARACTER}", *self.characters]
        return "".join(letters[token] for token in tokens)

    def token_units(self) -> np.ndarray:
        """See `Tokenizer`."""
        return np.array([0] + [1] * (self.vocab_size - 1))

    def to_dict(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return {"type": self.name, "characters": self.characters}


class BPETokenizer(Tokenizer):
    """Byte-pair encoding (Sennrich et al. 2016, arXiv 1508.07909) on bytes, as in GPT-2.

    Wraps a tokenizer of the package `tokenizers`, whose tokens are shifted by two.
    """

    name = "bpe"

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(2 + tokenizer.get_vocab_size())
        self.tokenizer = tokenizer

    @classmethod
    def train(
        cls, texts: Callable[[], Iterable[str]], vocab_size: int = BPE_VOCAB_SIZE
    ) -> BPETokenizer:
        """Learn merges from the texts until there are `vocab_size` tokens.

        The result is cached on disk under a hash of the texts.
        """
        check_int(258, vocab_size=vocab_size)
        t = _import_tokenizers()

        digest = hashlib.sha256(f"{vocab_size} {t.__version__}".encode())
        for text in texts():
            digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        saved = read_or_create(
            f"bpe-{digest.hexdigest()[:32]}.json", lambda: _learn_merges(texts(), vocab_size)
        )
        return cls(t.Tokenizer.from_str(saved))

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int64) + 2

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return str(self.tokenizer.decode([token - 2 for token in tokens if token > EMPTY]))

    def token_units(self) -> np.ndarray:
        """See `Tokenizer`; a letter of the byte alphabet is a byte."""
        words = {number: word for word, number in self.tokenizer.get_vocab().items()}
        return np.array([0, 1] + [len(words[number]) for number in range(self.vocab_size - 2)])

    def to_dict(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return {"type": self.name, "tokenizer": self.tokenizer.to_str()}


def _learn_merges(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE tokenizer; returns it as JSON."""
    t = _import_tokenizers()
    tokenizer = t.Tokenizer(t.models.BPE())
    tokenizer.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = t.decoders.ByteLevel()
    trainer = t.trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        initial_alphabet=sorted(t.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def codepoints(text: str) -> np.ndarray:
    """The Unicode code points (n) of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "tokenizer='bpe' requires the package tokenizers: pip install 'regard[text]'"
        ) from None
    return tokenizers


def train_tokenizer(
    name: str, texts: Callable[[], Iterable[str]], vocab_size: int | None = None
) -> Tokenizer:
    """Train a tokenizer by name.

    Args:
        name: "byte", "char" or "bpe".
        texts: Returns an iterator over the training texts; may be called more than once.
        vocab_size: Number of tokens, for "bpe" only.
    """
    if name not in TOKENIZERS:
        raise ValueError(f"No tokenizer {name!r}: {did_you_mean(str(name), TOKENIZERS)}")
    if name == "bpe":
        return BPETokenizer.train(texts, BPE_VOCAB_SIZE if vocab_size is None else vocab_size)
    if vocab_size is not None:
        raise ValueError(
            f"vocab_size applies to tokenizer='bpe': with {name!r} it follows from the text."
        )
    return ByteTokenizer() if name == "byte" else CharTokenizer.train(texts())


def tokenizer_from_dict(content: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_dict` described."""
    builders: dict[str, Callable[[], Tokenizer]] = {
        "byte": ByteTokenizer,
        "char": lambda: CharTokenizer(content["characters"]),
        "bpe": lambda: BPETokenizer(_import_tokenizers().Tokenizer.from_str(content["tokenizer"])),
    }
    try:
        return builders[content["type"]]()
    except ImportError:
        raise
    except Exception as error:  # the package tokenizers raises plain exceptions
        raise ValueError(f"Not a saved tokenizer: {error!r}") from None


class TextProcessor:
    """Turns texts into the inputs of a trained model, and predicted classes into labels.

    Args:
        tokenizer: Converts text to tokens.
        length: Maximum number of tokens; longer texts are truncated.
        labels: Names of the classes; empty for language models.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, labels: Sequence[str] = ()) -> None:
        check_int(1, length=length)
        self.tokenizer, self.length, self.labels = tokenizer, length, tuple(labels)

    def encode(self, text: str) -> np.ndarray:
        """The first tokens of a text, at least one."""
        tokens = self.tokenizer.encode(text)[: self.length]
        return tokens if len(tokens) else np.array([EMPTY], dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        """JSON for `processor_from_dict`."""
        tokenizer = self.tokenizer.to_dict()
        return {"tokenizer": tokenizer, "length": self.length, "labels": list(self.labels)}


def processor_from_dict(content: dict[str, Any]) -> TextProcessor:
    """The text processor that `TextProcessor.to_dict` described."""
    try:
        tokenizer = tokenizer_from_dict(content["tokenizer"])
        return TextProcessor(tokenizer, content["length"], list(map(str, content["labels"])))
    except (KeyError, TypeError) as error:
        raise ValueError(f"Not a saved text processor: {error!r}") from None
