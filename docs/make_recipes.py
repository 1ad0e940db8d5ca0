"""Writes docs/recipes.md and its pictures from the registry.

python docs/make_recipes.py
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.can import CAPABILITIES
from regard.mixers import BPTransformer, Recurrence
from regard.mixers.bp_spans import visible_nodes
from regard.registry import FAMILIES, Recipe, get_recipe, list_recipes
from regard.show import overlay_picture
from regard.show.build import build_example, pattern_of
from regard.show.description import paper_url
from regard.show.image import BACKGROUND
from regard.show.picture import Picture
from regard.show.style import Colour, assign_styles, blend

DOCS = Path(__file__).parent
PAGE, PICTURES = DOCS / "recipes.md", DOCS / "images" / "recipes"
CROSSOVER = DOCS.parent / "benchmarks/results/crossover-2.json"  # benchmarks/run.py crossover
PAGES = {
    "early": ["early.md"],
    "dense": ["softmax.md"],
    "sparse": ["sparse.md", "grid.md"],
    "routed": ["routed.md"],
    "linear": ["linear.md"],
    "compressed": ["compressed.md", "prototypes.md", "sets.md"],
    "priors": ["priors.md"],
    "attention-free": ["free.md"],
    "hybrid": ["feed-forward.md", "stacks.md"],
}
TOKENS = 4096
REQUIRED = {
    "dim": 512,
    "heads": 8,
    "length": TOKENS,
    "width": 64,
}  # for arguments without a default
COLUMNS = ("causal", "cross", "mask", "attn_mask", "stream", "length", "maps")
CELLS, PIXELS = 32, 4  # of a picture: cells per side, and pixels per cell
ALL = f"{TOKENS:,} keys"

# cost of one token in one head, by class of the mixer or its attention
COSTS: dict[str, Callable[[Any], str]] = {
    "MultiHead": lambda x: cost(x.inner),
    "SoftmaxAttention": lambda x: f"{mean_keys(x.pattern):,.0f} keys",
    "MaterializedAttention": lambda x: ALL,
    "DisagreementAttention": lambda x: cost(x.inner),
    # early
    "AdditiveAttention": lambda x: f"{ALL}, a small network each",
    "SoftVisualAttention": lambda x: f"{ALL}, a small network each",
    "GaussianWindow": lambda x: f"{ALL}, without scores",
    "GlimpseRead": lambda x: f"{2 * x.bank.patch} filters, twice",
    "GlimpseWrite": lambda x: f"{2 * x.bank.patch} filters",
    # sparse
    "Longformer": lambda x: f"{cost(x.local)}, plus global tokens",
    "Star": lambda x: f"{x.cycles} × 5 keys, plus the relay",
    "BPTransformer": lambda x: f"{mean_nodes(x):,.0f} keys",
    "ETC": lambda x: f"{cost(x.long)}; {TOKENS:,} for a global token",
    "AxialPasses": lambda x: f"{cost(x.rows)} and {cost(x.columns)}",
    # routed
    "LSHAttention": lambda x: f"{2 * x.chunk * x.hashing.rounds:,} keys, plus sorting",
    "RoutedAttention": lambda x: cost(x.route),
    "KMeans": lambda x: f"{-(-TOKENS // x.clusters):,} keys in each of its clusters",
    "Sinkhorn": lambda x: f"{x.block * (2 if x.cut is None else x.cut):,} keys",
    # linear
    "LinearAttention": lambda x: (
        f"state of {x.feature(torch.zeros(1, 8, 1, 64), 0, True)[0].shape[-1]} × 64"
    ),
    "EfficientAttention": lambda x: "state of 64 × 64",
    "Retention": lambda x: state_size(x),
    "GatedLinear": lambda x: state_size(x),
    "GatedRandomFeatures": lambda x: state_size(x),
    "DeltaRule": lambda x: state_size(x),
    # compressed
    "CompressedAttention": lambda x: f"{x.compression.e.shape[1]} keys",
    "LowRankBand": lambda x: f"{cost(x.low)} of low rank, and {cost(x.band)}",
    "NystromAttention": lambda x: f"{x.landmarks} landmarks, twice",
    "BlockCompressedAttention": lambda x: (
        f"{(TOKENS if x.window is None else 2 * x.window + 1) // x.blocks.stride:,} keys"
    ),
    "PrototypeAttention": lambda x: f"{x.query.clusters} clusters for all tokens",
    "ImprovedClusteredAttention": lambda x: (
        f"{x.top} keys, plus {x.clusters.clusters} clusters for all tokens"
    ),
    "ProbSparseAttention": lambda x: f"{x.factor} ln n keys; all for {x.factor} ln n queries",
    "FunnelMixer": lambda x: f"{TOKENS // x.stride:,} keys",
    "SAB": lambda x: ALL,
    "ISAB": lambda x: f"{len(x.points)} points, twice",
    "Luna": lambda x: f"{len(x.p)} packed, twice",
    "Perceiver": lambda x: f"{len(x.latents)} latents, twice",
    "Poolingformer": lambda x: f"{cost(x.near)}, and {cost(x.far)}",
    # priors
    "LocalnessAttention": lambda x: ALL,
    "TaskAttention": lambda x: ALL,
    "RealFormer": lambda x: ALL,
    "AdaptiveSpanAttention": lambda x: (
        f"{1 + 2 * sum(x.windows()) // len(x.windows()):,} keys initially"
    ),
    "HardCodedAttention": lambda x: f"{2 * x.reach + 1} values, no keys",
    "Average": lambda x: "cumulative sum",
    # attention-free
    "FourierMixer": lambda x: "log n",
    "TokenMLP": lambda x: f"{x.up.out_features:,} hidden units",
    "Synthesizer": lambda x: ALL,
    "GatedMLP": lambda x: f"{TOKENS:,} gate weights" + (f", and {ALL}" if x.attend else ""),
    "XCiT": lambda x: "e × e, and 18 neighbours",
    "DynamicConv": lambda x: f"{x.kernel} neighbours",
    "AFT": lambda x: "state of d" if x.bias is None else f"{ALL}, without scores",
    "AveragePool": lambda x: f"{x.window if x.width is None else x.window**2} neighbours",
    # hybrid
    "Branches": lambda x: " and ".join(cost(branch) for branch in x.branches),
    "PersistentMemoryAttention": lambda x: f"{cost(x.inner)}, plus {x.keys.shape[-2]:,} learned",
}


def cost(part: object) -> str:
    """Cost of one token in one head, at `TOKENS` tokens."""
    name = type(part).__name__
    if name not in COSTS:
        raise TypeError(f"docs/make_recipes.py has no cost for {name}: add it to COSTS")
    return COSTS[name](part)


def mean_keys(pattern: Any) -> float:
    return float(pattern.resolve_global_mask(False, False).keys_per_query(TOKENS).double().mean())


def state_size(mixer: Recurrence) -> str:
    inputs, _ = mixer.project_inputs(torch.zeros(1, 1, mixer.dim), None)
    return f"state of {inputs.k.shape[-1]} × {inputs.v.shape[-1]}"


def mean_nodes(tree: BPTransformer) -> float:
    offsets = (0,) * TOKENS.bit_length()
    nodes, _ = visible_nodes(0, TOKENS, tree.near, tree.clip, tree.causal, offsets)
    return (nodes >= 0).sum(1).double().mean().item()


def faster_from() -> dict[str, str]:
    """Length from which each recipe was measured to be faster than dense attention."""
    found: dict[str, list[str]] = {}
    for line in json.loads(CROSSOVER.read_text())["rows"]:
        length = line["faster from"]
        text = "never" if length is None else f"{length:,}"
        found.setdefault(line["recipe"], []).append(text + (" causal" if line["causal"] else ""))
    return {name: ", ".join(texts) for name, texts in found.items()}


# ---------------------------------------------------------------------------------------- pictures
def picture(recipe: Recipe) -> Picture:
    """The pattern of a small example, or its attention map, or the influence of tokens on each
    other."""
    return overlay_picture(build_example(recipe, CELLS), CELLS)


def caption(recipe: Recipe) -> str:
    """What the picture shows."""
    mixer = build_example(recipe, CELLS)
    if pattern_of(mixer) is not None:
        return "pattern"
    return "attention map" if mixer.can.maps else "influence"


def pixels(drawn: Picture) -> list[list[Colour]]:
    """Colours of the cells, row by row."""
    styles, rows = assign_styles([drawn]), []
    for parts, shades in zip(drawn.part.tolist(), drawn.shade.tolist(), strict=True):
        row = []
        for part, shade in zip(parts, shades, strict=True):
            visible = part >= 0
            colour = styles[drawn.parts[part].label].colour if visible else BACKGROUND
            row.append(blend(colour, BACKGROUND, shade) if visible else BACKGROUND)
        rows.append(row)
    return rows


def png(cells: Sequence[Sequence[Colour]]) -> bytes:
    """A palette PNG with `PIXELS` × `PIXELS` pixels per cell and white lines between the cells."""
    white: Colour = (255, 255, 255)
    palette = sorted({white, *(colour for row in cells for colour in row)})
    if len(palette) > 256:
        raise ValueError(f"{len(palette)} colours do not fit a palette")
    index = {colour: number for number, colour in enumerate(palette)}
    lines = []
    for row in cells:
        line = [index[colour] for colour in row for _ in range(PIXELS - 1)]
        line = [
            x for i, x in enumerate(line, 1) for x in ((x, index[white]) if i % 3 == 0 else (x,))
        ]
        lines += [line] * (PIXELS - 1) + [[index[white]] * len(line)]
    data = b"".join(b"\0" + bytes(line) for line in lines)
    size = struct.pack(">IIBBBBB", len(lines[0]), len(lines), 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", size),
        (b"PLTE", b"".join(map(bytes, palette))),
        (b"IDAT", zlib.compress(data, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


# -------------------------------------------------------------------------------------------- page
def row(recipe: Recipe, faster: str) -> str:
    """One line of the table."""
    required = [p.name for p in recipe.parameters.values() if p.default is p.empty]
    mixer = recipe.build(**{name: REQUIRED[name] for name in required})
    can, url = recipe.can(), paper_url(recipe)
    shows = caption(recipe)
    cells = (
        f"`{recipe.name}`",
        f'<img src="images/recipes/{recipe.name}.png" width="96" alt="{shows} of {recipe.name}">',
        recipe.summary.replace("|", "\\|"),
        f"[{recipe.paper}]({url})" if url else recipe.paper,
        recipe.formula.replace("|", "\\|"),
        *("✓" if getattr(can, name) else "–" for name in COLUMNS),
        cost(mixer),
        faster,
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The text of docs/recipes.md."""
    faster = faster_from()
    head = ("recipe", "picture", "summary", "paper", "formula", *COLUMNS, "cost", "faster from")
    lines = [
        "# Recipes",
        "",
        "<!-- generated by docs/make_recipes.py -->",
        "",
        f"All {len(list_recipes())} recipes, by family. `regard show NAME` prints more about one,"
        " and",
        '`regard.create("NAME", dim=..., heads=...)` builds it.',
        "",
        f"- *Picture*: a small example of {CELLS} tokens; rows are queries, columns are "
        "keys. Recipes without a",
        "  pattern show the attention map for random weights and tokens, or, if they have "
        "no attention map, the",
        "  influence of each token on each other token (the Jacobian).",
        "- *Capabilities*: "
        + "; ".join(f"`{name}`: {CAPABILITIES[name]}" for name in COLUMNS)
        + ". See [capabilities.md](capabilities.md).",
        f"- *Cost*: work per token and head at {TOKENS:,} tokens, with default arguments.",
        "- *Faster from*: sequence length from which the forward pass was measured to be "
        "faster than dense",
        "  attention on one CPU (`benchmarks/run.py crossover`); empty if not measured.",
        "- `window=w` means w tokens on each side (±w), unless the summary says otherwise.",
    ]
    for family, title in FAMILIES.items():
        links = ", ".join(f"[{name}]({name})" for name in PAGES[family])
        lines += ["", f"## {family}", "", f"{title[0].upper()}{title[1:]}. Details: {links}.", ""]
        lines += [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
        lines += [
            row(get_recipe(name), faster.get(name, "")) for name in list_recipes(family=family)
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in list_recipes():
        (PICTURES / f"{name}.png").write_bytes(png(pixels(picture(get_recipe(name)))))
    PAGE.write_text(page(), encoding="utf-8")
