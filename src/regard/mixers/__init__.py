"""Mixers that are no attention inside `MultiHead`: they have no queries and no keys, or more than one set of them."""

from regard.mixers.fourier import Fourier
from regard.mixers.funnel import Funnel
from regard.mixers.longformer import Longformer
from regard.mixers.low_rank import LowRankBand, narrow
from regard.mixers.luna import Luna, PastLuna
from regard.mixers.perceiver import Perceiver
from regard.mixers.poolingformer import Poolingformer
from regard.mixers.sets import ISAB, MAB, PMA, SAB
from regard.mixers.token_mlp import TokenMLP

__all__ = [
    "ISAB", "MAB", "PMA", "SAB", "Fourier", "Funnel", "Longformer", "LowRankBand", "Luna", "PastLuna", "Perceiver",
    "Poolingformer", "TokenMLP", "narrow",
]  # fmt: skip
