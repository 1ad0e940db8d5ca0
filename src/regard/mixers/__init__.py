"""Mixers with parts of their own, and those that are no attention: they have no queries and no keys, and never pretend to."""

from regard.mixers.aft import AFT
from regard.mixers.average import Average
from regard.mixers.axial import AxialPasses
from regard.mixers.branches import Branches
from regard.mixers.collaborative import collaborate
from regard.mixers.conditional import TaskAttention
from regard.mixers.delta import DeltaRule
from regard.mixers.dynamic_conv import DynamicConv
from regard.mixers.etc import GlobalLong
from regard.mixers.fourier import Fourier
from regard.mixers.funnel import Funnel
from regard.mixers.gated import GatedLinear, GatedRandomFeatures
from regard.mixers.glimpse import GlimpseRead, GlimpseWrite
from regard.mixers.gmlp import GatedMLP
from regard.mixers.longformer import Longformer
from regard.mixers.low_rank import LowRankBand, narrow
from regard.mixers.luna import Luna, PastLuna
from regard.mixers.perceiver import Perceiver
from regard.mixers.pool import AveragePool
from regard.mixers.poolingformer import Poolingformer
from regard.mixers.positioned import Embedded, positioned
from regard.mixers.realformer import RealFormer
from regard.mixers.recurrence import Recurrence
from regard.mixers.retention import Retention
from regard.mixers.sets import ISAB, MAB, PMA, SAB
from regard.mixers.sinkhorn import Sinkhorn
from regard.mixers.soft_cells import SoftCells
from regard.mixers.star import Star
from regard.mixers.synthesizer import Synthesizer
from regard.mixers.token_mlp import TokenMLP
from regard.mixers.tree import Tree
from regard.mixers.window import GaussianWindow
from regard.mixers.xcit import ClassAttention, XCiT

__all__ = [
    "AFT", "ISAB", "MAB", "PMA", "SAB", "Average", "AveragePool", "AxialPasses", "Branches", "ClassAttention",
    "DeltaRule", "DynamicConv", "Embedded", "Fourier", "Funnel", "GatedLinear", "GatedMLP", "GatedRandomFeatures",
    "GaussianWindow", "GlimpseRead", "GlimpseWrite", "GlobalLong", "Longformer", "LowRankBand", "Luna", "PastLuna", "Perceiver",
    "Poolingformer", "RealFormer", "Recurrence", "Retention", "Sinkhorn", "SoftCells", "Star", "Synthesizer",
    "TaskAttention", "TokenMLP", "Tree", "XCiT", "collaborate", "narrow", "positioned",
]  # fmt: skip
