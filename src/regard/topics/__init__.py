"""Topics of documents: clusters of their embeddings, named by class-based TF-IDF, with coherence,
diversity, a map, and LDA, NMF and TF-IDF + k-means beside them."""

from regard.topics.baselines import BASELINES, fit_baseline
from regard.topics.coherence import npmi, topic_diversity
from regard.topics.documents import Documents, embed_documents, load_embedder, read_documents
from regard.topics.evaluation import TopicScores, label_agreement, score_topics
from regard.topics.model import TopicModel
from regard.topics.words import WordCounts, c_tf_idf, count_words

__all__ = [
    "BASELINES",
    "Documents",
    "TopicModel",
    "TopicScores",
    "WordCounts",
    "c_tf_idf",
    "count_words",
    "embed_documents",
    "fit_baseline",
    "label_agreement",
    "load_embedder",
    "npmi",
    "read_documents",
    "score_topics",
    "topic_diversity",
]
