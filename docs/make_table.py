"""Writes the table of recipes into README.md, from the registry.

python docs/make_table.py
"""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path

import torch

from regard import Compressed, EfficientAttention, LinearAttention, MultiHead, SoftmaxAttention
from regard.mixers import Fourier, Longformer, Recurrence, TokenMLP
from regard.registry import Recipe, get, list_recipes

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
def _(part: Compressed) -> str:
    return f"{part.memory.e.shape[1]} keys"  # type: ignore[attr-defined]


@cost.register
def _(part: LinearAttention) -> str:
    width = SIZES["dim"] // SIZES["heads"]
    found, _ = part.feature(torch.zeros(1, SIZES["heads"], 1, width), 0, True)
    return f"a state of {found.shape[-1]} × {width}"


@cost.register
def _(part: EfficientAttention) -> str:
    width = SIZES["dim"] // SIZES["heads"]
    return f"a state of {width} × {width}"


@cost.register
def _(part: Recurrence) -> str:
    read, _ = part.read(torch.zeros(1, 1, part.dim), None)
    return f"a state of {read.k.shape[-1]} × {read.v.shape[-1]}"


@cost.register
def _(part: Fourier) -> str:
    return "log n"


@cost.register
def _(part: TokenMLP) -> str:
    return f"{part.up.out_features:,} hidden places"


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
