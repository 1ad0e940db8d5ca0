"""Mixers with parts of their own, and those that are no attention: they have no queries and no keys, and never pretend to."""

from regard.mixers.average import Average
from regard.mixers.conditional import TaskAttention
from regard.mixers.fourier import Fourier
from regard.mixers.longformer import Longformer
from regard.mixers.realformer import RealFormer
from regard.mixers.token_mlp import TokenMLP

__all__ = ["Average", "Fourier", "Longformer", "RealFormer", "TaskAttention", "TokenMLP"]
