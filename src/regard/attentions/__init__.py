"""Attentions: what stands inside `MultiHead`."""

from regard.attentions.compressed import Compressed
from regard.attentions.hard import HardGaussian
from regard.attentions.linear import LinearAttention
from regard.attentions.located import LocatedAttention
from regard.attentions.prototype import Prototype
from regard.attentions.routed import Routed
from regard.attentions.scored import ScoredAttention
from regard.attentions.softmax import SoftmaxAttention
from regard.attentions.span import AdaptiveSpan

__all__ = [
    "AdaptiveSpan", "Compressed", "HardGaussian", "LinearAttention", "LocatedAttention", "Prototype", "Routed",
    "ScoredAttention", "SoftmaxAttention",
]  # fmt: skip
