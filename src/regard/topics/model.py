"""Topics from embeddings: cluster the documents, then name the clusters by their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import check_choice, check_int
from regard.topics.words import (
    ENGLISH,
    FREQUENT,
    MISSING,
    WordCounts,
    c_tf_idf,
    count_words,
    top_words,
)

KMEANS, HDBSCAN = "kmeans", "hdbscan"
CLUSTERINGS = (KMEANS, HDBSCAN)
COMPONENTS = 32  # principal components that are clustered
MIN_DOCUMENTS = 3  # to choose a number of topics
MAX_CHOSEN = 20  # topics that the silhouette chooses from
SILHOUETTE_DOCUMENTS = 2000  # a random sample, because its cost is quadratic
RESTARTS = 10  # of k-means, of which the best is kept


class TopicModel:
    """Topics of documents from their embeddings (after BERTopic, Grootendorst 2022, arXiv
    2203.05794).

    The embeddings are centred, reduced to at most 32 principal components and scaled to length 1.
    K-means or HDBSCAN clusters them, and the words of a cluster are those with the largest
    class-based TF-IDF (`c_tf_idf`). A topic is a cluster; topic 0 is the largest.

    Args:
        n_topics: Number of topics of k-means. None: from 2 to 20, that with the largest mean
            silhouette (Rousseeuw 1987). HDBSCAN finds the number itself.
        clustering: "kmeans", or "hdbscan", which leaves documents between the clusters without a
            topic (-1).
        min_cluster_size: HDBSCAN only: smallest number of documents of a topic. None: 1 % of the
            documents, at least 5.
        top_n_words: Words of each topic.
        reduce_frequent_words: See `c_tf_idf`.
        stop_words, min_df, max_df: See `count_words`.
        random_state: Seed of k-means and of the sample for the silhouette.

    Attributes:
        labels_: The topic of each document (n), -1 for none.
        topic_words_: The words of each topic.
        topic_weights_: Their c-TF-IDF.
        silhouettes_: The mean silhouette for each number of topics that was tried.
        vectors_: What was clustered, (n, components).
        word_counts_: The words of the documents.
    """

    def __init__(
        self,
        n_topics: int | None = None,
        *,
        clustering: str = KMEANS,
        min_cluster_size: int | None = None,
        top_n_words: int = 10,
        reduce_frequent_words: bool = False,
        stop_words: str | Sequence[str] | None = ENGLISH,
        min_df: int | None = None,
        max_df: float = FREQUENT,
        random_state: int = 0,
    ) -> None:
        check_choice("clustering", clustering, CLUSTERINGS)
        check_int(1, top_n_words=top_n_words)
        check_int(0, random_state=random_state)
        if n_topics is not None:
            check_int(2, n_topics=n_topics)
            if clustering == HDBSCAN:
                raise ValueError("HDBSCAN finds the number of topics: omit n_topics.")
        if min_cluster_size is not None:
            check_int(2, min_cluster_size=min_cluster_size)
            if clustering != HDBSCAN:
                raise ValueError("min_cluster_size is for clustering='hdbscan'.")
        self.n_topics, self.clustering = n_topics, clustering
        self.min_cluster_size, self.top_n_words = min_cluster_size, top_n_words
        self.stop_words, self.min_df, self.max_df = stop_words, min_df, max_df
        self.reduce_frequent_words, self.random_state = reduce_frequent_words, random_state

    def fit(self, documents: Sequence[str], embeddings: Any) -> TopicModel:
        """Find the topics of documents with embeddings (n, d), such as `TrainedRun.embed`."""
        documents = list(documents)
        vectors = np.asarray(embeddings, dtype=np.float64)
        if vectors.ndim != 2 or len(vectors) != len(documents):
            raise ValueError(
                f"embeddings must have a row for each of the {len(documents)} documents, not the "
                f"shape {vectors.shape}."
            )
        if not np.isfinite(vectors).all():
            raise ValueError("embeddings have NaN or infinity.")
        self.word_counts_: WordCounts = self.check_documents(documents)
        distinct = len(np.unique(vectors, axis=0))
        if distinct < (self.n_topics or 2):
            raise ValueError(
                f"The documents have {distinct} different embeddings, fewer than "
                f"{self.n_topics or 2} topics: are they copies of each other?"
            )
        self.vectors_ = reduce_vectors(vectors)
        self.silhouettes_: dict[int, float] = {}
        self.labels_ = order_by_size(self._cluster(distinct))
        count = int(self.labels_.max()) + 1
        if not count:
            raise ValueError(
                "HDBSCAN found no topic: give a smaller min_cluster_size, or use kmeans."
            )
        weights = c_tf_idf(
            self.word_counts_.counts,
            self.labels_,
            count,
            reduce_frequent_words=self.reduce_frequent_words,
        )
        self.topic_words_ = top_words(weights, self.word_counts_.words, self.top_n_words)
        index = {word: number for number, word in enumerate(self.word_counts_.words)}
        self.topic_weights_ = [
            [float(weights[topic, index[word]]) for word in words]
            for topic, words in enumerate(self.topic_words_)
        ]
        return self

    def fit_transform(self, documents: Sequence[str], embeddings: Any) -> np.ndarray:
        """The topic of each document (n); see `fit`."""
        return self.fit(documents, embeddings).labels_

    def check_documents(self, documents: Sequence[str]) -> WordCounts:
        """The words of documents; a ValueError if they are too few for the topics, which is known
        before they are embedded."""
        least = self.n_topics or MIN_DOCUMENTS
        if len(documents) < least:
            what = "topics" if self.n_topics is None else f"{self.n_topics} topics"
            number = f"{len(documents)} document{'' if len(documents) == 1 else 's'}"
            raise ValueError(f"There are no {what} in {number}: give at least {least}.")
        return count_words(
            documents, stop_words=self.stop_words, min_df=self.min_df, max_df=self.max_df
        )

    def _cluster(self, distinct: int) -> np.ndarray:
        """The cluster of each document, of which so many are different."""
        try:
            from sklearn import cluster
        except ImportError:
            raise ImportError(MISSING) from None
        if self.clustering == HDBSCAN:
            size = self.min_cluster_size or max(5, round(0.01 * len(self.vectors_)))
            if size > len(self.vectors_):
                raise ValueError(
                    f"min_cluster_size is {size}, but there are {len(self.vectors_)} documents."
                )
            model = cluster.HDBSCAN(min_cluster_size=size, copy=True)
            return np.asarray(model.fit_predict(self.vectors_))
        if self.n_topics is not None:
            return kmeans(self.vectors_, self.n_topics, self.random_state)
        return self._choose_by_silhouette(distinct)

    def _choose_by_silhouette(self, distinct: int) -> np.ndarray:
        """The clusters with the largest mean silhouette, of a random sample of the documents."""
        from sklearn.metrics import silhouette_score

        most = min(MAX_CHOSEN, distinct - 1)
        if most < 2:
            raise ValueError(
                f"The documents have {distinct} different embeddings, too few to choose a number "
                "of topics: give n_topics."
            )
        found = {k: kmeans(self.vectors_, k, self.random_state) for k in range(2, most + 1)}
        sample = np.random.default_rng(self.random_state).permutation(len(self.vectors_))
        sample = sample[:SILHOUETTE_DOCUMENTS]
        for k, labels in found.items():
            kinds = len(np.unique(labels[sample]))
            if 2 <= kinds < len(sample):
                score = silhouette_score(self.vectors_[sample], labels[sample])
                self.silhouettes_[k] = float(score)
        return found[max(self.silhouettes_, key=self.silhouettes_.__getitem__)]


def reduce_vectors(vectors: np.ndarray) -> np.ndarray:
    """Embeddings (n, d), centred, reduced to principal components and scaled to length 1.

    Mean-pooled embeddings have a large common part, which hides what distinguishes documents (Mu &
    Viswanath 2018, arXiv 1702.01417).
    """
    try:
        from sklearn.decomposition import PCA
    except ImportError:
        raise ImportError(MISSING) from None
    count = min(COMPONENTS, *vectors.shape)
    reduced = PCA(count, svd_solver="full").fit_transform(vectors)
    lengths = np.linalg.norm(reduced, axis=1, keepdims=True)
    return np.asarray(reduced / np.maximum(lengths, 1e-12))


def kmeans(vectors: Any, count: int, random_state: int) -> np.ndarray:
    """The cluster of each vector (n, d) by k-means, the best of ten starts."""
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        raise ImportError(MISSING) from None
    model = KMeans(count, n_init=RESTARTS, random_state=random_state)
    return np.asarray(model.fit_predict(vectors))


def order_by_size(labels: np.ndarray) -> np.ndarray:
    """Number the clusters from the largest on; -1 stays."""
    found, counts = np.unique(labels[labels >= 0], return_counts=True)
    rank = {label: i for i, label in enumerate(found[np.argsort(-counts, kind="stable")].tolist())}
    return np.array([rank.get(label, -1) for label in labels.tolist()], np.int64)
