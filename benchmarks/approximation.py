"""How near the attentions that estimate softmax come to it, by how much they spend.

    python benchmarks/approximation.py           prints a table, under a minute on one thread

Each estimate is compared with the attention that it estimates, on the same queries, keys and
values: the error is |estimate − exact| / |exact|, over all outputs, the root of the mean square
over seeds. Inputs are

    early    normal queries and keys of standard deviation 1/√3, as fresh projections make them:
             scores deviate by 1/3
    random   normal queries and keys of standard deviation 1: scores deviate by 1
    peaked   queries near some key, three times as long: most of the weight on few keys, as after
             training

The last column is the error of the mean of all values, which knows nothing: an estimate above it is
worth nothing. Results go to benchmarks/results/approximation.json and, with matplotlib,
docs/images/approximation.png.

To add one: a line in `ESTIMATES`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import (
    Attention,
    Band,
    CompressedAttention,
    LinearAttention,
    PrototypeAttention,
    SoftmaxAttention,
)
from regard.attentions import ImprovedClusteredAttention, LSHAttention, NystromAttention
from regard.compression import LengthProjection
from regard.feature import (
    PositiveFeatures,
    RandomFourierFeatures,
    ReluFeatures,
    TrigonometricFeatures,
)
from regard.query_prototypes import QueryClusters
from regard.route import AngularHash

ROOT = Path(__file__).parents[1]
HEADS, TOKENS, WIDTH = 4, 256, 32
SEEDS = 3
KINDS = ("early", "random", "peaked")
Heads = tuple[Tensor, Tensor, Tensor]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attend(q, k, v)


def cosine_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What RFA estimates: softmax of the cosines between queries and keys."""
    return regard.attend(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, scale=1.0)


def shared_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What LSH attention estimates: keys are the queries, of length one, and no token sees
    itself."""
    return regard.attend(q, F.normalize(q, dim=-1), v, pattern=~Band(0, 0))


class Estimate(NamedTuple):
    """attention(size, seed) estimates `exact`, better with a larger size."""

    attention: Callable[[int, int], Attention]
    exact: Callable[[Tensor, Tensor, Tensor], Tensor] = softmax
    sizes: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    shared: bool = False  # keys are the queries


def pooled(rank: int) -> Attention:
    """Linformer whose E and F are not learned but take means of neighbours."""
    memory = LengthProjection(TOKENS, rank, HEADS, share="kv")
    segments = torch.arange(TOKENS) * rank // TOKENS
    means = (segments == torch.arange(rank)[:, None]).double()
    memory.e.data = (means / means.sum(1, keepdim=True))[None]
    return CompressedAttention(memory, SoftmaxAttention())


ESTIMATES = {
    "FAVOR+": Estimate(lambda m, seed: LinearAttention(PositiveFeatures(WIDTH, m, seed=seed))),
    "FAVOR+, independent rows": Estimate(
        lambda m, seed: LinearAttention(PositiveFeatures(WIDTH, m, orthogonal=False, seed=seed))
    ),
    "sin and cos": Estimate(
        lambda m, seed: LinearAttention(TrigonometricFeatures(WIDTH, m, seed=seed))
    ),
    "RFA": Estimate(
        lambda m, seed: LinearAttention(RandomFourierFeatures(WIDTH, m, HEADS, seed=seed)),
        cosine_softmax,
    ),
    "Nyström": Estimate(lambda m, seed: NystromAttention(HEADS, m), sizes=(4, 16, 64, 128)),
    "Linformer, means": Estimate(lambda m, seed: pooled(m), sizes=(4, 16, 64, 128)),
    "clustered": Estimate(
        lambda m, seed: PrototypeAttention(QueryClusters(WIDTH, m, seed=seed), SoftmaxAttention()),
        sizes=(4, 16, 64, 128),
    ),
    "clustered, improved": Estimate(
        lambda m, seed: ImprovedClusteredAttention(QueryClusters(WIDTH, m, seed=seed), 32),
        sizes=(4, 16, 64, 128),
    ),
    "LSH, rounds": Estimate(
        lambda m, seed: LSHAttention(
            AngularHash(HEADS, WIDTH, buckets=16, rounds=m, seed=seed), chunk=32
        ),
        shared_softmax,
        sizes=(1, 2, 4, 8, 16),
        shared=True,
    ),
    "relu (another kernel)": Estimate(
        lambda m, seed: LinearAttention(ReluFeatures(WIDTH, m, seed=seed))
    ),
}


def inputs(kind: str, seed: int) -> Heads:
    """Heads of one of `KINDS`."""
    make = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, HEADS, TOKENS, WIDTH, dtype=torch.float64, generator=make) for _ in range(3)
    )
    if kind == "early":
        q, k = q / 3**0.5, k / 3**0.5
    if kind == "peaked":
        near = torch.randint(TOKENS, (TOKENS,), generator=make)
        q = 3 * (k[:, :, near] + 0.5 * q) / 1.25**0.5
    return q, k, v


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def mean_error(found: list[float]) -> float:
    return (sum(e * e for e in found) / len(found)) ** 0.5


@torch.no_grad()
def measure(estimate: Estimate, kind: str) -> tuple[dict[int, float], float]:
    """The error at each size, and that of the plain mean of the values."""
    errors: dict[int, list[float]] = {size: [] for size in estimate.sizes}
    plain = []
    for seed in range(SEEDS):
        q, k, v = inputs(kind, seed)
        want, keys = estimate.exact(q, k, v), q if estimate.shared else k
        plain.append(error(v.mean(2, keepdim=True).expand_as(want), want))
        for size, found in errors.items():
            found.append(
                error(estimate.attention(size, 100 + seed).double().eval()(q, keys, v)[0], want)
            )
    return {size: mean_error(found) for size, found in errors.items()}, mean_error(plain)


def draw(rows: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(KINDS), figsize=(13, 5), sharey=True, layout="constrained")
    for axis, kind in zip(axes, KINDS, strict=True):
        for number, row in enumerate(row for row in rows if row["inputs"] == kind):
            errors = row["error"]
            line = axis.plot(
                list(errors),
                list(errors.values()),
                marker="os^dvPX*<>"[number % 10],
                label=row["name"],
            )  # type: ignore[attr-defined,call-overload]
            axis.axhline(
                row["error of the mean"], color=line[0].get_color(), linewidth=0.7, linestyle=":"
            )
        axis.set(
            xscale="log",
            yscale="log",
            ylim=(0.01, 10),
            xlabel="features, landmarks, rank, clusters or rounds",
            title=f"{kind} inputs",
        )
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("error beside what is estimated")
    axes[-1].legend(
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.02, 1),
        title="dotted: the mean of all values",
        title_fontsize=8,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Print the table, and write it."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        sizes = sorted({size for estimate in ESTIMATES.values() for size in estimate.sizes})
        print(f"\n{kind:26}" + "".join(f"{size:>9}" for size in sizes) + "     mean")
        for name, estimate in ESTIMATES.items():
            errors, plain = measure(estimate, kind)
            rows.append({"name": name, "inputs": kind, "error": errors, "error of the mean": plain})
            cells = (f"{errors[size]:9.2g}" if size in errors else " " * 9 for size in sizes)
            print(f"{name:26}" + "".join(cells) + f"{plain:9.2g}")
    head = {
        "heads": HEADS,
        "tokens": TOKENS,
        "width": WIDTH,
        "seeds": SEEDS,
        "torch": torch.__version__,
    }
    (ROOT / "benchmarks/results/approximation.json").write_text(
        json.dumps({**head, "rows": rows}, indent=1) + "\n"
    )
    try:
        draw(rows, ROOT / "docs/images/approximation.png")
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main()
