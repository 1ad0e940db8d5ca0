"""Pairs of texts byte by byte: do they belong together?"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from regard.errors import check_int
from regard.tasks.base import SPLITS, Example
from regard.tasks.byte_text import BYTES, HELD, as_bytes, wrapped
from regard.tasks.dataset_files import BUILT_IN, read_bytes, resolve_dataset, split_files
from regard.tasks.example_source import Draw, GeneratedExamples, SourceTask
from regard.tasks.synthetic_papers import SHORTEST, papers

KNOWN = {"wikitext-2": "wikitext-2"}
ENDINGS = (".txt",)
TITLE = re.compile(
    rb"^ = [^=\n]+ = *$", re.MULTILINE
)  # of an article of WikiText; two signs are for its sections
PIECE = 8  # passages in a piece of a text without titles


class TextRetrieval(SourceTask):
    """Two texts, each a sequence of its bytes: class 1 if they belong together (as in Long Range Arena, Tay et al. 2020, arXiv
    2011.04006, whose texts are papers of which one cites the other or not).

    length   bytes of a text
    data     "built-in": made-up papers, which cite works in common or not, see `regard.tasks.synthetic_papers`; or real text, of which
             two passages that do not overlap are of one article or of two: "wikitext-2", in the folder that REGARD_DATA names,
             or a text file, or a folder of .txt files with names that begin with train, valid and test, or of one file an
             article.  .gz and .xz are unpacked.  Articles begin with WikiText's titles; a text without them is cut into
             even pieces.
    """

    output = "pair"

    def __init__(
        self, length: int = 384, *, data: str = BUILT_IN, seed: int = 0, examples: int | None = None
    ) -> None:
        check_int(1, length=length)
        if data == BUILT_IN and length < SHORTEST:
            raise ValueError(
                f"a built-in paper has at least {SHORTEST} bytes: length={length} is too short"
            )
        self.data = data
        draws = (
            self.draw
            if data == BUILT_IN
            else passages(articles_of(resolve_dataset(data, KNOWN), length, seed), length)
        )
        super().__init__(
            GeneratedExamples(draws, seed=seed, examples=examples),
            vocab_size=1 + BYTES,
            classes=2,
            length=length,
        )

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, int]:
        """The bytes (2 n) of two built-in papers, and whether they match."""
        one, two, match = papers(random, self.length)
        return as_pair(as_bytes(one, self.length), as_bytes(two, self.length)), match

    def show(self, example: Example) -> str:
        """Both texts, and whether they belong together."""
        one, two = (wrapped(tokens) for tokens in example.tokens.numpy())
        said, names = f"passages of {self.data}", ("of two articles", "of one article")
        if self.data == BUILT_IN:
            said, names = (
                "built-in papers, made up",
                ("no work is cited by both", "both cite the same works"),
            )
        return f"{one}\n--\n{two}\n{said}: {names[int(example.target)]}"


def as_pair(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Two sequences side by side, the shorter filled up with 0."""
    pair = np.zeros((2, max(len(one), len(two))), np.int64)
    pair[0, : len(one)], pair[1, : len(two)] = one, two
    return pair


# ---------------------------------------------------------------------------------------------- real texts
Articles = list[bytes]


def passages(articles: dict[str, Articles], length: int) -> dict[str, Draw]:
    """What draws a pair, for each split."""

    def of(mine: Articles) -> Draw:
        def draw(random: np.random.Generator) -> tuple[np.ndarray, int]:
            match = int(random.integers(2))
            one, other = random.permutation(len(mine))[:2]
            return _two(random, mine[one], mine[one if match else other], length), match

        return draw

    return {split: of(mine) for split, mine in articles.items()}


def _two(random: np.random.Generator, one: bytes, other: bytes, length: int) -> np.ndarray:
    """Passages from two halves, so that they do not overlap where the article is the same, in either order."""
    before, after = (
        int(random.integers(len(one) // 2 - length + 1)),
        int(random.integers(len(other) // 2, len(other) - length + 1)),
    )
    cut = [
        np.frombuffer(one[before : before + length], np.uint8),
        np.frombuffer(other[after : after + length], np.uint8),
    ]
    first = int(random.integers(2))
    return np.stack((cut[first], cut[1 - first])).astype(np.int64) + 1


def articles_of(path: Path, length: int, seed: int) -> dict[str, Articles]:
    """The articles of each split that are long enough for two passages."""
    if path.is_file():
        return held_out(cut(read_bytes(path), length), str(path), seed)
    files = split_files(path, ENDINGS)
    if set(files) == set(SPLITS):
        return {
            split: enough(cut(read_bytes(file), length), str(file)) for split, file in files.items()
        }
    each = [
        read_bytes(file)
        for file in sorted(path.rglob("*"))
        if file.is_file() and ".txt" in file.suffixes
    ]
    return held_out([text for text in each if len(text) >= 2 * length], str(path), seed)


def cut(text: bytes, length: int) -> Articles:
    """A text at its titles, or into even pieces if it has none."""
    starts = [title.start() for title in TITLE.finditer(text)] or list(
        range(0, len(text), PIECE * length)
    )
    found = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    return [article for article in found if len(article) >= 2 * length]


def held_out(articles: Articles, where: str, seed: int) -> dict[str, Articles]:
    """A tenth each, but two at least, for validation and test; no article is in two splits."""
    share = max(2, len(articles) // HELD)
    order = np.random.default_rng(seed).permutation(len(articles)).tolist()
    parts = {"valid": order[:share], "test": order[share : 2 * share], "train": order[2 * share :]}
    return {split: enough([articles[i] for i in part], where) for split, part in parts.items()}


def enough(articles: Articles, where: str) -> Articles:
    """The same, if there are two to tell apart."""
    if len(articles) < 2:
        raise ValueError(
            f"{where} has too few articles for two passages each: a shorter length, or more text, would do"
        )
    return articles
