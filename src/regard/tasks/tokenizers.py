"""Tokenizers for texts: bytes, characters, words, or byte pairs.

In all of them token 0 is padding, and token 1 stands for an empty text (and, for characters, for
characters that are not in the vocabulary).
"""

from __future__ import annotations

import hashlib
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.disk_cache import read_or_create
from regard.errors import check_int, did_you_mean
from regard.json_files import read_json
from regard.tasks.files import CHUNK

EMPTY = 1
CODEPOINTS = 0x110000
BPE_VOCAB_SIZE = 4096
LONG_WORD = re.compile(r"(\S{1000})")
TOKENIZERS = ("byte", "char", "bpe")
RUN_PREFIX = "run:"  # before the folder of a trained run, to take its tokenizer
AUTO = "auto"  # words or bytes, by the training texts
CLASSIFIER_TOKENIZERS = (AUTO, "word", *TOKENIZERS)
WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
WORD_VOCAB_SIZE = 16_384
MIN_COUNT = 2  # a word that occurs once cannot be learned
UNKNOWN_BUCKETS = 256  # tokens for all words that are not in the vocabulary
AUTO_CHARACTERS = 1_000_000  # of the training texts, by which words or bytes are chosen
MAX_WORD_LENGTH = 16.0  # mean letters of a word of any language that puts spaces between words
MIN_KNOWN = 0.5  # share of the words that occur at least MIN_COUNT times


class Tokenizer(ABC):
    """Converts texts to tokens and back.

    Attributes:
        name: "byte", "char", "word" or "bpe".
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


class WordTokenizer(Tokenizer):
    """Lower-cased words and punctuation marks; the most frequent of the training texts.

    Any other word is one of a few tokens, by a hash of the word, and is decoded as U+FFFD. White
    space and case are not kept: for classification, not for generation.

    Args:
        words: The vocabulary; word i is token 2 + i.
        buckets: Number of tokens for other words.
    """

    name = "word"

    def __init__(self, words: Sequence[str], buckets: int = UNKNOWN_BUCKETS) -> None:
        check_int(1, buckets=buckets)
        if len(set(words)) != len(words):
            raise ValueError("A word occurs twice in the vocabulary.")
        super().__init__(2 + len(words) + buckets)
        self.words, self.buckets = tuple(words), buckets
        self.ids = {word: number for number, word in enumerate(words, start=2)}

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = WORD_VOCAB_SIZE) -> WordTokenizer:
        """A tokenizer with the most frequent words that occur more than once."""
        check_int(3 + UNKNOWN_BUCKETS, vocab_size=vocab_size)
        counts = Counter(word for text in texts for word in split_words(text))
        frequent = [word for word, count in counts.items() if count >= MIN_COUNT]
        frequent.sort(key=lambda word: (-counts[word], word))
        return cls(frequent[: vocab_size - 2 - UNKNOWN_BUCKETS])

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        first = 2 + len(self.words)
        tokens = []
        for word in split_words(text):
            token = self.ids.get(word)
            if token is None:
                token = first + zlib.crc32(word.encode("utf-8", "surrogatepass")) % self.buckets
            tokens.append(token)
        return np.array(tokens, dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`: words with spaces between them, but not before punctuation."""
        unknown = ["\N{REPLACEMENT CHARACTER}"] * self.buckets
        known = ["", "", *self.words, *unknown]
        words = [known[token] for token in tokens if token > EMPTY]
        return re.sub(r" ([.,;:!?)\]}])", r"\1", " ".join(words))

    def token_units(self) -> np.ndarray:
        """See `Tokenizer`; an unknown word has one."""
        sizes = [len(word.encode("utf-8", "surrogatepass")) for word in self.words]
        return np.array([0, 0, *sizes] + [1] * self.buckets)

    def to_dict(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return {"type": self.name, "words": list(self.words), "buckets": self.buckets}

    def special_tokens(self) -> list[int]:
        """See `Tokenizer`; unknown words are not generated."""
        return [0, EMPTY, *range(2 + len(self.words), self.vocab_size)]


def split_words(text: str) -> list[str]:
    """The lower-cased words and punctuation marks of a text."""
    return WORD.findall(text.lower())


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
        ids = self.tokenizer.encode(replace_surrogates(text)).ids
        return np.array(ids, dtype=np.int64) + 2

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
    # merging pairs in a "word" of a million characters would take minutes
    short = (LONG_WORD.sub(r"\1 ", replace_surrogates(text)) for text in texts)
    tokenizer.train_from_iterator(short, trainer)
    return str(tokenizer.to_str())


def replace_surrogates(text: str) -> str:
    """The text with "?" for halves of surrogate pairs, which have no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


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
    name: str,
    texts: Callable[[], Iterable[str]],
    vocab_size: int | None = None,
    choices: Sequence[str] = TOKENIZERS,
) -> Tokenizer:
    """Train a tokenizer by name.

    Args:
        name: One of `choices`, or "run:FOLDER" for the tokenizer of a trained run.
        texts: Returns an iterator over the training texts; may be called more than once.
        vocab_size: Number of tokens, for "bpe" only.
        choices: The names that are possible; "auto" is "word" or "byte", see `choose_tokenizer`.
    """
    if isinstance(name, str) and name.startswith(RUN_PREFIX):
        if vocab_size is not None:
            raise ValueError("vocab_size applies to tokenizer='bpe': that of a run has its own.")
        return tokenizer_of_run(Path(name.removeprefix(RUN_PREFIX)))
    if name not in choices:
        raise ValueError(f"No tokenizer {name!r}: {did_you_mean(str(name), choices)}")
    if name == AUTO:
        name = choose_tokenizer(texts())
    if name == "bpe":
        return BPETokenizer.train(texts, BPE_VOCAB_SIZE if vocab_size is None else vocab_size)
    if vocab_size is not None:
        raise ValueError(
            f"vocab_size applies to tokenizer='bpe': with {name!r} it follows from the text."
        )
    if name == "word":
        return WordTokenizer.train(texts())
    return ByteTokenizer() if name == "byte" else CharTokenizer.train(texts())


def unknown_notes(tokenizer: Tokenizer, splits: Mapping[str, np.ndarray]) -> list[str]:
    """Sentences about characters that are not in the vocabulary.

    Args:
        splits: The tokens of each split.
    """
    if tokenizer.unit != "character":
        return []
    notes = []
    for split, tokens in splits.items():
        chunks = (tokens[at : at + CHUNK] for at in range(0, len(tokens), CHUNK))
        if count := sum(int((chunk == EMPTY).sum()) for chunk in chunks):
            notes.append(
                f"{count:,} of {len(tokens):,} characters of the {split} split are not in the "
                "vocabulary: the model reads them as one unknown character."
            )
    return notes


def choose_tokenizer(texts: Iterable[str]) -> str:
    """Choose "word" for texts of words that occur again, with spaces between them, else "byte".

    Bytes are for texts without spaces (DNA, Chinese, base64), and for those of which most words
    occur once (identifiers, hashes). The first million characters decide.
    """
    counts: Counter[str] = Counter()
    letters = seen = 0
    for text in texts:
        words = split_words(text[:AUTO_CHARACTERS])
        counts.update(words)
        letters += sum(map(len, words))
        seen += len(text)
        if seen >= AUTO_CHARACTERS:
            break
    total = counts.total()
    known = sum(count for count in counts.values() if count >= MIN_COUNT)
    if not total or letters > MAX_WORD_LENGTH * total or known < MIN_KNOWN * total:
        return ByteTokenizer.name
    return WordTokenizer.name


def tokenizer_of_run(folder: Path) -> Tokenizer:
    """The tokenizer that a run was trained with."""
    content = saved_tokenizer_of_run(folder)
    if content["type"] == "features":
        raise ValueError(
            f"Run {folder} reads features of words, which no task on texts does: give tokenizer=..."
        )
    return tokenizer_from_dict(content)


def saved_tokenizer_of_run(folder: Path) -> dict[str, Any]:
    """What a run saved of its tokenizer."""
    path = folder / "task.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run: it has no {path.name}.")
    try:
        return dict(read_json(path)["processor"]["tokenizer"])
    except (KeyError, TypeError):
        raise ValueError(f"Run {folder} has no tokenizer: its task does not read texts.") from None


def tokenizer_from_dict(content: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_dict` described."""
    builders: dict[str, Callable[[], Tokenizer]] = {
        "byte": ByteTokenizer,
        "char": lambda: CharTokenizer(content["characters"]),
        "word": lambda: WordTokenizer(content["words"], content["buckets"]),
        "bpe": lambda: BPETokenizer(_import_tokenizers().Tokenizer.from_str(content["tokenizer"])),
    }
    try:
        return builders[content["type"]]()
    except ImportError:
        raise
    except Exception as error:  # the package tokenizers raises plain exceptions
        raise ValueError(f"Not a saved tokenizer: {error!r}") from None
