"""A window in a BERT of transformers, beside its own attention: `python benchmarks/hub.py [tokens]`.

Random weights, the sizes of bert-base but for the number of layers, one example without padding and two with it, forward.
Best of `ROUNDS`, by turns.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import BertConfig, BertModel
from transformers.utils import logging

import regard.hub  # noqa: F401

LAYERS, ROUNDS = 1, 2
NAMES = ("sdpa", "regard:vanilla", "regard:local?window=256")


def seconds(model: BertModel, name: str, given: dict[str, torch.Tensor]) -> float:
    """One forward pass."""
    model.set_attn_implementation(name)
    with torch.no_grad():
        start = time.perf_counter()
        model(**given)
        return time.perf_counter() - start


def main(n: int) -> None:
    """Print a table."""
    logging.set_verbosity_error()
    model = BertModel(BertConfig(num_hidden_layers=LAYERS, max_position_embeddings=n)).eval()
    ids = torch.randint(5, 1000, (2, n), generator=torch.Generator().manual_seed(0))
    ragged = (torch.arange(n) < torch.tensor([[n], [3 * n // 4]])).long()
    calls = {"one example": {"input_ids": ids[:1]}, "two, padded": {"input_ids": ids, "attention_mask": ragged}}
    print(f"| {n:,} tokens, {LAYERS} layer, {torch.get_num_threads()} threads |" + "".join(f" {call} |" for call in calls))
    print("| --- |" + " ---: |" * len(calls))
    best = {(name, call): float("inf") for name in NAMES for call in calls}
    for _ in range(ROUNDS):
        for name, call in best:
            best[name, call] = min(best[name, call], seconds(model, name, calls[call]))
    for name in NAMES:
        print(f"| `{name}` |" + "".join(f" {best[name, call]:.2f} s |" for call in calls))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096)
