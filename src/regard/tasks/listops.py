"""ListOps: a long expression of nested lists, and what it comes to."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from regard.errors import check_int
from regard.tasks.base import Example
from regard.tasks.example_source import GeneratedExamples, SourceTask, random_stream


def median(values: Sequence[int]) -> int:
    """The middle one, or the mean of the two in the middle, cut down to a whole number."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": median,
    "[SM": lambda values: sum(values) % 10,
}
APPLY = list(OPERATORS.values())
CLOSE = "]"
WORDS = ("", *OPERATORS, CLOSE, *map(str, range(10)))  # by the number of their token; 0 fills up
OPEN, CLOSED, ZERO = 1, 1 + len(OPERATORS), 2 + len(OPERATORS)
NESTED = 0.25  # how often an argument is a list itself
TRIES = 20_000  # trees drawn for one example before giving up


class TooLong(Exception):
    """A tree has more tokens than are wanted: the rest of it need not be drawn."""


class ListOps(SourceTask):
    """Lists of digits under MAX, MIN, MED (the median, cut down to a whole number) and SM (the sum modulo 10), in each other:
    ten classes (Nangia & Bowman 2018, arXiv 1804.06028; as in Long Range Arena, Tay et al. 2020, arXiv 2011.04006).

        tree(level) = a list of 2..args trees(level + 1) with probability 1/4, if level < depth; else a digit

    Trees are drawn until one has more than `shortest` and fewer than `length` tokens.  An operator with its bracket is a token,
    and so are a closing bracket and a digit.  Long Range Arena: length=2000, and so shortest=500, and examples=96000.

    length   a bound of the tokens; `shortest`: the other one, a quarter of it unless given
    depth    levels of the tree, with that of the digits
    args     the most arguments of a list
    """

    def __init__(
        self,
        length: int = 512,
        *,
        shortest: int | None = None,
        depth: int = 10,
        args: int = 10,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(6, length=length)
        check_int(2, depth=depth, args=args)
        super().__init__(
            GeneratedExamples(self.draw, seed=seed, examples=examples),
            vocab_size=len(WORDS),
            classes=10,
            length=length,
        )
        self.shortest, self.depth, self.args = (
            length // 4 if shortest is None else shortest,
            depth,
            args,
        )
        check_int(0, shortest=self.shortest)
        if self.shortest > length - 2:
            raise ValueError(
                f"no length is more than shortest={shortest} and less than length={length}"
            )
        if longest(depth, args) <= self.shortest:
            raise ValueError(
                f"a tree of depth {depth} with up to {args} arguments has at most {longest(depth, args)} tokens, "
                f"and more than {self.shortest} are wanted: a larger depth or a smaller shortest would do"
            )

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, int]:
        """Tokens (n), and what they come to."""
        draws = random_stream(random)
        for _ in range(TRIES):
            tokens: list[int] = []
            try:
                value = self._grow(tokens, 1, draws)
            except TooLong:
                continue
            if len(tokens) > self.shortest:
                return np.array(tokens), value
        raise ValueError(
            f"of {TRIES} trees none had more than {self.shortest} and fewer than {self.length} tokens: ask for others"
        )

    def _grow(self, tokens: list[int], level: int, draws: Iterator[float]) -> int:
        """Write a tree at the end of the tokens, and return its value."""
        if level == self.depth or next(draws) > NESTED:
            digit = int(10 * next(draws))
            tokens.append(ZERO + digit)
            return digit
        which = int(len(APPLY) * next(draws))
        tokens.append(OPEN + which)
        values = [
            self._grow(tokens, level + 1, draws)
            for _ in range(2 + int((self.args - 1) * next(draws)))
        ]
        tokens.append(CLOSED)
        if len(tokens) >= self.length:
            raise TooLong
        return APPLY[which](values)

    def show(self, example: Example) -> str:
        """The expression, and its value."""
        text = " ".join(WORDS[token] for token in example.tokens.tolist())
        return "\n".join(textwrap.wrap(f"{text} = {int(example.target)}", 100))


def longest(depth: int, args: int) -> int:
    """Tokens of the largest tree."""
    size = 1
    for _ in range(depth - 1):
        size = 2 + args * size
    return size
