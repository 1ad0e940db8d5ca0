"""Tasks with one target for the whole, whose examples are drawn, or taken from real data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from regard.errors import check_choice, check_int
from regard.tasks.base import SPLITS, Example, Task, example_rng, to_int64
from regard.tasks.probes import SIZES

CHUNK = 4096  # random numbers drawn at once

Draw = Callable[
    [np.random.Generator], tuple[np.ndarray, int]
]  # -> tokens (n), or (2 n) for a pair, and the target


class ExampleSource(ABC):
    """Where examples come from, by their number."""

    @abstractmethod
    def size(self, split: str) -> int:
        """How many there are."""

    @abstractmethod
    def example(self, split: str, index: int) -> Example:
        """One of them."""


class GeneratedExamples(ExampleSource):
    """Examples that are drawn, each with numbers of its own.

    examples   how many there are to train on; None: no end of them, so that training never sees one twice
    """

    def __init__(
        self, draws: Draw | Mapping[str, Draw], *, seed: int, examples: int | None = None
    ) -> None:
        check_int(0, seed=seed)
        if examples is not None:
            check_int(1, examples=examples)
        self.draws = draws if isinstance(draws, Mapping) else dict.fromkeys(SPLITS, draws)
        self.seed, self.sizes = seed, SIZES | ({} if examples is None else {"train": examples})

    def size(self, split: str) -> int:
        """See `Source`."""
        check_choice("split", split, SPLITS)
        return self.sizes[split]

    def example(self, split: str, index: int) -> Example:
        """See `Source`."""
        random = example_rng(self.seed, split, index)
        tokens, target = self.draws[split](random)
        return Example(to_int64(tokens), to_int64(np.asarray(target)))


class StoredExamples(ExampleSource):
    """Examples of real data: so many of each split, and a function for one of them.

    They come in an order that is shuffled once for all: files are often sorted by class, and an evaluation takes the first.
    """

    def __init__(
        self, sizes: Mapping[str, int], at: Callable[[str, int], tuple[np.ndarray, int]]
    ) -> None:
        self.sizes, self.at = sizes, at
        self.order = {
            split: np.random.default_rng(size).permutation(size) for split, size in sizes.items()
        }

    def size(self, split: str) -> int:
        """See `Source`."""
        check_choice("split", split, SPLITS)
        return self.sizes[split]

    def example(self, split: str, index: int) -> Example:
        """See `Source`."""
        if not 0 <= index < self.size(split):
            raise IndexError(
                f"the split {split!r} has {self.size(split)} examples, and number {index} is asked for"
            )
        tokens, target = self.at(split, int(self.order[split][index]))
        return Example(to_int64(tokens), to_int64(np.asarray(target)))


class SourceTask(Task):
    """A task whose examples come from a source."""

    def __init__(
        self, source: ExampleSource, *, vocab_size: int, classes: int, length: int
    ) -> None:
        super().__init__(vocab_size=vocab_size, classes=classes, length=length)
        self.source = source

    def size(self, split: str) -> int:
        """See `Task`."""
        return self.source.size(split)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        return self.source.example(split, index)


def check_generated_only(data: str, **given: object) -> None:
    """Arguments that say how to draw examples are not for real data; those that are None or 0 were not given."""
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{name}={value!r} is for what is drawn, and the data {data!r} are as they are: leave it out"
            )


def random_stream(random: np.random.Generator) -> Iterator[float]:
    """Numbers in [0, 1) one by one: drawn by the thousand, since a call for each would take longer than all the rest."""
    while True:
        yield from random.random(CHUNK).tolist()
