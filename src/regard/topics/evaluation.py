"""The scores of a set of topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from regard.topics.coherence import npmi, topic_diversity
from regard.topics.words import MISSING


class TopicScores(NamedTuple):
    """Scores of topics.

    Attributes:
        npmi: Mean NPMI coherence of the topics, from -1 to 1.
        diversity: Share of the words of all topics that are different.
        unassigned: Share of the documents that are in no topic.
        agreement: Purity, NMI and adjusted Rand index against labels; empty without labels.
    """

    npmi: float
    diversity: float
    unassigned: float
    agreement: dict[str, float]


def score_topics(
    words: Sequence[Sequence[str]],
    assigned: np.ndarray,
    texts: Sequence[Sequence[str]],
    labels: Sequence[str] | None = None,
) -> TopicScores:
    """Score topics.

    Args:
        words: The words of each topic.
        assigned: The topic of each document (n), -1 for none.
        texts: The words of each document, in order.
        labels: The label of each document, to compare the topics with.
    """
    values = npmi(words, texts)
    known = values[~np.isnan(values)]
    return TopicScores(
        npmi=float(known.mean()) if len(known) else float("nan"),
        diversity=topic_diversity(words),
        unassigned=float((np.asarray(assigned) < 0).mean()),
        agreement={} if labels is None else label_agreement(labels, assigned),
    )


def label_agreement(labels: Sequence[str], assigned: np.ndarray) -> dict[str, float]:
    """How well topics agree with labels, by name.

    `purity` is the share of documents whose label is the most frequent one of their topic; it grows
    with the number of topics. `nmi` is the normalized mutual information, and `ari` the adjusted
    Rand index, which is 0 for random topics. Documents in no topic count as a topic of their own.
    """
    try:
        from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
        from sklearn.metrics.cluster import contingency_matrix
    except ImportError:
        raise ImportError(MISSING) from None
    table = contingency_matrix(labels, assigned)
    return {
        "purity": float(table.max(0).sum() / table.sum()),
        "nmi": float(normalized_mutual_info_score(labels, assigned)),
        "ari": float(adjusted_rand_score(labels, assigned)),
    }
