"""Texts byte by byte: which kind is it?"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from regard.errors import check_int, did_you_mean
from regard.tasks.base import SPLITS, Example
from regard.tasks.dataset_files import BUILT_IN, read_labelled_texts, resolve_dataset, split_files
from regard.tasks.example_source import (
    ExampleSource,
    GeneratedExamples,
    SourceTask,
    StoredExamples,
    check_generated_only,
)
from regard.tasks.synthetic_reviews import SHORTEST, review

BYTES = 256
KNOWN = {"imdb": "imdb"}
ENDINGS = (".jsonl",)
HELD = 10  # one in so many is kept for validation, and for a test, where there are none

TextRows = list[tuple[str, str]]  # texts and labels


class ByteTextClassification(SourceTask):
    """A text as a sequence of its bytes: which of the classes (as in Long Range Arena, Tay et al. 2020, arXiv 2011.04006, whose
    texts are those of IMDb, Maas et al. 2011).

    length   bytes that are read of a text: what comes after them is cut off
    data     "built-in": made-up reviews, see `regard.tasks.synthetic_reviews`; "imdb", in the folder that REGARD_DATA names; or a file of
             JSON lines with "text" and "label", or a folder of them with names that begin with train, valid and test; .gz and
             .xz are unpacked.  Where there is no validation split a tenth of the training texts is held out for it.
    seed     of what is drawn, or of which texts are held out
    """

    def __init__(
        self, length: int = 512, *, data: str = BUILT_IN, seed: int = 0, examples: int | None = None
    ) -> None:
        check_int(1, length=length)
        self.data = data
        self.names: tuple[str, ...] = ("bad", "good")
        source: ExampleSource = GeneratedExamples(self.draw, seed=seed, examples=examples)
        if data != BUILT_IN:
            check_generated_only(data, examples=examples)
            self.names, source = listed(splits_of(resolve_dataset(data, KNOWN), seed), length)
        elif length < SHORTEST:
            raise ValueError(
                f"a built-in review has at least {SHORTEST} bytes: length={length} is too short"
            )
        super().__init__(source, vocab_size=1 + BYTES, classes=len(self.names), length=length)

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, int]:
        """The bytes of a built-in review, and its class."""
        text, label = review(random, self.length)
        return as_bytes(text, self.length), label

    def show(self, example: Example) -> str:
        """The text, and its class."""
        said = "a built-in review, made up" if self.data == BUILT_IN else f"a text of {self.data}"
        return f"{wrapped(example.tokens.numpy())}\n{said}: {self.names[int(example.target)]}"


def as_bytes(text: str, length: int) -> np.ndarray:
    """The first bytes of a text as tokens 1..256; 0 fills up."""
    return (
        np.frombuffer(text[:length].encode("utf-8", "surrogatepass")[:length], np.uint8).astype(
            np.int64
        )
        + 1
    )


def wrapped(tokens: np.ndarray) -> str:
    """Tokens as text, in lines; what is no whole character shows as a sign for that."""
    text = bytes((tokens[tokens > 0] - 1).tolist()).decode("utf-8", "replace")
    return "\n".join(textwrap.wrap(text, 100))


# ---------------------------------------------------------------------------------------------- real texts
def splits_of(path: Path, seed: int) -> dict[str, TextRows]:
    """The rows of each split: as the files have them, or else held out at random."""
    if path.is_file():
        return held_out({"train": read_labelled_texts(path)}, seed)
    files = split_files(path, ENDINGS)
    if "train" not in files:
        names = sorted(file.name for file in path.iterdir())
        raise ValueError(
            f"{path} has no train.jsonl, nor .gz or .xz: {did_you_mean('train.jsonl', names) if names else 'it is empty'}"
        )
    return held_out({split: read_labelled_texts(file) for split, file in files.items()}, seed)


def held_out(splits: dict[str, TextRows], seed: int) -> dict[str, TextRows]:
    """A tenth of the training rows for each split that is missing."""
    missing = [split for split in SPLITS if split not in splits]
    rows = splits["train"]
    share = max(1, len(rows) // HELD)
    if len(rows) <= share * len(missing):
        raise ValueError(
            f"{len(rows)} texts are too few to hold some out for {' and '.join(missing)}"
        )
    order = (
        np.random.default_rng(seed).permutation(len(rows)).tolist() if missing else range(len(rows))
    )
    parts = {split: order[i * share : (i + 1) * share] for i, split in enumerate(missing)} | {
        "train": order[len(missing) * share :]
    }
    return splits | {split: [rows[i] for i in part] for split, part in parts.items()}


def listed(splits: dict[str, TextRows], length: int) -> tuple[tuple[str, ...], ExampleSource]:
    """The names of the classes, those of the training texts in order, and the examples."""
    names = tuple(sorted({label for _, label in splits["train"]}))
    for split, rows in splits.items():
        strange = {label for _, label in rows} - set(names)
        if strange:
            raise ValueError(
                f"the split {split!r} has the label {min(strange)!r}, which no training text has"
            )
    number = {name: i for i, name in enumerate(names)}

    def at(split: str, index: int) -> tuple[np.ndarray, int]:
        text, label = splits[split][index]
        return as_bytes(text, length), number[label]

    return names, StoredExamples({split: len(rows) for split, rows in splits.items()}, at)
