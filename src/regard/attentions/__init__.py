"""Attentions: what stands inside `MultiHead`."""

from regard.attentions.clustered import ImprovedClustered
from regard.attentions.compressed import Compressed
from regard.attentions.linear import LinearAttention
from regard.attentions.nystrom import NystromAttention
from regard.attentions.prob_sparse import ProbSparse
from regard.attentions.prototype import Prototype
from regard.attentions.routed import Routed
from regard.attentions.softmax import SoftmaxAttention
from regard.attentions.strided import Strided

__all__ = [
    "Compressed", "ImprovedClustered", "LinearAttention", "NystromAttention", "ProbSparse", "Prototype", "Routed",
    "SoftmaxAttention", "Strided",
]  # fmt: skip
