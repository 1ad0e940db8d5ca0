"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import did_you_mean

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


def identity(x: Tensor) -> Tensor:
    """x; as the activation of a gate, it makes the layer bilinear."""
    return x


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,  # x Φ(x), exact
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "elu": F.elu,
    "silu": F.silu,  # x σ(x)
    "swish": F.silu,  # the same
    "relu2": squared_relu,
    "sigmoid": torch.sigmoid,
    "identity": identity,
}


def get_activation(activation: str | Activation) -> Activation:
    """Activation function of that name; functions are returned unchanged."""
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"no activation {activation!r}: {did_you_mean(str(activation), ACTIVATIONS)}"
        )
    return ACTIVATIONS[activation]
