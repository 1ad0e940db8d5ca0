"""What stands between two linear maps, by name or as a function."""

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
    """x itself: in a gate, that makes the layer bilinear."""
    return x


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,  # x Φ(x), exact
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "elu": F.elu,
    "silu": F.silu,  # x σ(x)
    "swish": F.silu,  # the same, by its other name
    "relu2": squared_relu,
    "sigmoid": torch.sigmoid,
    "identity": identity,
}


def get_activation(kind: str | Activation) -> Activation:
    """The function of that name; a function is what it is."""
    if callable(kind):
        return kind
    if kind not in ACTIVATIONS:
        raise ValueError(f"no activation {kind!r}: {did_you_mean(str(kind), ACTIVATIONS)}")
    return ACTIVATIONS[kind]
