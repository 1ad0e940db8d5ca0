"""Texts as token numbers, and back: bytes, characters, or byte pairs.

In all of them 0 fills up and stands for nothing, and 1 stands for an empty text (and for a character that training lacked).
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
MERGES = 4096  # the vocabulary of byte pairs, unless one is given


class Tokenizer(ABC):
    """Text -> token numbers -> text.

    vocab    kinds of tokens, 0 among them
    unit     what `widths` counts: "byte" or "character"
    dtype    the smallest kind of number that holds a token
    """

    level: str
    unit: str = "byte"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.dtype = np.min_scalar_type(vocab_size - 1)

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The tokens (n) of a text."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no whole character yet is U+FFFD."""

    @abstractmethod
    def widths(self) -> np.ndarray:
        """How many units each token stands for, (vocab)."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What `tokenizer_from_dict` needs, as JSON."""

    def silent(self) -> list[int]:
        """Tokens that stand for no text, and are never to be said."""
        return [0, EMPTY]


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8, each by one more than its value; byte 0 and an empty text share the number 1."""

    level = "byte"

    def __init__(self) -> None:
        super().__init__(257)

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int64) + 1

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(token - 1 for token in tokens if token).decode("utf-8", "replace")

    def widths(self) -> np.ndarray:
        """See `Tokenizer`."""
        return np.array([0] + [1] * 256)

    def facts(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return {"level": self.level}

    def silent(self) -> list[int]:
        """See `Tokenizer`: any byte may be said."""
        return [0]


class CharTokenizer(Tokenizer):
    """The characters that the training texts have, in the order of Unicode; all others are number 1, and show as U+FFFD."""

    level, unit = "char", "character"

    def __init__(self, characters: str) -> None:
        if len(set(characters)) != len(characters):
            raise ValueError("a character stands twice in the vocabulary")
        super().__init__(2 + len(characters))
        self.characters = characters
        self.table = np.full(CODEPOINTS, EMPTY, dtype=self.dtype)
        self.table[codepoints(characters)] = np.arange(2, self.vocab_size)

    @classmethod
    def of(cls, texts: Iterable[str]) -> CharTokenizer:
        """Those that occur in the texts."""
        seen = np.zeros(CODEPOINTS, dtype=bool)
        for text in texts:
            seen[codepoints(text)] = True
        return cls("".join(map(chr, np.flatnonzero(seen))))

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        return self.table[codepoints(text)].astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        letters = ["", "\N{REPLACEMENT CHARACTER}", *self.characters]
        return "".join(letters[token] for token in tokens)

    def widths(self) -> np.ndarray:
        """See `Tokenizer`."""
        return np.array([0] + [1] * (self.vocab_size - 1))

    def facts(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return {"level": self.level, "characters": self.characters}


class BPETokenizer(Tokenizer):
    """Byte pairs that were merged where they are frequent (Sennrich et al. 2016, arXiv 1508.07909; on bytes as in GPT-2), by
    the package `tokenizers`.  Its numbers are moved up by two."""

    level = "bpe"

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(2 + tokenizer.get_vocab_size())
        self.tokenizer = tokenizer

    @classmethod
    def of(cls, texts: Callable[[], Iterable[str]], vocab_size: int = MERGES) -> BPETokenizer:
        """Learned from the texts: 256 bytes, and merges until there are `vocab` kinds of tokens.  What was learned from the
        same texts before is taken from the cache."""
        check_int(258, vocab_size=vocab_size)
        t = _tokenizers()
        name = f"bpe-{digest(texts(), f'{vocab_size} {t.__version__}')}.json"
        made = read_or_create(name, lambda: cls._learned(t, texts(), vocab_size).to_str())
        return cls(t.Tokenizer.from_str(made))

    @staticmethod
    def _learned(t: Any, texts: Iterable[str], vocab_size: int) -> Any:
        made = t.Tokenizer(t.models.BPE())
        made.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = t.decoders.ByteLevel()
        alphabet = t.pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            texts,
            t.trainers.BpeTrainer(
                vocab_size=vocab_size - 2, initial_alphabet=sorted(alphabet), show_progress=False
            ),
        )
        return made

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int64) + 2

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return str(self.tokenizer.decode([token - 2 for token in tokens if token > EMPTY]))

    def widths(self) -> np.ndarray:
        """See `Tokenizer`: a letter of the byte alphabet is a byte."""
        words = {number: word for word, number in self.tokenizer.get_vocab().items()}
        return np.array([0, 1] + [len(words[number]) for number in range(self.vocab_size - 2)])

    def facts(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return {"level": self.level, "tokenizer": self.tokenizer.to_str()}


def digest(texts: Iterable[str], about: str) -> str:
    """A name for texts, and for what is made of them."""
    found = hashlib.sha256(about.encode())
    for text in texts:
        found.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    return found.hexdigest()[:32]


def codepoints(text: str) -> np.ndarray:
    """The numbers of the characters of a text in Unicode, (n)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "level 'bpe' needs the package tokenizers: pip install regard[text]"
        ) from None
    return tokenizers


TOKENIZERS = ("byte", "char", "bpe")


def train_tokenizer(
    level: str, texts: Callable[[], Iterable[str]], vocab_size: int | None = None
) -> Tokenizer:
    """The codec of a level, for the training texts that each call walks through; only byte pairs take a `vocab`."""
    if level not in TOKENIZERS:
        raise ValueError(f"no level {level!r}: {did_you_mean(str(level), TOKENIZERS)}")
    if vocab_size is not None and level != BPETokenizer.level:
        raise ValueError(f"vocab is for level 'bpe': at level {level!r} the text decides it")
    if level == ByteTokenizer.level:
        return ByteTokenizer()
    return (
        CharTokenizer.of(texts())
        if level == CharTokenizer.level
        else BPETokenizer.of(texts, MERGES if vocab_size is None else vocab_size)
    )


def tokenizer_from_dict(facts: dict[str, Any]) -> Tokenizer:
    """The codec that gave these facts."""
    makers: dict[str, Callable[[], Tokenizer]] = {
        ByteTokenizer.level: ByteTokenizer,
        CharTokenizer.level: lambda: CharTokenizer(facts["characters"]),
        BPETokenizer.level: lambda: BPETokenizer(
            _tokenizers().Tokenizer.from_str(facts["tokenizer"])
        ),
    }
    try:
        return makers[facts["level"]]()
    except ImportError:
        raise
    except Exception as error:  # the package tokenizers raises nothing narrower
        raise ValueError(f"these facts make no codec: {error!r}") from None


class TextProcessor:
    """How a task reads texts, and what its answers are called: all that is needed to use a trained model without the data.

    length   the most tokens of a text; the rest of it is not read
    labels   of the classes, in their order; none where tokens are what is told
    """

    def __init__(self, codec: Tokenizer, length: int, labels: Sequence[str] = ()) -> None:
        check_int(1, length=length)
        self.codec, self.length, self.labels = codec, length, tuple(labels)

    def encode(self, text: str) -> np.ndarray:
        """The first tokens of a text, at least one."""
        tokens = self.codec.encode(text)[: self.length]
        return tokens if len(tokens) else np.array([EMPTY], dtype=np.int64)

    def decode(self, number: int) -> str:
        """What a class is called."""
        return self.labels[number]

    def facts(self) -> dict[str, Any]:
        """What `processor_from_dict` needs, as JSON."""
        return {"codec": self.codec.facts(), "length": self.length, "labels": list(self.labels)}


def processor_from_dict(facts: dict[str, Any]) -> TextProcessor:
    """The reading that gave these facts."""
    try:
        return TextProcessor(
            tokenizer_from_dict(facts["codec"]), facts["length"], list(map(str, facts["labels"]))
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"these facts are of no task that reads texts: {error!r}") from None
