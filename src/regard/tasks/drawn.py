"""Tasks whose examples are drawn, each by its own number, and have one target for the whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from regard.errors import check_choice, check_whole
from regard.tasks.base import SPLITS, Example, Task, as_tokens, numbers
from regard.tasks.probes import SIZES

CHUNK = 4096  # random numbers drawn at once


class Drawn(Task):
    """A task that can draw as many examples as are asked for.

    examples   how many there are to train on; None: no end of them, so that training never sees one twice
    """

    def __init__(self, *, vocab: int, classes: int, length: int, seed: int, examples: int | None = None) -> None:
        super().__init__(vocab=vocab, classes=classes, length=length)
        check_whole(0, seed=seed)
        if examples is not None:
            check_whole(1, examples=examples)
        self.seed, self.sizes = seed, SIZES | ({} if examples is None else {"train": examples})

    def size(self, split: str) -> int:
        """Endless for training, unless it was said how many."""
        check_choice("split", split, SPLITS)
        return self.sizes[split]

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        tokens, target = self.draw(numbers(self.seed, split, index))
        return Example(as_tokens(tokens), as_tokens(np.asarray(target)))

    @abstractmethod
    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, int]:
        """Tokens (n), or (2 n) for a pair, and the target."""


def stream(random: np.random.Generator) -> Iterator[float]:
    """Numbers in [0, 1) one by one: drawn by the thousand, since a call for each would take longer than all the rest."""
    while True:
        yield from random.random(CHUNK).tolist()
