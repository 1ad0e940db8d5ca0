"""A picture: a square of cells, each with the part that covers most of it, and the covered share.

Up to a few dozen tokens have a cell each. More tokens share cells; the shares are computed tile by
tile, without an n x n mask.
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

# tokens per cell that are counted exactly; of larger cells as many rows and columns are sampled
MAX_EXACT = 32
MIN_SHADE = 1e-3  # of a cell that allows some pairs, though none was sampled


@dataclass(frozen=True)
class Picture:
    """Cells of a picture, rows are queries.

    Attributes:
        title: Heads that the picture shows, or "".
        tokens: Number of tokens.
        parts: Parts of the pattern.
        part: Index (c c) into `parts`, -1 = empty.
        shade: Covered share of each cell (c c), in [0, 1].
    """

    title: str
    tokens: int
    parts: tuple[PatternPart, ...]
    part: Tensor
    shade: Tensor

    @property
    def cells(self) -> int:
        """Cells per side."""
        return len(self.part)

    def legend(self) -> list[PatternPart]:
        """Parts that are visible."""
        seen = set(self.part.unique().tolist())
        return [part for i, part in enumerate(self.parts) if i in seen]


def pattern_picture(pattern: Pattern, n: int, cells: int, title: str = "") -> Picture:
    """Picture of a pattern that is the same for all heads, for n tokens."""
    parts = split_pattern(pattern, n)
    share = torch.stack([_share(p.pattern, n, cells) for p in parts])
    shade, part = share.max(0)  # the first of equal ones
    return Picture(title, n, tuple(parts), torch.where(shade > 0, part, -1), shade)


def pattern_pictures(pattern: Pattern, n: int, cells: int) -> list[Picture]:
    """One picture, or one for each distinct pattern of the heads."""
    if not pattern.heads:
        return [pattern_picture(pattern, n, cells)]
    heads: dict[Pattern, list[int]] = {}
    for number, part in enumerate(pattern.parts, 1):
        heads.setdefault(part, []).append(number)
    return [pattern_picture(part, n, cells, _heads(numbers)) for part, numbers in heads.items()]


def count_pictures(pattern: Pattern | None) -> int:
    """Number of distinct patterns of the heads, and so of pictures."""
    return len(set(pattern.parts)) if pattern is not None and pattern.heads else 1


def _heads(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (", …" if len(numbers) > 4 else "")
    return f"head {shown}" if len(numbers) == 1 else f"heads {shown}"


def _share(pattern: Pattern, n: int, cells: int) -> Tensor:
    """Share of the pairs in each cell that are allowed, (c c)."""
    tiles = position_tiles(n, max(1, -(-n // cells)))
    some, every = classify_tiles(pattern, tiles, tiles)
    share = every.double()
    at = (some & ~every).nonzero()
    if len(at) == 0:
        return share
    exact = tiles.shape[1] <= MAX_EXACT
    rows, cols = (tiles if exact else _sample_positions(tiles, seed) for seed in (0, 1))
    q, k = rows[at[:, 0]][:, :, None], cols[at[:, 1]][:, None, :]
    real = (q >= 0) & (k >= 0)
    found = (pattern.allows(q, k) & real).sum((1, 2)) / real.sum((1, 2)).clamp(min=1)
    share[at[:, 0], at[:, 1]] = found.double() if exact else found.double().clamp(min=MIN_SHADE)
    return share


def _sample_positions(tiles: Tensor, seed: int) -> Tensor:
    """Sample one position from each of MAX_EXACT equal parts of a tile: (r s) -> (r MAX_EXACT)."""
    within = torch.rand(len(tiles), MAX_EXACT, generator=torch.Generator().manual_seed(seed))
    index = (torch.arange(MAX_EXACT) + within) * tiles.shape[1] / MAX_EXACT
    return tiles.gather(1, index.long().clamp(max=tiles.shape[1] - 1))


# ------------------------------------------------------------------------------ without a pattern
def map_picture(mixer: Mixer, n: int) -> Picture:
    """Attention map of a mixer for n random tokens, or, without a map, the influence of tokens."""
    x = random_tokens(mixer.double(), n, b=1)
    with torch.no_grad():
        try:
            weights = mixer.attention_map(x)[0].abs().mean(0)
            label = "attention map, mean absolute weight over heads"
        except Unsupported:
            weights = influence(mixer, x)
            label = "influence of key token on query token (Jacobian)"
    shade = weights / weights.max().clamp(min=torch.finfo(weights.dtype).tiny)
    part = PatternPart("weight", f"{label}, for random tokens and weights", Full())
    return Picture("", n, (part,), torch.where(shade > 0, 0, -1), shade)
