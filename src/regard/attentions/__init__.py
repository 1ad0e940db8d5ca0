"""Attentions: the part of `MultiHead` between the projections."""

from regard.attentions.adaptive_span import AdaptiveSpanAttention
from regard.attentions.additive import AdditiveAttention
from regard.attentions.block_compressed import BlockCompressedAttention
from regard.attentions.clustered import ImprovedClusteredAttention
from regard.attentions.compressed import CompressedAttention
from regard.attentions.disagreement import DisagreementAttention
from regard.attentions.hard_coded import HardCodedAttention
from regard.attentions.linear import EfficientAttention, LinearAttention
from regard.attentions.localness import LocalnessAttention
from regard.attentions.lsh import LSHAttention
from regard.attentions.materialized import MaterializedAttention
from regard.attentions.nystrom import NystromAttention
from regard.attentions.persistent import PersistentMemoryAttention
from regard.attentions.prob_sparse import ProbSparseAttention
from regard.attentions.prototype import PrototypeAttention
from regard.attentions.routed import RoutedAttention, SharedQKRoutedAttention
from regard.attentions.softmax import SoftmaxAttention

__all__ = [
    "AdaptiveSpanAttention",
    "AdditiveAttention",
    "BlockCompressedAttention",
    "CompressedAttention",
    "DisagreementAttention",
    "EfficientAttention",
    "HardCodedAttention",
    "ImprovedClusteredAttention",
    "LSHAttention",
    "LinearAttention",
    "LocalnessAttention",
    "MaterializedAttention",
    "NystromAttention",
    "PersistentMemoryAttention",
    "ProbSparseAttention",
    "PrototypeAttention",
    "RoutedAttention",
    "SharedQKRoutedAttention",
    "SoftmaxAttention",
]
