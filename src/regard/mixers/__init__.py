"""Mixers that are no attention: they have no queries and no keys, and never pretend to."""

from regard.mixers.fourier import Fourier
from regard.mixers.longformer import Longformer
from regard.mixers.sinkhorn import Sinkhorn
from regard.mixers.token_mlp import TokenMLP

__all__ = ["Fourier", "Longformer", "Sinkhorn", "TokenMLP"]
