"""Where a token stands: in three forms, with the tokens, in the turn of queries and keys, or in the scores."""

from regard.position.bias import T5, TUPE, XL, Distance, Shaw
from regard.position.embed import (
    Complex,
    Embed,
    Fourier,
    Fourier2D,
    Learned,
    Learned2D,
    Sinusoid,
    Sinusoid2D,
    Unplaced,
)
from regard.position.schemes import SCHEMES, find_scheme, make_scheme
from regard.position.turn import Rope, Rope2D, Turn

__all__ = [
    "SCHEMES", "T5", "TUPE", "XL", "Complex", "Distance", "Embed", "Fourier", "Fourier2D", "Learned", "Learned2D", "Rope",
    "Rope2D", "Shaw", "Sinusoid", "Sinusoid2D", "Turn", "Unplaced", "find_scheme", "make_scheme",
]  # fmt: skip
