"""Matching of two texts byte by byte, as in Long Range Arena."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from regard.errors import check_int
from regard.tasks.base import SPLITS, Example, with_prediction
from regard.tasks.byte_text import VOCAB_SIZE, encode_bytes, wrap_bytes
from regard.tasks.dataset_files import (
    BUILT_IN,
    HELD_OUT,
    find_split_files,
    hold_out,
    read_bytes,
    resolve_dataset,
)
from regard.tasks.example_source import Draw, GeneratedExamples, SourceTask
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered
from regard.tasks.synthetic_papers import MIN_BYTES, generate_papers

DATASETS = {"wikitext-2": "wikitext-2"}
TITLE = re.compile(
    rb"^ = [^=\n]+ = *$", re.MULTILINE
)  # of a WikiText article; sections have " = = "
PASSAGES = 8  # in an article, when a text without titles is cut into even pieces


class TextRetrieval(SourceTask):
    """Predict whether two texts, read as bytes, belong together (Long Range Arena, Tay et al. 2020,
    arXiv 2011.04006, where one paper cites the other or not).

    Args:
        length: Number of bytes of each text.
        data: "built-in": generated papers that have citations in common or not, see
            `regard.tasks.synthetic_papers`. Otherwise two passages, without overlap, of one article
            or of two: "wikitext-2" in the folder REGARD_DATA, a text file, a folder of .txt files
            named train, valid and test, or a folder with one file per article; also .gz or .xz.
            Articles start at WikiText titles; a text without titles is cut into even pieces.
        seed: Seed of the examples and of the splits.
        examples: Size of the training split. None: endless.
    """

    output = "pair"

    def __init__(
        self,
        length: int = 384,
        *,
        data: str = BUILT_IN,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(1, length=length)
        if data == BUILT_IN and length < MIN_BYTES:
            raise ValueError(
                f"Built-in papers have at least {MIN_BYTES} bytes: length={length} is too short."
            )
        self.data = data
        draw: Draw | dict[str, Draw] = self.draw
        if data != BUILT_IN:
            articles = _load_articles(resolve_dataset(data, DATASETS), length, seed)
            draw = {split: _passage_drawer(own, length) for split, own in articles.items()}
        source = GeneratedExamples(draw, seed=seed, examples=examples)
        super().__init__(source, vocab_size=VOCAB_SIZE, classes=2, length=length)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Generate the bytes (2, n) of two papers, and whether they match."""
        *papers, match = generate_papers(rng, self.length)
        one, two = (encode_bytes(paper, self.length) for paper in papers)
        pair = np.zeros((2, max(len(one), len(two))), np.int64)
        pair[0, : len(one)], pair[1, : len(two)] = one, two
        return pair, match

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """Both texts, and whether they belong together."""
        one, two = (wrap_bytes(tokens) for tokens in example.inputs["x"].numpy())
        source, answers = f"passages of {self.data}", ("of two articles", "of one article")
        if self.data == BUILT_IN:
            source, answers = "generated papers", ("no common citations", "common citations")
        answer = answers[int(example.targets["labels"])]
        return with_prediction(f"{one}\n--\n{two}\n{source}: {answer}", prediction)


# --------------------------------------------------------------------------------------- real texts
def _passage_drawer(articles: list[bytes], length: int) -> Draw:
    def draw(rng: np.random.Generator) -> tuple[np.ndarray, int]:
        match = int(rng.integers(2))
        first, other = rng.permutation(len(articles))[:2]
        one, two = articles[first], articles[first if match else other]
        # from different halves, so that passages of the same article do not overlap
        start = int(rng.integers(len(one) // 2 - length + 1))
        second_start = int(rng.integers(len(two) // 2, len(two) - length + 1))
        passages = one[start : start + length], two[second_start : second_start + length]
        pair = np.stack([np.frombuffer(passage, np.uint8) for passage in passages])
        return pair[:: -1 if int(rng.integers(2)) else 1].astype(np.int64) + 1, match

    return draw


def _load_articles(path: Path, length: int, seed: int) -> dict[str, list[bytes]]:
    """The articles of each split that are long enough for two passages; none is in two splits."""
    if path.is_dir():
        files = find_split_files(path, ".txt")
        if set(files) == set(SPLITS):
            splits = {
                split: _split_articles(read_bytes(file), length) for split, file in files.items()
            }
        else:
            texts = [f for f in sorted(path.rglob("*")) if f.is_file() and ".txt" in f.suffixes]
            articles = [text for text in map(read_bytes, texts) if len(text) >= 2 * length]
            splits = _hold_out_articles(articles, seed)
    else:
        splits = _hold_out_articles(_split_articles(read_bytes(path), length), seed)
    if min(map(len, splits.values())) < 2:
        raise ValueError(
            f"{path} has too few articles for two passages of {length} bytes each: "
            "decrease length, or add text."
        )
    return splits


def _hold_out_articles(articles: list[bytes], seed: int) -> dict[str, list[bytes]]:
    return hold_out(articles, ("valid", "test"), max(2, len(articles) // HELD_OUT), seed)


def _split_articles(text: bytes, length: int) -> list[bytes]:
    """Split a text at its titles, or into even pieces; short articles are dropped."""
    starts = [title.start() for title in TITLE.finditer(text)]
    starts = starts or list(range(0, len(text), PASSAGES * length))
    ends = [*starts[1:], len(text)]
    articles = (text[start:end] for start, end in zip(starts, ends, strict=True))
    return [article for article in articles if len(article) >= 2 * length]
