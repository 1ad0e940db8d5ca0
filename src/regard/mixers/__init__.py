"""Mixers that are no attention: they have no queries and no keys, and never pretend to."""

from regard.mixers.aft import AFT
from regard.mixers.dynamic_conv import DynamicConv
from regard.mixers.fourier import Fourier
from regard.mixers.glimpse import GlimpseRead, GlimpseWrite
from regard.mixers.gmlp import GatedMLP
from regard.mixers.longformer import Longformer
from regard.mixers.pool import AveragePool
from regard.mixers.soft_cells import SoftCells
from regard.mixers.synthesizer import Synthesizer
from regard.mixers.token_mlp import TokenMLP
from regard.mixers.window import GaussianWindow
from regard.mixers.xcit import ClassAttention, XCiT

__all__ = [
    "AFT", "AveragePool", "ClassAttention", "DynamicConv", "Fourier", "GatedMLP", "GaussianWindow", "GlimpseRead",
    "GlimpseWrite", "Longformer", "SoftCells", "Synthesizer", "TokenMLP", "XCiT",
]  # fmt: skip
