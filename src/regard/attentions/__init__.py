"""Attentions: what stands inside `MultiHead`."""

from regard.attentions.additive import AdditiveAttention
from regard.attentions.clustered import ImprovedClustered
from regard.attentions.compressed import Compressed
from regard.attentions.disagreeing import Disagreeing
from regard.attentions.hard import HardGaussian
from regard.attentions.hashed import Hashed
from regard.attentions.linear import EfficientAttention, LinearAttention
from regard.attentions.located import LocatedAttention
from regard.attentions.nystrom import NystromAttention
from regard.attentions.persistent import Persistent
from regard.attentions.prob_sparse import ProbSparse
from regard.attentions.prototype import Prototype
from regard.attentions.routed import Routed
from regard.attentions.scored import ScoredAttention
from regard.attentions.softmax import SoftmaxAttention
from regard.attentions.span import AdaptiveSpan
from regard.attentions.strided import Strided

__all__ = [
    "AdaptiveSpan", "AdditiveAttention", "Compressed", "Disagreeing", "EfficientAttention", "HardGaussian", "Hashed",
    "ImprovedClustered", "LinearAttention", "LocatedAttention", "NystromAttention", "Persistent", "ProbSparse", "Prototype",
    "Routed", "ScoredAttention", "SoftmaxAttention", "Strided",
]  # fmt: skip
