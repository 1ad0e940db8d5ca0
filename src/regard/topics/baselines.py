"""Topic models without a network, of scikit-learn, on the same documents and vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from regard.errors import check_choice
from regard.topics.model import kmeans, order_by_size
from regard.topics.words import MISSING, WordCounts, c_tf_idf, top_words

LDA, NMF, TFIDF_KMEANS = "LDA", "NMF", "TF-IDF + k-means"
BASELINES = (LDA, NMF, TFIDF_KMEANS)


class FittedTopics(NamedTuple):
    """The topic of each document (n), and the words of each topic."""

    labels: np.ndarray
    words: list[list[str]]


def fit_baseline(
    name: str, counts: WordCounts, n_topics: int, *, top_n_words: int = 10, random_state: int = 0
) -> FittedTopics:
    """Fit a baseline.

    Latent Dirichlet allocation (Blei et al. 2003) reads the counts of words; non-negative matrix
    factorization (Lee & Seung 1999) and k-means read TF-IDF. A document belongs to its largest
    topic. The words of LDA and NMF are those with the largest weights, and of k-means those with
    the largest class-based TF-IDF.

    Args:
        name: "LDA", "NMF" or "TF-IDF + k-means".
    """
    try:
        from sklearn import decomposition
        from sklearn.feature_extraction.text import TfidfTransformer
    except ImportError:
        raise ImportError(MISSING) from None
    check_choice("baseline", name, BASELINES)
    if name == LDA:
        lda = decomposition.LatentDirichletAllocation(n_topics, random_state=random_state)
        labels = lda.fit_transform(counts.counts).argmax(1)
        return FittedTopics(labels, top_words(lda.components_, counts.words, top_n_words))
    tfidf = TfidfTransformer(sublinear_tf=True).fit_transform(counts.counts)
    if name == NMF:
        init = "nndsvda" if n_topics <= min(tfidf.shape) else "random"
        nmf = decomposition.NMF(n_topics, init=init, max_iter=400, random_state=random_state)
        labels = nmf.fit_transform(tfidf).argmax(1)
        return FittedTopics(labels, top_words(nmf.components_, counts.words, top_n_words))
    labels = order_by_size(kmeans(tfidf, n_topics, random_state))
    weights = c_tf_idf(counts.counts, labels, n_topics)
    return FittedTopics(labels, top_words(weights, counts.words, top_n_words))
