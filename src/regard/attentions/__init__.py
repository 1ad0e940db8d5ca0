"""Attentions: what stands inside `MultiHead`."""

from regard.attentions.compressed import Compressed
from regard.attentions.linear import EfficientAttention, LinearAttention
from regard.attentions.prototype import Prototype
from regard.attentions.routed import Routed
from regard.attentions.softmax import SoftmaxAttention

__all__ = ["Compressed", "EfficientAttention", "LinearAttention", "Prototype", "Routed", "SoftmaxAttention"]
