"""Baselines without a network, which a user would take instead: they come with every comparison.

A baseline is a function: indices of test examples -> the statistics (n, k) of the task's first
metric, so that it is compared with the models on the same examples.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.models.losses import IGNORE_INDEX
from regard.tasks.tokenizers import split_words

if TYPE_CHECKING:
    from regard.tasks.base import Task

Baseline = Callable[[Sequence[int]], Tensor]

CONSTANT, TFIDF, NGRAM = "constant", "TF-IDF + linear", "n-grams"
EXAMPLES = 512  # training examples from which the constant baseline learns
MAX_TEXTS = 20_000  # training texts of TF-IDF, a random sample: some seconds
MAX_TOKENS = 500_000  # training tokens of n-grams, in blocks from the whole split: some seconds
NGRAM_BLOCKS = 50
NGRAM_ORDER = 4  # tokens of context


def constant(task: Task, test: Sequence[int]) -> Tensor:
    """Predict the same for every input: the training frequencies of the classes (with add-one
    smoothing), so for accuracy the majority class; or the mean of the numbers.
    """
    indices = task.sample("train", EXAMPLES).tolist()
    labels = [task.example("train", index).targets["labels"] for index in indices]
    batch_size = 64
    batches = [
        task.batch("test", test[first : first + batch_size])
        for first in range(0, len(test), batch_size)
    ]
    if labels[0].is_floating_point():
        mean = torch.stack(labels).double().mean(0)
        outputs = [mean.expand(batch.size, -1) for batch in batches]
    else:
        classes = _count_classes(task)
        flat = torch.cat([label.view(-1) for label in labels])
        counts = torch.bincount(flat[flat != IGNORE_INDEX], minlength=classes).double() + 1
        logits = (counts / counts.sum()).log()
        outputs = [logits.expand(*batch.targets["labels"].shape, -1) for batch in batches]
    metric = task.metric
    if metric.needs_predictions:
        raise ValueError(f"{CONSTANT}: {metric.name} is computed from predictions, not classes.")
    parts = [metric.update(out, batch, []) for out, batch in zip(outputs, batches, strict=True)]
    return metric.merge(parts)


def _count_classes(task: Task) -> int:
    """Number of classes of the head that a task needs."""
    needs = task.needs
    tokens = needs.input if needs.target is None else needs.target  # of a language model
    classes: int = getattr(needs.head, "num_classes", getattr(tokens, "vocab_size", 0))
    return classes


def tfidf_linear(
    train: tuple[Sequence[str], np.ndarray], test: tuple[Sequence[str], np.ndarray]
) -> Tensor:
    """Statistics of `Accuracy` of a linear support vector machine on TF-IDF of words and pairs of
    words."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_pipeline
        from sklearn.svm import LinearSVC
    except ImportError:
        raise ImportError(
            f"{TFIDF} needs the package scikit-learn: pip install 'regard[text]'"
        ) from None
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\S+")
    model = make_pipeline(words, LinearSVC(random_state=0))
    model.fit(*train)
    correct = torch.as_tensor(model.predict(test[0]) == test[1]).double()
    return torch.stack((correct, torch.ones_like(correct)), -1)


def pair_linear(
    train: tuple[Sequence[tuple[str, str]], np.ndarray],
    test: tuple[Sequence[tuple[str, str]], np.ndarray],
) -> Tensor:
    """Statistics of `Accuracy` of logistic regression on pairs of texts: TF-IDF of the words and
    pairs of words of each text, and how far their words overlap."""
    try:
        from scipy.sparse import csr_matrix, hstack
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise ImportError(
            "logistic regression needs the package scikit-learn: pip install 'regard[text]'"
        ) from None
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, tokenizer=split_words)
    vectorizer.set_params(token_pattern=None).fit([text for pair in train[0] for text in pair])

    def features(pairs: Sequence[tuple[str, str]]) -> Any:
        one, two = (vectorizer.transform(texts) for texts in zip(*pairs, strict=True))
        cosine = np.asarray(one.multiply(two).sum(1)).ravel()
        rows = []
        for first, second in pairs:
            a, b = set(split_words(first)), set(split_words(second))
            sizes = max(len(a), 1), max(len(b), 1)
            both = len(a & b)
            rows.append(
                (both / max(len(a | b), 1), both / sizes[0], both / sizes[1], sizes[0] / sizes[1])
            )
        overlap = csr_matrix(np.column_stack((cosine, np.array(rows))))
        return hstack((one, two, overlap)).tocsr()

    model = LogisticRegression(max_iter=1000, C=10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 1,000 iterations are enough for a baseline
        model.fit(features(train[0]), train[1])
    correct = torch.as_tensor(model.predict(features(test[0])) == test[1]).double()
    return torch.stack((correct, torch.ones_like(correct)), -1)


def linear_classifier(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> Tensor:
    """Statistics of `Accuracy` of logistic regression on standardised features (n, f)."""
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        raise ImportError(
            "logistic regression needs the package scikit-learn: pip install 'regard[text]'"
        ) from None
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, C=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 200 iterations are enough for a baseline
        model.fit(*train)
    correct = torch.as_tensor(model.predict(test[0]) == test[1]).double()
    return torch.stack((correct, torch.ones_like(correct)), -1)


def ridge(
    train: tuple[np.ndarray, Sequence[str] | None],
    targets: np.ndarray,
    test: tuple[np.ndarray, Sequence[str] | None],
) -> np.ndarray:
    """Predictions (n, o) of ridge regression.

    Args:
        train, test: Standardised numbers (n, c), and texts (n) for TF-IDF of words and pairs of
            words, or None.
        targets: The numbers (n, o) of the training rows.
    """
    try:
        from scipy.sparse import csr_matrix, hstack
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import Ridge
    except ImportError:
        raise ImportError(
            "ridge regression needs the package scikit-learn: pip install 'regard[text]'"
        ) from None
    (numbers, texts), (test_numbers, test_texts) = train, test
    inputs: list[Any] = [numbers, test_numbers]
    if texts is not None and test_texts is not None:
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\S+")
        found = words.fit_transform(texts), words.transform(test_texts)
        inputs = [
            hstack((csr_matrix(x), y)).tocsr()
            for x, y in zip((numbers, test_numbers), found, strict=True)
        ]
    predicted = Ridge(alpha=1.0).fit(inputs[0], targets).predict(inputs[1])
    return np.asarray(predicted, dtype=float).reshape(len(test_numbers), -1)


def spread_blocks(stream: np.ndarray, count: int = MAX_TOKENS) -> np.ndarray:
    """At most `count` tokens of a stream, in blocks that are spread evenly: a text changes."""
    if len(stream) <= count:
        return stream
    size = count // NGRAM_BLOCKS
    starts = np.linspace(0, len(stream) - size, NGRAM_BLOCKS).astype(int)
    return np.concatenate([stream[start : start + size] for start in starts])


class NGramModel:
    """Interpolated n-grams with Witten-Bell smoothing (Witten & Bell 1991).

    p(w | c) = (count(c w) + kinds(c) p(w | shorter c)) / (count(c) + kinds(c)), where kinds(c) is
    the number of different tokens after c; below the shortest context all tokens are as probable.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, order: int = NGRAM_ORDER) -> None:
        self.vocab_size, self.order = vocab_size, order
        self.counts: Counter[tuple[int, ...]] = Counter()  # of context and token
        self.totals: Counter[tuple[int, ...]] = Counter()  # of contexts
        self.kinds: Counter[tuple[int, ...]] = Counter()  # different tokens after a context
        for end, token in enumerate(tokens):
            self.add(tokens[max(0, end - order) : end], token)

    def add(self, context: Sequence[int], token: int) -> None:
        """Count a token after a context (at most `order`), and after all shorter ones."""
        for start in range(len(context) + 1):
            known = tuple(context[start:])
            self.counts[*known, token] += 1
            self.totals[known] += 1
            self.kinds[known] += self.counts[*known, token] == 1

    def probability(self, context: Sequence[int], token: int) -> float:
        """p(token | the last tokens of the context)."""
        p = 1 / self.vocab_size
        for length in range(min(self.order, len(context)) + 1):
            key = tuple(context[len(context) - length :])
            if key not in self.totals:
                break
            kinds = self.kinds[key]
            p = (self.counts[*key, token] + kinds * p) / (self.totals[key] + kinds)
        return p
