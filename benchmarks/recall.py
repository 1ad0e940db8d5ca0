"""What mechanisms that are sparse by content find, beside what they cost.

    python benchmarks/recall.py              under a minute on a free core

Tokens are drawn around topics. For each query the 32 keys with the highest scores of full attention
are the truth (itself left out), and recall is how many of them are among the 32 keys to which the
mechanism gives most weight. Beside it stand the keys that it computes scores for, the recall of a
window of as many keys, and its CPU time in one thread, in turn with dense SDPA.

Orders of the tokens: "shuffled", every token of a random topic; "runs", 64 tokens of one topic
after each other. Results go to benchmarks/results/recall.json.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attentions import LSHAttention, RoutedAttention
from regard.mixers import Sinkhorn
from regard.route import AngularHash, BlockSort, KMeans

RESULT = Path(__file__).parent / "results" / "recall.json"
WIDTH, TOP, CHUNK, TOPICS, SPREAD = 64, 32, 64, 16, 0.6
FOUND_AT, TIMED_AT, HEADS = 2048, (512, 2048, 8192), 2
Attend = Callable[
    [Tensor, Tensor], Tensor
]  # heads (b h n e) that are queries and keys, and values: (b h n f)


def tokens(n: int, order: str, seed: int = 0, heads: int = 1) -> Tensor:
    """(1 h n e): tokens around topics, the same topics for every seed."""
    topics = F.normalize(
        torch.randn(TOPICS, WIDTH, generator=torch.Generator().manual_seed(99)), dim=-1
    )
    draw = torch.Generator().manual_seed(seed)
    run = 1 if order == "shuffled" else CHUNK
    topic = torch.randint(TOPICS, (heads, math.ceil(n / run)), generator=draw).repeat_interleave(
        run, 1
    )[:, :n]
    noise = SPREAD * F.normalize(torch.randn(heads, n, WIDTH, generator=draw), dim=-1)
    return 8 * F.normalize(topics[topic] + noise, dim=-1)[None]


def truth(x: Tensor) -> Tensor:
    """(n 32): the keys with the highest scores, without the query itself."""
    return (x[0, 0] @ x[0, 0].T).fill_diagonal_(-torch.inf).topk(TOP, -1).indices


def recall(weights: Tensor, x: Tensor) -> float:
    """Of a map (n n)."""
    weights = weights.clone().fill_diagonal_(0)
    found = torch.zeros_like(weights, dtype=torch.bool).scatter(
        1, weights.topk(TOP, -1).indices, True
    ) & (weights > 0)
    return found.gather(1, truth(x)).double().mean().item()


# ---------------------------------------------------------------------------------- the mechanisms
def hashed(n: int, heads: int, rounds: int) -> Attend:
    attention = LSHAttention(
        AngularHash(heads, WIDTH, buckets=max(2, 2 * n // CHUNK), rounds=rounds), chunk=CHUNK
    )
    return lambda x, v: attention(x, x, v)[0]


def routed(n: int, heads: int, clusters: int) -> Attend:
    """With centroids that have followed the tokens of 40 sequences."""
    route = KMeans(heads, WIDTH, clusters=clusters, decay=0.8)
    for seed in range(1, 41):
        x = F.layer_norm(tokens(1024, "shuffled", seed, heads), (WIDTH,))
        route(x, x, None)
    attention = RoutedAttention(route.eval(), normalize=True)
    return lambda x, v: attention(x, x, v)[0]


def sinkhorn(n: int, heads: int, cut: int | None = None, steps: int = 0) -> Attend:
    """With a sort network that has learned for so many steps to do what full attention does."""
    torch.manual_seed(0)
    sort = BlockSort(heads * WIDTH, heads, blocks=math.ceil(n / CHUNK))
    mixer = Sinkhorn(heads * WIDTH, heads, sort, block=CHUNK, cut=cut).train()
    learner = torch.optim.Adam(sort.parameters(), lr=3e-3)

    def attend(x: Tensor, v: Tensor) -> Tensor:
        flat = x.transpose(1, 2).flatten(2)
        return mixer._attend(x, x, v, mixer._summaries(flat, None)[0], None)

    for seed in range(1, steps + 1):
        x = tokens(n, "runs", seed, heads)
        loss = F.mse_loss(attend(x, x), F.scaled_dot_product_attention(x, x, x))
        learner.zero_grad()
        loss.backward()
        learner.step()
    mixer.eval()
    return attend


def mechanisms(n: int, heads: int, *, trained: bool) -> dict[str, tuple[Attend, int]]:
    """By name: the call, and how many keys it computes scores for, of a query."""
    root = 2 ** round(math.log2(n) / 2)  # about √n
    steps = 30 if trained else 0
    return {
        **{f"reformer, {r} rounds": (hashed(n, heads, r), 2 * CHUNK * r) for r in (1, 4, 8)},
        "routing, √n clusters": (routed(n, heads, root), n // root),
        f"routing, {TOPICS} clusters": (routed(n, heads, TOPICS), n // TOPICS),
        "sinkhorn": (sinkhorn(n, heads, None, steps), 2 * CHUNK),
        "sinkhorn, SortCut of 4": (sinkhorn(n, heads, 4, steps), 4 * CHUNK),
    }


# --------------------------------------------------------------------------------------- measuring
def window(x: Tensor, keys: int) -> float:
    """The recall of a window of so many keys."""
    at = torch.arange(x.shape[2])
    near = (at[:, None] - at).abs() <= keys // 2
    return recall(torch.softmax((x[0, 0] @ x[0, 0].T).masked_fill(~near, -torch.inf), -1), x)


def beside_dense(call: Attend, n: int, times: int = 3) -> dict[str, float]:
    """The medians of the call and of dense SDPA, taken in turn after a round to warm up, and of
    their ratios."""
    x, taken = tokens(n, "shuffled", heads=HEADS), {"ms": [], "dense ms": []}
    for _ in range(times + 1):
        for name, f in (
            ("ms", lambda: call(x, x)),
            ("dense ms", lambda: F.scaled_dot_product_attention(x, x, x)),
        ):
            start = time.process_time()  # of one thread: other work on the machine counts less
            f()
            taken[name].append(1e3 * (time.process_time() - start))
    ratios = [a / b for a, b in zip(taken["ms"][1:], taken["dense ms"][1:], strict=True)]
    return {name: statistics.median(each[1:]) for name, each in taken.items()} | {
        "of dense": statistics.median(ratios)
    }


def main() -> None:
    """Print the table and write the file."""
    torch.set_num_threads(1)
    inputs = {order: tokens(FOUND_AT, order) for order in ("shuffled", "runs")}
    one = torch.eye(FOUND_AT)[None, None]
    rows = []
    for name, (call, keys) in mechanisms(FOUND_AT, 1, trained=True).items():
        row: dict[str, object] = {"mechanism": name, "keys": keys}
        with torch.no_grad():
            for order, x in inputs.items():
                row[f"recall, {order}"] = recall(call(x, one)[0, 0], x)
                row[f"window, {order}"] = window(x, keys)
        rows.append(row)
    for n in TIMED_AT:
        timed = mechanisms(n, HEADS, trained=False)
        for row, (call, keys) in zip(rows, timed.values(), strict=True):
            with torch.no_grad():
                row[f"at {n}"] = {"keys": keys, **beside_dense(call, n)}
    report: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "heads": HEADS,
        "width": WIDTH,
        "tokens": FOUND_AT,
    }
    report |= {"load of the machine": os.getloadavg()[0], "rows": rows}
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    show(rows)


def show(rows: list[dict]) -> None:
    """A line for each mechanism."""
    print(
        f"{'':24} {'keys':>5} {'recall: shuffled (window)':>27} {'runs (window)':>15}   "
        f"ms, times dense, at {TIMED_AT}"
    )
    for row in rows:
        found = [
            f"{row[f'recall, {order}']:.2f} ({row[f'window, {order}']:.2f})"
            for order in ("shuffled", "runs")
        ]
        times = [
            f"{row[f'at {n}']['ms']:5.0f} ({row[f'at {n}']['of dense']:.2f})" for n in TIMED_AT
        ]
        print(
            f"{row['mechanism']:24} {row['keys']:5} {found[0]:>27} {found[1]:>15}   "
            f"{'   '.join(times)}"
        )


if __name__ == "__main__":
    main()
