"""Formulas for the cost of every class in Regard: importing this package registers them."""

from regard.measure.formulas import (
    free,
    layers,
    linear,
    mixers,
    models,
    parts,
    shorter,
    softmax,
    stacks,
)

__all__ = ["free", "layers", "linear", "mixers", "models", "parts", "shorter", "softmax", "stacks"]
