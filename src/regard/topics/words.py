"""The words of documents, and those that are typical of a topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WORD = r"(?u)\b[^\W\d_]{2,}\b"  # at least two letters
RARE = 0.005  # share of the documents that a word must be in, by default
FREQUENT = 0.5  # share of the documents in which a word says little about a topic, by default
ENGLISH = "english"
MISSING = "Topics need the package scikit-learn: pip install 'regard[text]'"


class WordCounts(NamedTuple):
    """The words of documents.

    Attributes:
        words: The vocabulary (v).
        counts: How often each word is in each document, a sparse matrix (n, v).
        texts: The words of each document in order, without those that are not in the vocabulary.
    """

    words: list[str]
    counts: Any
    texts: list[list[str]]


def count_words(
    documents: Sequence[str],
    *,
    stop_words: str | Sequence[str] | None = ENGLISH,
    min_df: int | None = None,
    max_df: float = FREQUENT,
) -> WordCounts:
    """Count the lower-cased words of documents.

    Args:
        stop_words: Words to leave out: "english" for scikit-learn's list, a list, or None.
        min_df: Number of documents that a word must be in. None: 0.5 % of them, and at least 2.
        max_df: Share of the documents; words that are in more are left out. 1: none.
    """
    try:
        from sklearn.feature_extraction.text import CountVectorizer
    except ImportError:
        raise ImportError(MISSING) from None
    if isinstance(stop_words, str) and stop_words != ENGLISH:
        raise ValueError(f"stop_words must be 'english', a list of words or None: {stop_words!r}")
    least = max(2, round(RARE * len(documents))) if min_df is None else min_df
    if least > len(documents):
        raise ValueError(
            f"min_df is {least}, but there are only {len(documents)} documents: give a smaller one."
        )
    if not 0 < max_df <= 1:
        raise ValueError(f"max_df is a share of the documents, from 0 to 1: not {max_df!r}")
    stop = stop_words
    if not (stop_words is None or isinstance(stop_words, str)):
        stop = [word.lower() for word in stop_words]
    vectorizer = CountVectorizer(
        stop_words=stop, min_df=least, max_df=float(max_df), token_pattern=WORD
    )
    try:
        counts = vectorizer.fit_transform(documents)
    except ValueError:  # "empty vocabulary", no term remains, or max_df is below min_df
        raise ValueError(
            f"No word is in {least} or more of the {len(documents)} documents, and in at most "
            f"{100 * max_df:g} % of them: give more text, a smaller min_df or a larger max_df."
        ) from None
    analyze, known = vectorizer.build_analyzer(), vectorizer.vocabulary_
    texts = [[word for word in analyze(text) if word in known] for text in documents]
    return WordCounts(vectorizer.get_feature_names_out().tolist(), counts, texts)


def c_tf_idf(
    counts: Any, labels: np.ndarray, n_topics: int, *, reduce_frequent_words: bool = False
) -> np.ndarray:
    """Class-based TF-IDF (Grootendorst 2022, arXiv 2203.05794, equation 2), (n_topics, v):

        W[c, t] = tf[c, t] · log(1 + A / tf[t])

    where tf[c, t] is how often word t is in the documents of topic c, tf[t] in all of them, and A
    is the mean number of words of a topic.

    Args:
        counts: (n, v), how often each word is in each document.
        labels: The topic of each document (n); those with -1 belong to none.
        reduce_frequent_words: Replace tf[c, t] by the square root of its share of the words of the
            topic, as the option of BERTopic: frequent words weigh less.
    """
    frequency = np.zeros((n_topics, counts.shape[1]))
    for topic in range(n_topics):
        frequency[topic] = np.asarray(counts[np.flatnonzero(labels == topic)].sum(0)).ravel()
    total = frequency.sum(0)
    mean = frequency.sum() / n_topics
    if reduce_frequent_words:
        frequency = np.sqrt(frequency / np.maximum(frequency.sum(1, keepdims=True), 1))
    return frequency * np.log1p(mean / np.maximum(total, 1))


def top_words(weights: np.ndarray, words: Sequence[str], count: int) -> list[list[str]]:
    """The words with the largest weights (k, v) of each topic, largest first; none of weight 0."""
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    return [
        [words[i] for i in row if weight[i] > 0] for row, weight in zip(order, weights, strict=True)
    ]
