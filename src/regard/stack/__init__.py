"""Stacks: layers made of layers."""

from regard.stack.compress import Compress, Convolution, MaxPool, MeanPool, MostUsed
from regard.stack.compressive import AttentionReconstruction, AutoEncoding, Compressive, Reconstruction
from regard.stack.feedback import Feedback
from regard.stack.funnel import Funnel
from regard.stack.look import detached
from regard.stack.plain import Plain
from regard.stack.segments import Carried, Memory, Recent, Segments

__all__ = [
    "AttentionReconstruction",
    "AutoEncoding",
    "Carried",
    "Compress",
    "Compressive",
    "Convolution",
    "Feedback",
    "Funnel",
    "MaxPool",
    "MeanPool",
    "Memory",
    "MostUsed",
    "Plain",
    "Recent",
    "Reconstruction",
    "Segments",
    "detached",
]
