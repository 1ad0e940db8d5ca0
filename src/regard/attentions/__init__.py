"""Attentions: what stands inside `MultiHead`."""

from regard.attentions.additive import AdditiveAttention
from regard.attentions.compressed import Compressed
from regard.attentions.linear import LinearAttention
from regard.attentions.prototype import Prototype
from regard.attentions.routed import Routed
from regard.attentions.softmax import SoftmaxAttention

__all__ = ["AdditiveAttention", "Compressed", "LinearAttention", "Prototype", "Routed", "SoftmaxAttention"]
