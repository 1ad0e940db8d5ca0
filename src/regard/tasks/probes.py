"""Probes: small generated tasks that show what a mechanism can and cannot learn."""

from __future__ import annotations

import numpy as np

from regard.errors import check_int, check_positive
from regard.tasks.base import IGNORE_INDEX, Example, Task, example_rng, to_int64

SIZES = {"train": 1 << 40, "valid": 512, "test": 2048}  # training never sees an example twice
BLANK, ASK = 1, 2  # 0 fills up
FIRST = 3  # the first symbol


class SyntheticTask(Task):
    """A task whose examples are drawn, each by its own number; targets stand at tokens."""

    output = "token"
    causal = True

    def __init__(self, *, vocab_size: int, classes: int, length: int, seed: int) -> None:
        super().__init__(vocab_size=vocab_size, classes=classes, length=length)
        check_int(0, seed=seed)
        self.seed = seed

    def size(self, split: str) -> int:
        """Endless, for training."""
        return SIZES[split]

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        tokens, target = self.draw(example_rng(self.seed, split, index))
        return Example(to_int64(tokens), to_int64(target))

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n) and targets (n)."""
        raise NotImplementedError

    def show(self, example: Example) -> str:
        """Tokens in one line, and below each the target, if there is one."""
        tokens, target = example.tokens.tolist(), example.target.tolist()
        cells = [
            (str(t), "" if y == IGNORE_INDEX else str(y))
            for t, y in zip(tokens, target, strict=True)
        ]
        wide = max(len(cell) for pair in cells for cell in pair)
        return "\n".join(
            " ".join(cell.rjust(wide) for cell in row) for row in zip(*cells, strict=True)
        )


class CopyTask(SyntheticTask):
    """Symbols, a sign, and as many blanks: at each blank, the symbol that many places back (Graves et al. 2014,
    arXiv 1410.5401).  The distance to look back is (length − 1) / 2 + 1.

    gap     blanks more between the symbols and the sign: how far apart they stand
    lead    blanks before the symbols, as for global tokens that are to hold none of them
    causal  False: tokens may look at later ones, for mechanisms that need both sides
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
            around = f"a gap of {gap}" + f" and a lead of {lead}" * bool(lead)
            raise ValueError(f"{around} leaves no room for symbols in {length} tokens")
        super().__init__(
            vocab_size=FIRST + symbols, classes=FIRST + symbols, length=length, seed=seed
        )
        self.symbols, self.gap, self.lead, self.count = (
            symbols,
            gap,
            lead,
            (length - gap - lead - 1) // 2,
        )
        self.causal = causal

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        data = random.integers(FIRST, FIRST + self.symbols, self.count)
        tokens = np.concatenate(
            ([BLANK] * self.lead, data, [BLANK] * self.gap, [ASK], [BLANK] * (self.count - 1))
        )
        target = np.concatenate(([IGNORE_INDEX] * (self.lead + self.count + self.gap), data))
        return tokens, target


class SelectiveCopyTask(SyntheticTask):
    """Symbols scattered among noise; after the sign, the symbols in order (Gu & Dao 2023, arXiv 2312.00752)."""

    def __init__(
        self, length: int = 64, *, symbols: int = 16, count: int = 8, seed: int = 0
    ) -> None:
        check_int(1, symbols=symbols, count=count)
        if length < 2 * count:
            raise ValueError(f"{count} symbols need at least {2 * count} tokens, not {length}")
        super().__init__(
            vocab_size=FIRST + symbols, classes=FIRST + symbols, length=length, seed=seed
        )
        self.symbols, self.count = symbols, count

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        before = self.length - self.count
        data = random.integers(FIRST, FIRST + self.symbols, self.count)
        tokens = np.full(self.length, BLANK)
        tokens[np.sort(random.choice(before, self.count, replace=False))] = data
        tokens[before] = ASK
        return tokens, np.concatenate((np.full(before, IGNORE_INDEX), data))


class RecallTask(SyntheticTask):
    """Associative recall of many: pairs of a key and a value, then keys again, in any order: at each, its value (Arora et al.
    2023, arXiv 2312.04927).

    pairs   how many there are to remember
    alpha   the gaps before a key is asked fall off as a power, so that most are short, as in text: gap^(alpha − 1)
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
            raise ValueError(f"{pairs} pairs need as many keys, and there are {keys}")
        if length < 4 * pairs:
            raise ValueError(
                f"{pairs} pairs and their questions need at least {4 * pairs} tokens, not {length}"
            )
        super().__init__(vocab_size=FIRST + keys + values, classes=values, length=length, seed=seed)
        self.pairs, self.keys, self.values = pairs, keys, values
        self.room = (
            length - 2 * pairs
        ) // 2  # places for a question, each of two tokens: the key, and what follows
        weights = np.arange(1, self.room + 1, dtype=float) ** (alpha - 1)
        self.weights = weights / weights.sum()

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        keys = random.choice(self.keys, self.pairs, replace=False)
        values = random.integers(0, self.values, self.pairs)
        tokens, target = np.full(self.length, BLANK), np.full(self.length, IGNORE_INDEX)
        tokens[: 2 * self.pairs : 2], tokens[1 : 2 * self.pairs : 2] = (
            FIRST + keys,
            FIRST + self.keys + values,
        )
        at = 2 * self.pairs + 2 * random.choice(
            self.room, self.pairs, replace=False, p=self.weights
        )
        tokens[at], target[at] = FIRST + keys, values
        return tokens, target


class ParityTask(SyntheticTask):
    """Bits; at each, whether the number of ones so far is odd (as in Hahn 2020, arXiv 1906.06755)."""

    def __init__(self, length: int = 64, *, seed: int = 0) -> None:
        super().__init__(vocab_size=FIRST + 2, classes=2, length=length, seed=seed)

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        bits = random.integers(0, 2, self.length)
        return FIRST + bits, np.cumsum(bits) % 2


class DyckTask(SyntheticTask):
    """Well-nested brackets of several kinds, at most `depth` deep: at each, the kind that must be closed next, or `count_pictures` where
    none is open (Dyck-(k, m), Hewitt et al. 2020, arXiv 2010.07515)."""

    def __init__(self, length: int = 64, *, kinds: int = 4, depth: int = 8, seed: int = 0) -> None:
        check_int(1, kinds=kinds, depth=depth)
        super().__init__(vocab_size=FIRST + 2 * kinds, classes=kinds + 1, length=length, seed=seed)
        self.kinds, self.depth = kinds, depth

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `SyntheticTask`."""
        coins, drawn = random.random(self.length), random.integers(0, self.kinds, self.length)
        opened: list[int] = []
        tokens, target = [], []
        for coin, kind in zip(coins, drawn, strict=True):
            if not opened or (len(opened) < self.depth and coin < 0.5):
                opened.append(int(kind))
                tokens.append(FIRST + int(kind))
            else:
                tokens.append(FIRST + self.kinds + opened.pop())
            target.append(opened[-1] if opened else self.kinds)
        return np.array(tokens), np.array(target)
