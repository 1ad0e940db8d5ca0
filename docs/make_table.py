"""Writes the table of recipes into README.md, from the registry.

python docs/make_table.py
"""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path

from regard.attentions import (
    AdaptiveSpan,
    Compressed,
    HardGaussian,
    Hashed,
    ImprovedClustered,
    LinearAttention,
    LocatedAttention,
    NystromAttention,
    ProbSparse,
    Prototype,
    Routed,
    ScoredAttention,
    SoftmaxAttention,
    Strided,
)
from regard.heads import Disagreeing
from regard.mixer import MultiHead
from regard.mixers import (
    ISAB,
    SAB,
    Average,
    AxialPasses,
    Fourier,
    Funnel,
    Longformer,
    LowRankBand,
    Luna,
    Perceiver,
    Poolingformer,
    RealFormer,
    Sinkhorn,
    Star,
    TaskAttention,
    TokenMLP,
    Tree,
)
from regard.registry import Recipe, get, list_recipes
from regard.route import KMeans

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- table -->", "<!-- /table -->"
TOKENS = 4096
SIZES = {"dim": 512, "heads": 8, "length": TOKENS, "width": 64}  # for arguments that have no default
LETTERS = {"causal": "C", "cross": "X", "mask": "M", "stream": "S", "length": "L", "maps": "maps"}


@singledispatch
def cost(part: object) -> str:
    """What one token costs in one head, at `TOKENS` tokens."""
    raise TypeError(f"docs/make_table.py does not know what {type(part).__name__} costs: register a `cost` for it")


@cost.register
def _(part: MultiHead) -> str:
    return cost(part.inner)


@cost.register
def _(part: SoftmaxAttention) -> str:
    keys = part.pattern.given(False, False).keys_per_query(TOKENS)
    return f"{keys.double().mean():,.0f} keys"


@cost.register
def _(part: Longformer) -> str:
    return f"{cost(part.local)}, and the marked ones"


@cost.register
def _(part: Star) -> str:
    return f"{part.cycles} × 5 keys, and the relay"


@cost.register
def _(part: Tree) -> str:
    return f"about {2 * part.near * (TOKENS // part.near).bit_length():,} keys"


@cost.register
def _(part: AxialPasses) -> str:
    return f"{cost(part.rows)} and {cost(part.columns)}"


@cost.register
def _(part: Compressed) -> str:
    return f"{part.memory.e.shape[1]} keys"  # type: ignore[attr-defined]


@cost.register
def _(part: LinearAttention) -> str:
    return "a state of e × e"


@cost.register
def _(part: Hashed) -> str:
    return f"{2 * part.chunk * part.hashing.rounds:,} keys, and a sort"


@cost.register
def _(part: Routed) -> str:
    return cost(part.route)


@cost.register
def _(part: KMeans) -> str:
    return f"{-(-TOKENS // part.clusters):,} keys in each cluster that took it"


@cost.register
def _(part: Sinkhorn) -> str:
    return f"{part.block * (2 if part.cut is None else part.cut):,} keys"


@cost.register
def _(part: Fourier) -> str:
    return "log n"


@cost.register
def _(part: TokenMLP) -> str:
    return f"{part.up.out_features:,} hidden places"


@cost.register
def _(part: LowRankBand) -> str:
    return f"{cost(part.low)}, narrow, and {cost(part.band)}"


@cost.register
def _(part: NystromAttention) -> str:
    return f"{part.landmarks} landmarks, twice"


@cost.register
def _(part: Strided) -> str:
    reach = TOKENS if part.window is None else 2 * part.window + 1
    return f"{reach // part.blocks.stride:,} keys"


@cost.register
def _(part: Prototype) -> str:
    return f"{part.query.clusters} clusters for all"  # type: ignore[attr-defined]


@cost.register
def _(part: ImprovedClustered) -> str:
    return f"{part.top} keys, and {part.clusters.clusters} clusters for all"


@cost.register
def _(part: ProbSparse) -> str:
    return f"{part.factor} ln n keys, and for {part.factor} ln n queries all"


@cost.register
def _(part: Funnel) -> str:
    return f"{TOKENS // part.stride:,} keys"


@cost.register
def _(part: SAB) -> str:
    return cost(part.block.ask)


@cost.register
def _(part: ISAB) -> str:
    return f"{len(part.points)} points, twice"


@cost.register
def _(part: Luna) -> str:
    return f"{len(part.p)} packed, twice"


@cost.register
def _(part: Perceiver) -> str:
    return f"{len(part.latents)} latents, twice"


@cost.register
def _(part: Poolingformer) -> str:
    return f"{cost(part.near)}, and {cost(part.far)}"


@cost.register
def _(part: LocatedAttention | ScoredAttention | TaskAttention | RealFormer) -> str:
    return f"{TOKENS:,} keys"


@cost.register
def _(part: AdaptiveSpan) -> str:
    return f"{1 + 2 * sum(part.reaches()) // len(part.reaches()):,} keys at the start"


@cost.register
def _(part: HardGaussian) -> str:
    return f"{2 * part.reach + 1} values, no keys"


@cost.register
def _(part: Average) -> str:
    return "a running sum"


@cost.register
def _(part: Disagreeing) -> str:
    return cost(part.inner)


def promises(found: Recipe) -> dict[str, bool]:
    """Which promises it makes."""
    can = found.can()
    return {promise: getattr(can, promise) for promise in LETTERS}


def row(found: Recipe) -> str:
    """One line of the table."""
    needed = [p.name for p in found.parameters.values() if p.default is p.empty]
    mixer = found.build(**{name: SIZES[name] for name in needed})
    paper = f"[{found.paper}](https://arxiv.org/abs/{found.arxiv})" if found.arxiv else found.paper
    ticks = ("✓" if kept else "–" for kept in promises(found).values())
    cells = (f"`{found.name}`", found.row, paper, found.formula.replace("|", "\\|"), *ticks, cost(mixer))
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The whole table, in the order of the catalogue."""
    head = ("recipe", "row", "paper", "formula", *LETTERS.values(), f"cost of a token at {TOKENS:,}")
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return "\n".join(lines + [row(get(name)) for name in list_recipes()])


def put(text: str) -> str:
    """The text of the README with the table between its markers."""
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(put(README.read_text(encoding="utf-8")), encoding="utf-8")
