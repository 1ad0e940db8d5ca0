"""Where a token stands: in three forms, with the tokens, in the turn of queries and keys, or in the scores."""

from regard.position.bias import DistanceBias, ShawBias, T5Bias, TransformerXLBias, TUPEBias
from regard.position.embedding import (
    ComplexEmbedding,
    FourierEmbedding,
    FourierEmbedding2D,
    LearnedEmbedding,
    LearnedEmbedding2D,
    NoPosition,
    PositionEmbedding,
    SinusoidalEmbedding,
    SinusoidalEmbedding2D,
)
from regard.position.encodings import (
    POSITIONAL_ENCODINGS,
    create_positional_encoding,
    positional_encoding_class,
)
from regard.position.rotary import Rope, Rope2D, RotaryEmbedding

__all__ = [
    "POSITIONAL_ENCODINGS",
    "T5Bias",
    "TUPEBias",
    "TransformerXLBias",
    "ComplexEmbedding",
    "DistanceBias",
    "PositionEmbedding",
    "FourierEmbedding",
    "FourierEmbedding2D",
    "LearnedEmbedding",
    "LearnedEmbedding2D",
    "Rope",
    "Rope2D",
    "ShawBias",
    "SinusoidalEmbedding",
    "SinusoidalEmbedding2D",
    "RotaryEmbedding",
    "NoPosition",
    "positional_encoding_class",
    "create_positional_encoding",
]
