"""Time attention names in transformers models: `python benchmarks/hf_attention.py [tokens]`.

First the forward pass of a BERT with random weights and the sizes of bert-base, except for the
number of layers: one example without padding, and two with padding. Then the attention of one Llama
layer for one new token at several cache lengths. Each number is the best of several rounds.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AttentionInterface, BertConfig, BertModel, LlamaConfig, LlamaModel
from transformers.utils import logging

from regard.hf.masks import create_mask
from regard.hf.patching import register_name

LAYERS, ROUNDS = 1, 2
NAMES = ("sdpa", "regard:vanilla", "regard:local?window=256")


def seconds(model: BertModel, name: str, given: dict[str, torch.Tensor]) -> float:
    """Time of one forward pass."""
    model.set_attn_implementation(name)
    with torch.no_grad():
        start = time.perf_counter()
        model(**given)
        return time.perf_counter() - start


def token_seconds(name: str, m: int) -> float:
    """Time of one layer with 8 heads of width 64 for one token after m - 1 others."""
    layer = (
        LlamaModel(
            LlamaConfig(num_hidden_layers=1, hidden_size=512, num_attention_heads=8, vocab_size=9)
        )
        .layers[0]
        .self_attn
    )
    q, k, v = (
        torch.randn(1, 8, n, 64, generator=torch.Generator().manual_seed(n)) for n in (1, m, m)
    )
    mask, function = create_mask(1, 1, m, q_offset=m - 1), AttentionInterface()[name]
    times = []
    with torch.no_grad():
        for _ in range(20):
            start = time.perf_counter()
            function(layer, q, k, v, mask)
            times.append(time.perf_counter() - start)
    return min(times)


def main(n: int) -> None:
    """Print both tables."""
    logging.set_verbosity_error()
    model = BertModel(BertConfig(num_hidden_layers=LAYERS, max_position_embeddings=n)).eval()
    ids = torch.randint(5, 1000, (2, n), generator=torch.Generator().manual_seed(0))
    ragged = (torch.arange(n) < torch.tensor([[n], [3 * n // 4]])).long()
    calls = {
        "one example": {"input_ids": ids[:1]},
        "two, padded": {"input_ids": ids, "attention_mask": ragged},
    }
    print(
        f"| {n:,} tokens, {LAYERS} layer, {torch.get_num_threads()} threads |"
        + "".join(f" {call} |" for call in calls)
    )
    print("| --- |" + " ---: |" * len(calls))
    best = {(name, call): float("inf") for name in NAMES for call in calls}
    for _ in range(ROUNDS):
        for name, call in best:
            best[name, call] = min(best[name, call], seconds(model, name, calls[call]))
    for name in NAMES:
        print(f"| `{name}` |" + "".join(f" {best[name, call]:.2f} s |" for call in calls))
    lengths = (512, 2048, 8192)
    print(
        "\n| one new token, cache length |"
        + "".join(f" {m:,} |" for m in lengths)
        + "\n| --- |"
        + " ---: |" * len(lengths)
    )
    for name in (*NAMES[1:], "regard:sinks?window=256", "regard:linear", "regard:performer"):
        register_name(name)
        print(
            f"| `{name}` |" + "".join(f" {1e3 * token_seconds(name, m):.2f} ms |" for m in lengths)
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096)
