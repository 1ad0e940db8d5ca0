"""Stacks: layers made of layers."""

from regard.stack.class_attention import ClassAttentionLayer, ClassAttentionStack
from regard.stack.compression_functions import (
    CompressionFunction,
    Conv1dCompression,
    MaxPoolCompression,
    MeanPoolCompression,
    MostUsedCompression,
)
from regard.stack.compressive import (
    AttentionReconstructionLoss,
    AutoEncodingLoss,
    CompressionLoss,
    CompressiveMemory,
)
from regard.stack.early_exit import EarlyExitOutput, EarlyExitStack
from regard.stack.feedback import FeedbackStack
from regard.stack.funnel import FunnelStack
from regard.stack.luna import LunaStack
from regard.stack.realformer import RealFormerStack
from regard.stack.reversible import ReversibleStack
from regard.stack.segments import (
    HiddenStateMemory,
    RecurrentStateMemory,
    SegmentMemory,
    SegmentStack,
)
from regard.stack.sequential import SequentialStack
from regard.stack.shared import SharedStack
from regard.stack.sublayers import (
    CrossAttentionSublayer,
    FeedForwardSublayer,
    MixerSublayer,
    build_sublayers,
)
from regard.stack.transparent import PerLayerContextStack, TransparentAttention
from regard.stack.universal import Halting, UniversalStack

__all__ = [
    "AttentionReconstructionLoss",
    "AutoEncodingLoss",
    "ClassAttentionLayer",
    "ClassAttentionStack",
    "CompressionFunction",
    "CompressionLoss",
    "CompressiveMemory",
    "Conv1dCompression",
    "CrossAttentionSublayer",
    "EarlyExitOutput",
    "EarlyExitStack",
    "FeedForwardSublayer",
    "FeedbackStack",
    "FunnelStack",
    "Halting",
    "HiddenStateMemory",
    "LunaStack",
    "MaxPoolCompression",
    "MeanPoolCompression",
    "MixerSublayer",
    "MostUsedCompression",
    "PerLayerContextStack",
    "RealFormerStack",
    "RecurrentStateMemory",
    "ReversibleStack",
    "SegmentMemory",
    "SegmentStack",
    "SequentialStack",
    "SharedStack",
    "TransparentAttention",
    "UniversalStack",
    "build_sublayers",
]
