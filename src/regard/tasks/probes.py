"""Synthetic probes: small generated tasks that show what a mixer can and cannot learn."""

from __future__ import annotations

import numpy as np

from regard.errors import check_int, check_positive
from regard.tasks.base import IGNORE_INDEX, Example, with_prediction
from regard.tasks.example_source import GeneratedExamples, SourceTask
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered

BLANK, QUERY = 1, 2  # 0 is padding
FIRST = 3  # the first symbol


class SyntheticTask(SourceTask):
    """A task with generated examples and a target at each token; subclasses implement `draw`."""

    output = "token"
    causal = True

    def __init__(self, *, vocab_size: int, classes: int, length: int, seed: int) -> None:
        source = GeneratedExamples(self.draw, seed=seed)
        super().__init__(source, vocab_size=vocab_size, classes=classes, length=length)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Generate tokens (n) and targets (n)."""
        raise NotImplementedError

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The tokens in one line, and the targets below."""
        tokens, target = example.inputs["x"].tolist(), example.targets["labels"].tolist()
        rows = [map(str, tokens), ("" if y == IGNORE_INDEX else str(y) for y in target)]
        cells = [list(row) for row in rows]
        width = max(len(cell) for row in cells for cell in row)
        lines = [" ".join(cell.rjust(width) for cell in row) for row in cells]
        return with_prediction("\n".join(lines), prediction)


class CopyTask(SyntheticTask):
    """Copy symbols: symbols, a query token, then blanks; at each of these, the next symbol
    (Graves et al. 2014, arXiv 1410.5401). The distance to look back is (length - 1) / 2 + 1.

    Args:
        length: Number of tokens.
        symbols: Number of different symbols.
        gap: Additional blanks between the symbols and the query token.
        lead: Blanks before the symbols, for example under global tokens.
        causal: Whether targets may only depend on earlier tokens.
        seed: Seed of the examples.
    """

    def __init__(
        self,
        length: int = 64,
        *,
        symbols: int = 16,
        gap: int = 0,
        lead: int = 0,
        causal: bool = True,
        seed: int = 0,
    ) -> None:
        check_int(3, length=length)
        check_int(1, symbols=symbols)
        check_int(0, gap=gap, lead=lead)
        if not isinstance(causal, bool):
            raise ValueError(f"causal must be True or False, not {causal!r}")
        if gap + lead > length - 3:
            raise ValueError(
                f"gap={gap} and lead={lead} leave no room for symbols in {length} tokens."
            )
        vocab_size = FIRST + symbols
        super().__init__(vocab_size=vocab_size, classes=vocab_size, length=length, seed=seed)
        self.symbols, self.gap, self.lead, self.causal = symbols, gap, lead, causal
        self.count = (length - gap - lead - 1) // 2

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        symbols = rng.integers(FIRST, FIRST + self.symbols, self.count)
        before = [BLANK] * self.lead, symbols, [BLANK] * self.gap
        tokens = np.concatenate((*before, [QUERY], [BLANK] * (self.count - 1)))
        ignored = [IGNORE_INDEX] * (self.lead + self.count + self.gap)
        return tokens, np.concatenate((ignored, symbols))


class SelectiveCopyTask(SyntheticTask):
    """Copy `count` symbols that are scattered among blanks (Gu & Dao 2023, arXiv 2312.00752)."""

    def __init__(
        self, length: int = 64, *, symbols: int = 16, count: int = 8, seed: int = 0
    ) -> None:
        check_int(1, symbols=symbols, count=count)
        if length < 2 * count:
            raise ValueError(f"{count} symbols need at least {2 * count} tokens, not {length}.")
        vocab_size = FIRST + symbols
        super().__init__(vocab_size=vocab_size, classes=vocab_size, length=length, seed=seed)
        self.symbols, self.count = symbols, count

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        before = self.length - self.count
        symbols = rng.integers(FIRST, FIRST + self.symbols, self.count)
        tokens = np.full(self.length, BLANK)
        tokens[np.sort(rng.choice(before, self.count, replace=False))] = symbols
        tokens[before] = QUERY
        return tokens, np.concatenate((np.full(before, IGNORE_INDEX), symbols))


class RecallTask(SyntheticTask):
    """Multi-query associative recall: key-value pairs, then the keys again in random order; at
    each, its value (Arora et al. 2023, arXiv 2312.04927).

    Args:
        length: Number of tokens.
        pairs: Number of pairs to remember.
        keys: Number of different keys.
        values: Number of different values.
        alpha: The gaps before the queries follow a power law, gap^(alpha - 1): most are short.
        seed: Seed of the examples.
    """

    def __init__(
        self,
        length: int = 64,
        *,
        pairs: int = 8,
        keys: int = 64,
        values: int = 64,
        alpha: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_int(1, pairs=pairs, keys=keys, values=values)
        check_positive("alpha", alpha)
        if pairs > keys:
            raise ValueError(f"pairs={pairs} needs as many keys, but keys={keys}.")
        if length < 4 * pairs:
            raise ValueError(
                f"{pairs} pairs and their queries need at least {4 * pairs} tokens, not {length}."
            )
        super().__init__(vocab_size=FIRST + keys + values, classes=values, length=length, seed=seed)
        self.pairs, self.keys, self.values = pairs, keys, values
        self.slots = (length - 2 * pairs) // 2  # for queries, of two tokens each
        weights = np.arange(1, self.slots + 1, dtype=float) ** (alpha - 1)
        self.weights = weights / weights.sum()

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        keys = rng.choice(self.keys, self.pairs, replace=False)
        values = rng.integers(0, self.values, self.pairs)
        tokens, target = np.full(self.length, BLANK), np.full(self.length, IGNORE_INDEX)
        tokens[: 2 * self.pairs : 2] = FIRST + keys
        tokens[1 : 2 * self.pairs : 2] = FIRST + self.keys + values
        slots = rng.choice(self.slots, self.pairs, replace=False, p=self.weights)
        queries = 2 * self.pairs + 2 * slots
        tokens[queries], target[queries] = FIRST + keys, values
        return tokens, target


class ParityTask(SyntheticTask):
    """Running parity of random bits (as in Hahn 2020, arXiv 1906.06755)."""

    def __init__(self, length: int = 64, *, seed: int = 0) -> None:
        super().__init__(vocab_size=FIRST + 2, classes=2, length=length, seed=seed)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        bits = rng.integers(0, 2, self.length)
        return FIRST + bits, np.cumsum(bits) % 2


class DyckTask(SyntheticTask):
    """Nested brackets of several kinds, at most `depth` deep: at each, the kind that must be closed
    next, or `kinds` if none is open (Dyck-(k, m), Hewitt et al. 2020, arXiv 2010.07515)."""

    def __init__(self, length: int = 64, *, kinds: int = 4, depth: int = 8, seed: int = 0) -> None:
        check_int(1, kinds=kinds, depth=depth)
        super().__init__(vocab_size=FIRST + 2 * kinds, classes=kinds + 1, length=length, seed=seed)
        self.kinds, self.depth = kinds, depth

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        coins, kinds = rng.random(self.length), rng.integers(0, self.kinds, self.length)
        open_kinds: list[int] = []
        tokens, target = [], []
        for coin, kind in zip(coins, kinds.tolist(), strict=True):
            if not open_kinds or (len(open_kinds) < self.depth and coin < 0.5):
                open_kinds.append(kind)
                tokens.append(FIRST + kind)
            else:
                tokens.append(FIRST + self.kinds + open_kinds.pop())
            target.append(open_kinds[-1] if open_kinds else self.kinds)
        return np.array(tokens), np.array(target)
