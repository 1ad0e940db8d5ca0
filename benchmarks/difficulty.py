"""How hard deep stacks are to train, before the first step: the probes of the Admin paper (arXiv
2004.08249).

    python benchmarks/difficulty.py            a few minutes on one core; with matplotlib, also
                                               docs/images/difficulty.png
    python benchmarks/difficulty.py --draw     draw the picture again from saved results

Left     E |F(x, W) − F(x, W + δ)|² for δ ~ N(0, 0.001²) in every weight, against the depth of the
         stack
Middle   the same, where δ is the first step of Adam with lr=0.001 and no warm-up
Right    gradient norm of each layer in a stack of 24, relative to the last layer; without ReZero,
         whose weights have no
         gradient at first, only its α

Causal stacks of softmax attention and feed-forward layers of width 64, initialized with Xavier's
normal distribution (DeepNorm: scaled by β). x is normal, 4 examples of 32 tokens; the loss has
random targets behind a fixed random projection. Residuals without a final norm get one. Admin is
initialized on x. Lines are medians of 5 seeds, bands go from the smallest to the largest. Results
go to benchmarks/results/difficulty.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.block import Block
from regard.deep_init import admin_init, deepnorm_init
from regard.ffn import MLP
from regard.measure.probe import adam_first_step, amplification, gradient_norms, random_perturbation
from regard.norm import LayerNorm, NoNorm
from regard.residual import RESIDUALS, deepnorm_scales, get_residual
from regard.stack import SequentialStack

ROOT = Path(__file__).parents[1]
SCHEMES = {
    "post": "post-norm",
    "pre": "pre-norm",
    "admin": "Admin",
    "deepnorm": "DeepNorm",
    "rezero": "ReZero",
}
COLOURS = {
    "post": "#d64933",
    "pre": "#2e6ed8",
    "admin": "#22a06b",
    "deepnorm": "#9a58c4",
    "rezero": "#f49d37",
}
DEPTHS, SEEDS, LOOKED_AT = (6, 12, 24, 48), 5, 24
DIM, HEADS, TOKENS, BATCH, CLASSES, SIZE = 64, 4, 32, 4, 16, 1e-3
RESULT = ROOT / "benchmarks" / "results" / "difficulty.json"
Found = dict[str, dict[str, list[dict]]]  # by scheme and depth: what each seed gives


def stack(name: str, layers: int, seed: int, x: Tensor) -> nn.Module:
    """Ready for its first step."""
    torch.manual_seed(seed)
    make = get_residual(name, layers)
    mixers = [regard.create("vanilla", dim=DIM, heads=HEADS, causal=True) for _ in range(layers)]
    end = LayerNorm(DIM) if RESIDUALS[name].needs_final_norm else NoNorm(DIM)
    model = nn.Sequential(
        SequentialStack([Block(mixer, MLP(DIM), residual=make) for mixer in mixers]), end
    )
    deepnorm_init(model, deepnorm_scales(layers).beta if name == "deepnorm" else 1.0)
    if name == "admin":
        admin_init(model, x)
    return model


def probe(name: str, layers: int, seed: int) -> dict[str, float | list[float]]:
    """Both amplifications, and the gradient of each layer."""
    draw = torch.Generator().manual_seed(seed)
    x, read = (
        torch.randn(BATCH, TOKENS, DIM, generator=draw),
        torch.randn(DIM, CLASSES, generator=draw) / DIM**0.5,
    )
    targets = torch.randint(CLASSES, (BATCH * TOKENS,), generator=draw)
    model = stack(name, layers, seed, x)
    loss = F.cross_entropy((model(x) @ read).flatten(0, 1), targets)
    by_layer = [0.0] * layers
    for gradient in gradient_norms(model, loss):
        by_layer[gradient.layer] += gradient.norm**2
    return {
        "random": short(amplification(model, random_perturbation(model, SIZE, seed=seed), x)),
        "step": short(amplification(model, adam_first_step(model, loss, SIZE), x)),
        "gradients": [short(math.sqrt(square)) for square in by_layer],
    }


def short(value: float) -> float:
    """Four digits, for the file."""
    return float(f"{value:.4g}")


def measure() -> Found:
    """All of it."""
    found: Found = defaultdict(dict)
    for name in SCHEMES:
        for layers in DEPTHS:
            found[name][str(layers)] = [probe(name, layers, seed) for seed in range(SEEDS)]
    return found


def show(found: Found) -> None:
    """A line for each scheme."""
    for kind in ("random", "step"):
        print(f"{kind:12}" + "".join(f"{layers:>12}" for layers in DEPTHS) + "   layers")
        for name, rows in found.items():
            middle = [median(run[kind] for run in rows[str(layers)]) for layers in DEPTHS]
            print(f"  {SCHEMES[name]:10}" + "".join(f"{value:12.2g}" for value in middle))
    print(f"gradient of the first layer, of the last = 1, of {LOOKED_AT}")
    for name, rows in found.items():
        print(
            f"  {SCHEMES[name]:10}"
            + "".join(f"{median(each):12.3g}" for each in relative(rows)[:1])
        )


def relative(rows: dict[str, list[dict]]) -> list[list[float]]:
    """By layer, of each seed: the gradient, of the last layer = 1; nothing where there is none."""
    runs = [run["gradients"] for run in rows[str(LOOKED_AT)]]
    return (
        [[run[i] / run[-1] for run in runs] for i in range(LOOKED_AT)]
        if all(run[-1] for run in runs)
        else []
    )


def draw(found: Found, path: Path) -> None:
    """Three panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    for name, rows in found.items():
        for panel, kind in zip(panels, ("random", "step"), strict=False):
            band(
                panel,
                DEPTHS,
                [[run[kind] for run in rows[str(layers)]] for layers in DEPTHS],
                name,
                "o",
            )
        by_layer = relative(rows)
        band(panels[2], range(1, len(by_layer) + 1), by_layer, name, "")
    guide(panels[0], found, "random")
    titles = (
        "Random moves of all weights, σ = 0.001",
        "Adam's first step, rate 0.001",
        f"Gradients within {LOOKED_AT} layers",
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set(
            title=title,
            yscale="log",
            xlabel="layers of the stack",
            ylabel="mean squared change of an output",
        )
        panel.grid(True, which="major", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[:2]:
        panel.set_xscale("log")
        panel.set_xticks(DEPTHS, [str(d) for d in DEPTHS])
        panel.minorticks_off()
    panels[1].set_ylabel("")
    panels[2].set(xlabel="layer", ylabel="norm of the gradient, of the last layer = 1")
    panels[2].set_xticks([1, 6, 12, 18, 24])
    panels[2].set_yticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
    panels[2].minorticks_off()
    panels[1].axhline(2, color="#777777", linewidth=0.8)
    panels[1].text(
        DEPTHS[-1],
        2.3,
        "2: outputs that have nothing in common",
        ha="right",
        fontsize=8.5,
        color="#555555",
    )
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=110)


def band(panel, at, values: list[list[float]], name: str, marker: str) -> None:
    """The median of each place, and all seeds around it."""
    low, high = ([pick(each) for each in values] for pick in (min, max))
    panel.plot(
        at,
        [median(each) for each in values],
        color=COLOURS[name],
        marker=marker,
        label=SCHEMES[name],
    )
    panel.fill_between(at, low, high, color=COLOURS[name], alpha=0.13, linewidth=0)


def guide(panel, found: Found, kind: str) -> None:
    """What growth with the depth looks like, from where post-norm begins."""
    start = median(run[kind] for run in found["post"][str(DEPTHS[0])])
    line = [start * layers / DEPTHS[0] for layers in DEPTHS]
    panel.plot(DEPTHS, line, color="#777777", linestyle=":", label="grows as the depth")


def main() -> None:
    """Measure and keep, or read what was kept; print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    torch.set_num_threads(1)
    if not parser.parse_args().draw:
        report = {
            "dim": DIM,
            "tokens": TOKENS,
            "batch": BATCH,
            "seeds": SEEDS,
            "size": SIZE,
            "rows": measure(),
        }
        RESULT.write_text(json.dumps(report) + "\n")
    found = json.loads(RESULT.read_text())["rows"]
    show(found)
    draw(found, ROOT / "docs" / "images" / "difficulty.png")


if __name__ == "__main__":
    main()
