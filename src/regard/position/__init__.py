"""Positional encodings: position embeddings, rotary embeddings and position biases."""

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
    "ComplexEmbedding",
    "DistanceBias",
    "FourierEmbedding",
    "FourierEmbedding2D",
    "LearnedEmbedding",
    "LearnedEmbedding2D",
    "NoPosition",
    "PositionEmbedding",
    "Rope",
    "Rope2D",
    "RotaryEmbedding",
    "ShawBias",
    "SinusoidalEmbedding",
    "SinusoidalEmbedding2D",
    "T5Bias",
    "TUPEBias",
    "TransformerXLBias",
    "create_positional_encoding",
    "positional_encoding_class",
]
