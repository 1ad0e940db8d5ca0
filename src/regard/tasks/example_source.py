"""Where the examples of a task come from: a generator, or stored data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from regard.errors import check_choice, check_int
from regard.tasks.base import SPLITS, Example, TokenTask, check_index, example_rng, token_example

SIZES = {"train": 1 << 40, "valid": 512, "test": 2048}  # training never sees an example twice
CHUNK = 4096  # random numbers per call of the generator

# random generator -> tokens (n), or (2, n) for a pair; and the target, a number or (n)
Draw = Callable[[np.random.Generator], tuple[np.ndarray, int | np.ndarray]]


class ExampleSource(ABC):
    """Numbered examples of three splits, of the given sizes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def size(self, split: str) -> int:
        """Number of examples in a split."""
        check_choice("split", split, SPLITS)
        return self.sizes[split]

    @abstractmethod
    def example(self, split: str, index: int) -> Example:
        """Example `index` of a split."""


class GeneratedExamples(ExampleSource):
    """Examples generated from a seed, the split and their index.

    Args:
        draw: The generator, or one for each split.
        examples: Size of the training split. None: endless, so that no example is seen twice.
    """

    def __init__(
        self, draw: Draw | Mapping[str, Draw], *, seed: int, examples: int | None = None
    ) -> None:
        check_int(0, seed=seed)
        if examples is not None:
            check_int(1, examples=examples)
        super().__init__(SIZES if examples is None else SIZES | {"train": examples})
        self.draws = draw if isinstance(draw, Mapping) else dict.fromkeys(SPLITS, draw)
        self.seed = seed

    def example(self, split: str, index: int) -> Example:
        """See `ExampleSource`."""
        rng = example_rng(self.seed, split, index)
        tokens, target = self.draws[split](rng)
        return token_example(tokens, target)


class StoredExamples(ExampleSource):
    """Examples of a dataset, in a fixed random order.

    Datasets are often sorted by class, and evaluations read the first examples.

    Args:
        sizes: Number of examples in each split.
        get: Split and row -> tokens and target.
    """

    def __init__(
        self, sizes: Mapping[str, int], get: Callable[[str, int], tuple[np.ndarray, int]]
    ) -> None:
        super().__init__(sizes)
        self.get = get
        self.order = {
            split: np.random.default_rng(size).permutation(size) for split, size in sizes.items()
        }

    def example(self, split: str, index: int) -> Example:
        """See `ExampleSource`."""
        check_index(split, index, self.size(split))
        tokens, target = self.get(split, int(self.order[split][index]))
        return token_example(tokens, target)


class SourceTask(TokenTask):
    """A task whose examples come from an `ExampleSource`."""

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


def check_generated_only(data: str, **arguments: object) -> None:
    """Refuse arguments of the generator together with a dataset; None and 0 mean "not given"."""
    for name, value in arguments.items():
        if value:
            raise ValueError(
                f"{name}={value!r} applies to generated examples, not to data={data!r}: omit it."
            )


def random_stream(rng: np.random.Generator) -> Iterator[float]:
    """Endless numbers in [0, 1), drawn in chunks because single calls are slow."""
    while True:
        yield from rng.random(CHUNK).tolist()
