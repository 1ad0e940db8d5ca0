"""Mixers that are no attention: they have no queries and no keys, and never pretend to."""

from regard.mixers.axial import AxialPasses
from regard.mixers.etc import GlobalLong
from regard.mixers.fourier import Fourier
from regard.mixers.longformer import Longformer
from regard.mixers.star import Star
from regard.mixers.token_mlp import TokenMLP
from regard.mixers.tree import Tree

__all__ = ["AxialPasses", "Fourier", "GlobalLong", "Longformer", "Star", "TokenMLP", "Tree"]
