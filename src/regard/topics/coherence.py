"""How good the words of topics are: coherence and diversity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

WINDOW = 10  # words, as in Röder et al. 2015 and gensim's "c_npmi"
EPSILON = 1e-12  # added to the probability of a pair, as in gensim


def npmi(
    topics: Sequence[Sequence[str]],
    texts: Sequence[Sequence[str]],
    *,
    window: int | None = WINDOW,
) -> np.ndarray:
    """Normalized pointwise mutual information of the words of each topic, (k) from -1 to 1.

    The mean over all pairs of words of a topic of (Bouma 2009)

        log((p(a, b) + ε) / (p(a) p(b))) / -log(p(a, b) + ε)

    where p is the share of windows that contain the words (Röder et al. 2015, "Exploring the space
    of topic coherence measures"). A topic of one word has none: NaN.

    Args:
        topics: The words of each topic.
        texts: The words of each document, in order.
        window: Words of a sliding window; a shorter document is one window. None: documents.
    """
    words = sorted({word for topic in topics for word in topic})
    index = {word: number for number, word in enumerate(words)}
    rows, columns, count = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for text in texts:
        ids = np.array([index.get(word, -1) for word in text], np.int64)
        is_long = window is not None and len(ids) > window
        windows = sliding_window_view(ids, window) if is_long and window else ids[None]
        found = windows >= 0
        rows.append(np.nonzero(found)[0] + count)
        columns.append(windows[found])
        count += len(windows)
    from scipy.sparse import csr_matrix

    row, column = np.concatenate(rows), np.concatenate(columns)
    occurs = csr_matrix((np.ones(len(row)), (row, column)), shape=(count, len(words)))
    occurs.data[:] = 1  # a word that is twice in a window counts once
    together = (occurs.T @ occurs).toarray() / max(count, 1)
    single = together.diagonal()
    if missing := [word for word, p in zip(words, single, strict=True) if not p]:
        raise ValueError(f"No document has the word {missing[0]!r}: it has no NPMI.")
    pointwise = np.log((together + EPSILON) / np.outer(single, single))
    certain = together >= 1  # both words are in every window: the limit is 1
    information = -np.log(np.where(certain, 0.5, together) + EPSILON)
    normalized = np.where(certain, 1.0, pointwise / information)
    values = []
    for topic in topics:
        ids = np.array([index[word] for word in topic], np.int64)
        first, second = np.triu_indices(len(ids), 1)
        values.append(normalized[ids[first], ids[second]].mean() if len(first) else np.nan)
    return np.array(values)


def topic_diversity(topics: Sequence[Sequence[str]]) -> float:
    """Share of the words of all topics that are different (Dieng et al. 2020, arXiv 1907.04907)."""
    words = [word for topic in topics for word in topic]
    return len(set(words)) / len(words) if words else float("nan")
