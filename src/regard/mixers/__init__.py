"""Mixers of their own: they have no queries and keys, or need more of a token than these."""

from regard.mixers.delta import DeltaRule
from regard.mixers.fourier import Fourier
from regard.mixers.gated import GatedLinear, GatedRandomFeatures
from regard.mixers.longformer import Longformer
from regard.mixers.recurrence import Recurrence
from regard.mixers.retention import Retention
from regard.mixers.token_mlp import TokenMLP

__all__ = [
    "DeltaRule", "Fourier", "GatedLinear", "GatedRandomFeatures", "Longformer", "Recurrence", "Retention", "TokenMLP",
]  # fmt: skip
