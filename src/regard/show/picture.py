"""A picture: a square of cells, each with the part that fills it most, and how much of it.

Few tokens have a cell each.  Many share one: its shade is then the share of pairs that the pattern allows there, asked
tile by tile, so that no n x n mask is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.mixer import Mixer
from regard.pattern import Full, Pattern, classify_tiles, position_tiles
from regard.show.pattern_parts import PatternPart, split_pattern
from regard.testing import influence, random_tokens

EXACT = 32  # a cell of up to so many tokens is counted; of a larger one as many rows and columns are drawn by lot
LEAST = 1e-3  # the share of a cell in which something is seen, though no drawn pair met it


@dataclass(frozen=True)
class Picture:
    """`part` (c c) is the index into `parse_specs`, -1 where nothing is seen; `shade` (c c) is in [0, 1]; rows are queries."""

    title: str
    tokens: int
    parts: tuple[PatternPart, ...]
    part: Tensor
    shade: Tensor

    @property
    def cells(self) -> int:
        """To a side."""
        return len(self.part)

    def legend(self) -> list[PatternPart]:
        """The parts that can be seen."""
        seen = set(self.part.unique().tolist())
        return [part for i, part in enumerate(self.parts) if i in seen]


def pattern_picture(pattern: Pattern, n: int, cells: int, title: str = "") -> Picture:
    """Who may look at whom among n tokens, for a pattern that is the same for all heads."""
    parts = split_pattern(pattern, n)
    share = torch.stack([_share(p.pattern, n, cells) for p in parts])
    shade, part = share.max(0)  # of equal ones, the first
    return Picture(title, n, tuple(parts), torch.where(shade > 0, part, -1), shade)


def pattern_pictures(pattern: Pattern, n: int, cells: int) -> list[Picture]:
    """One picture, or one for each kind of head."""
    if not pattern.heads:
        return [pattern_picture(pattern, n, cells)]
    heads: dict[Pattern, list[int]] = {}
    for number, part in enumerate(pattern.parts, 1):
        heads.setdefault(part, []).append(number)
    return [pattern_picture(part, n, cells, _heads(numbers)) for part, numbers in heads.items()]


def count_pictures(pattern: Pattern | None) -> int:
    """How many kinds of heads there are, and so pictures."""
    return len(set(pattern.parts)) if pattern is not None and pattern.heads else 1


def _heads(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (", …" if len(numbers) > 4 else "")
    return f"head {shown}" if len(numbers) == 1 else f"heads {shown}"


def _share(pattern: Pattern, n: int, cells: int) -> Tensor:
    """(c c): the share of the pairs in each cell that are allowed."""
    tiles = position_tiles(n, max(1, -(-n // cells)))
    some, every = classify_tiles(pattern, tiles, tiles)
    share = every.double()
    at = (some & ~every).nonzero()
    if len(at) == 0:
        return share
    exact = tiles.shape[1] <= EXACT
    rows, cols = (tiles if exact else _drawn(tiles, seed) for seed in (0, 1))
    q, k = rows[at[:, 0]][:, :, None], cols[at[:, 1]][:, None, :]
    real = (q >= 0) & (k >= 0)
    found = (pattern.allows(q, k) & real).sum((1, 2)) / real.sum((1, 2)).clamp(min=1)
    share[at[:, 0], at[:, 1]] = found.double() if exact else found.double().clamp(min=LEAST)
    return share


def _drawn(tiles: Tensor, seed: int) -> Tensor:
    """Some positions of each tile, one by lot from each of EXACT equal stretches: (r s) -> (r EXACT)."""
    within = torch.rand(len(tiles), EXACT, generator=torch.Generator().manual_seed(seed))
    index = (torch.arange(EXACT) + within) * tiles.shape[1] / EXACT
    return tiles.gather(1, index.long().clamp(max=tiles.shape[1] - 1))


# ---------------------------------------------------------------------------------------------- without a pattern
def map_picture(mixer: Mixer, n: int) -> Picture:
    """What a mixer without a pattern does to n random tokens: its attention map, or the influence of token on token."""
    x = random_tokens(mixer.double(), n, b=1)
    with torch.no_grad():
        try:
            weights = mixer.attention_map(x)[0].abs().mean(0)
            words = "absolute weight in its attention map, mean over heads"
        except Unsupported:
            weights = influence(mixer, x)
            words = "influence of key token on query token, by the Jacobian"
    shade = weights / weights.max().clamp(min=torch.finfo(weights.dtype).tiny)
    part = PatternPart("weight", f"{words}, for random tokens and weights", Full())
    return Picture("", n, (part,), torch.where(shade > 0, 0, -1), shade)
