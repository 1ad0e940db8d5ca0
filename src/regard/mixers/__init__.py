"""Mixers with parts of their own, and those that are no attention: they have no queries and no keys, and never pretend to."""

from regard.mixers.average import Average
from regard.mixers.axial import AxialPasses
from regard.mixers.conditional import TaskAttention
from regard.mixers.fourier import Fourier
from regard.mixers.funnel import Funnel
from regard.mixers.kinds import ByKind
from regard.mixers.longformer import Longformer
from regard.mixers.low_rank import LowRankBand, narrow
from regard.mixers.luna import Luna, PastLuna
from regard.mixers.perceiver import Perceiver
from regard.mixers.poolingformer import Poolingformer
from regard.mixers.realformer import RealFormer
from regard.mixers.sets import ISAB, MAB, PMA, SAB
from regard.mixers.sinkhorn import Sinkhorn
from regard.mixers.star import Star
from regard.mixers.token_mlp import TokenMLP
from regard.mixers.tree import Tree

__all__ = [
    "ISAB", "MAB", "PMA", "SAB", "Average", "AxialPasses", "ByKind", "Fourier", "Funnel", "Longformer", "LowRankBand",
    "Luna", "PastLuna", "Perceiver", "Poolingformer", "RealFormer", "Sinkhorn", "Star", "TaskAttention", "TokenMLP",
    "Tree", "narrow",
]  # fmt: skip
