"""Writes the table of recipes into README.md, from the registry.

python docs/make_table.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regard.mixers import BPTransformer, Recurrence
from regard.mixers.bp_spans import visible_nodes
from regard.registry import Recipe, get_recipe, list_recipes

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- table -->", "<!-- /table -->"
TOKENS = 4096
SIZES = {
    "dim": 512,
    "heads": 8,
    "length": TOKENS,
    "width": 64,
}  # for arguments that have no default
LETTERS = {"causal": "C", "cross": "X", "mask": "M", "stream": "S", "length": "L", "maps": "maps"}
ALL = f"{TOKENS:,} keys"
MEASURED = (
    Path(__file__).parents[1] / "benchmarks/results/crossover-2.json"
)  # by benchmarks/run.py crossover

# what one token costs in one head, by the class of the mixer or of the attention inside
COSTS: dict[str, Callable[[Any], str]] = {
    "MultiHead": lambda x: cost(x.inner),
    "SoftmaxAttention": lambda x: (
        f"{x.pattern.resolve_global_mask(False, False).keys_per_query(TOKENS).double().mean():,.0f} keys"
    ),
    "ScoredAttention": lambda x: ALL,
    "Disagreeing": lambda x: cost(x.inner),
    # before 2017
    "AdditiveAttention": lambda x: f"{ALL}, each a small network",
    "SoftCells": lambda x: f"{ALL}, each a small network",
    "GaussianWindow": lambda x: f"{ALL}, without scores",
    "GlimpseRead": lambda x: f"{2 * x.bank.patch} filters, twice",
    "GlimpseWrite": lambda x: f"{2 * x.bank.patch} filters",
    # sparse by position
    "Longformer": lambda x: f"{cost(x.local)}, and the marked ones",
    "Star": lambda x: f"{x.cycles} × 5 keys, and the relay",
    "Tree": lambda x: f"{nodes(x):,.0f} keys",
    "GlobalLong": lambda x: f"{cost(x.long)}; {TOKENS:,} for a global token",
    "AxialPasses": lambda x: f"{cost(x.rows)} and {cost(x.columns)}",
    # sparse by content
    "Hashed": lambda x: f"{2 * x.chunk * x.hashing.rounds:,} keys, and a sort",
    "Routed": lambda x: cost(x.route),
    "KMeans": lambda x: f"{-(-TOKENS // x.clusters):,} keys in each cluster that took it",
    "Sinkhorn": lambda x: f"{x.block * (2 if x.cut is None else x.cut):,} keys",
    # linearised
    "LinearAttention": lambda x: (
        f"a state of {x.feature(torch.zeros(1, 8, 1, 64), 0, True)[0].shape[-1]} × 64"
    ),
    "EfficientAttention": lambda x: "a state of 64 × 64",
    "Retention": lambda x: recurrent(x),
    "GatedLinear": lambda x: recurrent(x),
    "GatedRandomFeatures": lambda x: recurrent(x),
    "DeltaRule": lambda x: recurrent(x),
    # low rank and compressed
    "Compressed": lambda x: f"{x.memory.e.shape[1]} keys",
    "LowRankBand": lambda x: f"{cost(x.low)}, narrow, and {cost(x.band)}",
    "NystromAttention": lambda x: f"{x.landmarks} landmarks, twice",
    "Strided": lambda x: (
        f"{(TOKENS if x.window is None else 2 * x.window + 1) // x.blocks.stride:,} keys"
    ),
    "Prototype": lambda x: f"{x.query.clusters} clusters for all",
    "ImprovedClustered": lambda x: f"{x.top} keys, and {x.clusters.clusters} clusters for all",
    "ProbSparse": lambda x: f"{x.factor} ln n keys, and for {x.factor} ln n queries all",
    "Funnel": lambda x: f"{TOKENS // x.stride:,} keys",
    "SAB": lambda x: cost(x.block.ask),
    "ISAB": lambda x: f"{len(x.points)} points, twice",
    "Luna": lambda x: f"{len(x.p)} packed, twice",
    "Perceiver": lambda x: f"{len(x.latents)} latents, twice",
    "Poolingformer": lambda x: f"{cost(x.near)}, and {cost(x.far)}",
    # priors
    "LocatedAttention": lambda x: ALL,
    "TaskAttention": lambda x: ALL,
    "RealFormer": lambda x: ALL,
    "AdaptiveSpan": lambda x: f"{1 + 2 * sum(x.windows()) // len(x.windows()):,} keys at the start",
    "HardGaussian": lambda x: f"{2 * x.reach + 1} values, no keys",
    "Average": lambda x: "a running sum",
    # without attention
    "Fourier": lambda x: "log n",
    "TokenMLP": lambda x: f"{x.up.out_features:,} hidden places",
    "Synthesizer": lambda x: ALL,
    "GatedMLP": lambda x: f"{TOKENS:,} gates" + (f", and {ALL}" if x.attend else ""),
    "XCiT": lambda x: "e × e, and 18 neighbours",
    "DynamicConv": lambda x: f"{x.kernel} neighbours",
    "AFT": lambda x: "a state of d" if x.bias is None else f"{ALL}, and no scores",
    # around attention
    "Branches": lambda x: " beside ".join(cost(part) for part in x.branches),
    "Persistent": lambda x: f"{cost(x.inner)}, and {x.keys.shape[-2]:,} learned",
    "AveragePool": lambda x: f"{x.window if x.width is None else x.window**2} neighbours",
}


def cost(part: object) -> str:
    """What one token costs in one head, at `TOKENS` tokens."""
    name = type(part).__name__
    if name not in COSTS:
        raise TypeError(f"docs/make_table.py does not know what {name} costs: add it to COSTS")
    return COSTS[name](part)


def recurrent(part: Recurrence) -> str:
    """The state of a head."""
    project_inputs, _ = part.project_inputs(torch.zeros(1, 1, part.dim), None)
    return f"a state of {project_inputs.k.shape[-1]} × {project_inputs.v.shape[-1]}"


def nodes(tree: BPTransformer) -> float:
    """How many nodes of the tree a token looks at."""
    seen, _ = visible_nodes(
        0, TOKENS, tree.near, tree.clip, tree.causal, (0,) * TOKENS.bit_length()
    )
    return (seen >= 0).sum(1).double().mean().item()


def promises(found: Recipe) -> dict[str, bool]:
    """Which promises it makes."""
    can = found.can()
    return {promise: getattr(can, promise) for promise in LETTERS}


def faster() -> dict[str, str]:
    """From which length on each recipe was measured to be faster than softmax attention: plain, then causal."""
    found: dict[str, list[str]] = {}
    for line in json.loads(MEASURED.read_text())["rows"]:
        first = line["faster from"]
        words = "never" if first is None else f"{first:,}"
        found.setdefault(line["recipe"], []).append(words + (" causal" if line["causal"] else ""))
    return {name: ", ".join(words) for name, words in found.items()}


def row(found: Recipe) -> str:
    """One line of the table."""
    needed = [p.name for p in found.parameters.values() if p.default is p.empty]
    mixer = found.build(**{name: SIZES[name] for name in needed})
    paper = f"[{found.paper}](https://arxiv.org/abs/{found.arxiv})" if found.arxiv else found.paper
    ticks = ("✓" if kept else "–" for kept in promises(found).values())
    cells = (
        f"`{found.name}`",
        found.row,
        paper,
        found.formula.replace("|", "\\|"),
        *ticks,
        cost(mixer),
        faster().get(found.name, ""),
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The whole table, in the order of the catalogue."""
    head = (
        "recipe",
        "row",
        "paper",
        "formula",
        *LETTERS.values(),
        f"cost of a token at {TOKENS:,}",
        "faster from",
    )
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return "\n".join(lines + [row(get_recipe(name)) for name in list_recipes()])


def put(text: str) -> str:
    """The text of the README with the table between its markers."""
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(put(README.read_text(encoding="utf-8")), encoding="utf-8")
