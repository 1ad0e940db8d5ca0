"""On what models are judged: samples of all classes, splits of sorted files, and the baselines that
they have to beat."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from regard.compare import ResultRow
from regard.compare.formatting import describe_verdict
from regard.compare.results import compute_verdicts
from regard.tasks import create_task
from regard.tasks.baselines import CONSTANT, NGRAM, TFIDF, NGramModel

SIZES = {"a": 300, "b": 100, "c": 37, "d": 5, "e": 1}


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def sorted_rows():
    """Texts of which each class has words of its own, sorted by class."""
    return [
        {"text": f"{label}{i % 7} {label}{i % 5} number {i}", "label": label}
        for label, count in SIZES.items()
        for i in range(count)
    ]


def class_counts(task, split):
    names = task.processor.labels
    return Counter(names[c] for c in task.classes_of(split))


def test_splits_of_a_sorted_file_have_all_classes(sorted_rows, tmp_path):
    """Fails if a class is missing where it should not, or depends on the order of the file."""
    task = create_task("classify", data=write_rows(tmp_path / "sorted.jsonl", sorted_rows))
    for split in ("valid", "test"):
        counts = class_counts(task, split)
        assert (counts["a"], counts["b"]) == (30, 10) and counts["c"] in (3, 4)
    assert class_counts(task, "train")["e"] == 1
    shuffled = [sorted_rows[i] for i in np.random.default_rng(0).permutation(len(sorted_rows))]
    other = create_task("classify", data=write_rows(tmp_path / "other.jsonl", shuffled))
    for split in ("train", "valid", "test"):
        assert class_counts(other, split) == class_counts(task, split)
    longer = [*sorted_rows, *({"text": f"x {i}", "label": "a"} for i in range(50))]
    longer = create_task("classify", data=write_rows(tmp_path / "longer.jsonl", longer))
    assert set(task.texts["test"].hashes) <= set(longer.texts["test"].hashes)


def test_samples_are_random_and_have_all_classes(sorted_rows, tmp_path):
    """Fails if an evaluation reads the first examples, which a sorted file makes one class."""
    task = create_task("classify", data=write_rows(tmp_path / "x.jsonl", sorted_rows))
    sample = task.sample("train", 100)
    counts = np.bincount(task.classes_of("train")[sample], minlength=5)
    shares = 100 * np.bincount(task.classes_of("train"), minlength=5) / task.size("train")
    assert (abs(counts - shares) <= 1).all() and len(set(sample.tolist())) == 100
    assert (task.sample("train", 40) == sample[:40]).all()
    assert sorted(task.sample("test", 1000).tolist()) == list(range(task.size("test")))
    generated = create_task("lm")
    assert len(set(generated.sample("train", 512).tolist())) == 512
    assert generated.sample("valid", 20).tolist() != list(range(20))


def test_copies_and_empty_rows_are_said(sorted_rows, tmp_path):
    """Fails if texts that are in two splits, or rows that are left out, go without a word."""
    assert not create_task("classify", data=write_rows(tmp_path / "x.jsonl", sorted_rows)).notes()
    rows = [*sorted_rows, *sorted_rows, {"text": "  ", "label": "a"}, {"text": None, "label": "b"}]
    notes = create_task("classify", data=write_rows(tmp_path / "y.jsonl", rows)).notes()
    assert notes[0] == "2 rows without 'text' or 'label' were left out."
    assert "texts of the test split are also in the train split" in notes[-1]


def test_tfidf(sorted_rows, tmp_path):
    """Fails if the baseline does not see the words, or the test examples are not those asked."""
    pytest.importorskip("sklearn")
    data = write_rows(tmp_path / "x.jsonl", sorted_rows)
    task = create_task("classify", data=data, length=4)  # it reads whole texts all the same
    test = task.sample("test", 1000).tolist()
    scores = {name: task.metric.compute(score(test)) for name, score in task.baselines().items()}
    assert list(scores) == [CONSTANT, TFIDF]
    assert scores[TFIDF] > 0.95 > 0.8 > scores[CONSTANT]
    only_a = [i for i in test if task.processor.labels[task.classes_of("test")[i]] == "a"]
    assert task.metric.compute(task.baselines()[CONSTANT](only_a)) == 1


def test_ngrams_by_hand():
    """Fails if the smoothing is not that of Witten and Bell: every context sums to one."""
    model = NGramModel([1, 2, 1, 2, 1, 3], vocab_size=4, order=2)
    unigram = {t: (n + 3 / 4) / 9 for t, n in {0: 0, 1: 3, 2: 2, 3: 1}.items()}
    for token, p in unigram.items():
        assert model.probability([], token) == pytest.approx(p)
        assert model.probability([0], token) == pytest.approx(p)
        after_one = ({2: 2, 3: 1}.get(token, 0) + 2 * p) / 5
        assert model.probability([1], token) == pytest.approx(after_one)
    for context in ([], [1], [2, 1], [3, 3]):
        assert math.fsum(model.probability(context, t) for t in range(4)) == pytest.approx(1)


def test_ngrams_of_the_built_in_language():
    """Fails if n-grams are worse than frequencies, or better than the entropy."""
    task = create_task("lm", length=64)
    test = task.sample("test", 20).tolist()
    scores = {name: task.metric.compute(score(test)) for name, score in task.baselines().items()}
    assert task.best < scores[NGRAM] < scores[CONSTANT] - 1


def verdict(*rows):
    made = [
        ResultRow(
            name, "t", 64, "accuracy", True, [score], speed, is_baseline=name in (CONSTANT, TFIDF)
        )
        for name, score, speed in rows
    ]
    return compute_verdicts(made)[0]


def test_a_baseline_that_wins_is_named():
    """Fails if the table hides that no network is needed."""
    found = verdict(("vanilla", 0.7, 100.0), (CONSTANT, 0.3, math.nan), (TFIDF, 0.8, math.nan))
    assert found.better_baseline.mixer == TFIDF and found.recommended.mixer == "vanilla"
    assert describe_verdict(found).startswith("TF-IDF + linear, which needs no network, has 0.8")
    found = verdict(("vanilla", 0.9, 100.0), (CONSTANT, 0.3, math.nan), (TFIDF, 0.8, math.nan))
    assert found.better_baseline is None and "network" not in describe_verdict(found)
