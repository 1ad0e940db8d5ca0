"""Mixers that are more than an attention inside `MultiHead`."""

from regard.mixers.aft import AFT
from regard.mixers.average import Average
from regard.mixers.axial import AxialPasses
from regard.mixers.bp_transformer import BPTransformer
from regard.mixers.branches import Branches
from regard.mixers.collaborative import collaborate
from regard.mixers.conditional import TaskAttention, for_task
from regard.mixers.delta import DeltaRule
from regard.mixers.dynamic_conv import DynamicConv
from regard.mixers.etc import ETC
from regard.mixers.fourier import FourierMixer
from regard.mixers.funnel import FunnelMixer
from regard.mixers.gated import GatedLinear, GatedRandomFeatures
from regard.mixers.glimpse import GlimpseRead, GlimpseWrite
from regard.mixers.gmlp import GatedMLP
from regard.mixers.graves_window import GaussianWindow
from regard.mixers.longformer import Longformer
from regard.mixers.low_rank import LowRankBand, narrow_queries_and_keys
from regard.mixers.luna import CausalLuna, Luna
from regard.mixers.perceiver import Perceiver
from regard.mixers.pool import AveragePool
from regard.mixers.poolingformer import Poolingformer
from regard.mixers.positional import PositionEmbeddedMixer, with_position
from regard.mixers.realformer import RealFormer
from regard.mixers.recurrence import Recurrence
from regard.mixers.retention import Retention
from regard.mixers.sets import ISAB, MAB, PMA, SAB
from regard.mixers.show_attend import SoftVisualAttention
from regard.mixers.sinkhorn import Sinkhorn
from regard.mixers.star import Star
from regard.mixers.synthesizer import Synthesizer
from regard.mixers.token_mlp import TokenMLP
from regard.mixers.xcit import ClassAttention, XCiT

__all__ = [
    "AFT",
    "ISAB",
    "MAB",
    "PMA",
    "SAB",
    "Average",
    "AveragePool",
    "AxialPasses",
    "Branches",
    "ClassAttention",
    "DeltaRule",
    "DynamicConv",
    "PositionEmbeddedMixer",
    "FourierMixer",
    "FunnelMixer",
    "GatedLinear",
    "GatedMLP",
    "GatedRandomFeatures",
    "GaussianWindow",
    "GlimpseRead",
    "GlimpseWrite",
    "ETC",
    "Longformer",
    "LowRankBand",
    "Luna",
    "CausalLuna",
    "Perceiver",
    "Poolingformer",
    "RealFormer",
    "Recurrence",
    "Retention",
    "Sinkhorn",
    "SoftVisualAttention",
    "Star",
    "Synthesizer",
    "TaskAttention",
    "TokenMLP",
    "BPTransformer",
    "XCiT",
    "collaborate",
    "for_task",
    "narrow_queries_and_keys",
    "with_position",
]
