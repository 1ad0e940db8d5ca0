"""Stacks: layers made of layers."""

from regard.stack.carry import Carry
from regard.stack.class_last import ClassLast, ClassLayer
from regard.stack.compress import Compress, Convolution, MaxPool, MeanPool, MostUsed
from regard.stack.compressive import AttentionReconstruction, AutoEncoding, Compressive, Reconstruction
from regard.stack.early_exit import EarlyExit, Exited
from regard.stack.feedback import Feedback
from regard.stack.funnel import Funnel
from regard.stack.halves import Feeding, Looking, Mixing, halves
from regard.stack.plain import Plain
from regard.stack.reversible import Reversible
from regard.stack.segments import Carried, Memory, Recent, Segments
from regard.stack.shared import Shared
from regard.stack.transparent import ByLayer, Transparency
from regard.stack.universal import Halting, Universal

__all__ = [
    "AttentionReconstruction", "AutoEncoding", "ByLayer", "Carried", "Carry", "ClassLast", "ClassLayer", "Compress",
    "Compressive", "Convolution", "EarlyExit", "Exited", "Feedback", "Feeding", "Funnel", "Halting", "Looking", "MaxPool",
    "MeanPool", "Memory", "Mixing", "MostUsed", "Plain", "Recent", "Reconstruction", "Reversible", "Segments", "Shared",
    "Transparency", "Universal", "halves",
]  # fmt: skip
