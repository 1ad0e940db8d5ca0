"""Attentions: what stands inside `MultiHead`."""

from regard.attentions.compressed import Compressed
from regard.attentions.hashed import Hashed
from regard.attentions.linear import LinearAttention
from regard.attentions.prototype import Prototype
from regard.attentions.routed import Routed
from regard.attentions.softmax import SoftmaxAttention

__all__ = ["Compressed", "Hashed", "LinearAttention", "Prototype", "Routed", "SoftmaxAttention"]
