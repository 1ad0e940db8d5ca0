"""ListOps: evaluate a long expression of nested lists."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from regard.errors import check_int
from regard.tasks.base import Example, with_prediction
from regard.tasks.example_source import GeneratedExamples, SourceTask, random_stream
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered


def median(values: Sequence[int]) -> int:
    """The median, rounded down."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": median,
    "[SM": lambda values: sum(values) % 10,
}
FUNCTIONS = list(OPERATORS.values())
WORDS = ("", *OPERATORS, "]", *map(str, range(10)))  # by token; 0 is padding
OPEN, CLOSE, ZERO = 1, 1 + len(OPERATORS), 2 + len(OPERATORS)
LIST_PROBABILITY = 0.25  # that an argument is a list
MAX_TRIES = 20_000  # trees drawn for one example


class _TooLong(Exception):
    """A tree has too many tokens; the rest need not be drawn."""


class ListOps(SourceTask):
    """Nested lists of digits under MAX, MIN, MED (median, rounded down) and SM (sum modulo 10),
    with ten classes (Nangia & Bowman 2018, arXiv 1804.06028; Long Range Arena, Tay et al. 2020,
    arXiv 2011.04006).

        tree(level) = a list of 2..args trees(level + 1) with probability 1/4 if level < depth,
                      otherwise a digit

    Trees are drawn until one has more than `min_length` and fewer than `length` tokens. An operator
    with its opening bracket is one token. Long Range Arena uses length=2000 and examples=96000.

    Args:
        length: Upper bound of the number of tokens.
        min_length: Lower bound of the number of tokens. None: length // 4.
        depth: Levels of the tree, including the digits.
        args: Maximum number of arguments of a list.
        seed: Seed of the examples.
        examples: Size of the training split. None: endless.
    """

    def __init__(
        self,
        length: int = 512,
        *,
        min_length: int | None = None,
        depth: int = 10,
        args: int = 10,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(6, length=length)
        check_int(2, depth=depth, args=args)
        source = GeneratedExamples(self.draw, seed=seed, examples=examples)
        super().__init__(source, vocab_size=len(WORDS), classes=10, length=length)
        self.min_length = length // 4 if min_length is None else min_length
        self.depth, self.args = depth, args
        check_int(0, min_length=self.min_length)
        if self.min_length > length - 2:
            raise ValueError(
                f"No length is more than min_length={min_length} and less than length={length}."
            )
        longest = 1
        for _ in range(depth - 1):
            longest = 2 + args * longest
        if longest <= self.min_length:
            raise ValueError(
                f"A tree with depth={depth} and args={args} has at most {longest} tokens, but "
                f"min_length={self.min_length}: increase depth or decrease min_length."
            )

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Generate tokens (n) and their value."""
        draws = random_stream(rng)
        for _ in range(MAX_TRIES):
            tokens: list[int] = []
            try:
                value = self._draw_tree(tokens, 1, draws)
            except _TooLong:
                continue
            if len(tokens) > self.min_length:
                return np.array(tokens), value
        raise ValueError(
            f"None of {MAX_TRIES} trees had more than {self.min_length} and fewer than "
            f"{self.length} tokens: change length, min_length, depth or args."
        )

    def _draw_tree(self, tokens: list[int], level: int, draws: Iterator[float]) -> int:
        """Append a random tree to the tokens, and return its value."""
        if level == self.depth or next(draws) > LIST_PROBABILITY:
            digit = int(10 * next(draws))
            tokens.append(ZERO + digit)
            return digit
        operator = int(len(FUNCTIONS) * next(draws))
        tokens.append(OPEN + operator)
        count = 2 + int((self.args - 1) * next(draws))
        values = [self._draw_tree(tokens, level + 1, draws) for _ in range(count)]
        tokens.append(CLOSE)
        if len(tokens) >= self.length:
            raise _TooLong
        return FUNCTIONS[operator](values)

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The expression and its value."""
        text = " ".join(WORDS[token] for token in example.inputs["x"].tolist())
        equation = f"{text} = {int(example.targets['labels'])}"
        return with_prediction("\n".join(textwrap.wrap(equation, 100)), prediction)
