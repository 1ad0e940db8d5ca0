"""Feed-forward layers: each token by itself, (b n d) -> (b n d)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from regard.errors import nearest
from regard.ffn.activation import ACTIVATIONS, Activation, activation
from regard.ffn.bank import Bank, SpreadBank
from regard.ffn.base import FeedForward
from regard.ffn.dense import GLU, MLP
from regard.ffn.experts import Experts, switch, top_k
from regard.ffn.product_keys import ProductKeys
from regard.ffn.router import Router

__all__ = [
    "ACTIVATIONS", "KINDS", "Activation", "activation", "make",
    "Bank", "Experts", "FeedForward", "GLU", "MLP", "ProductKeys", "Router", "SpreadBank", "switch", "top_k",
]  # fmt: skip

KINDS: dict[str, Callable[..., FeedForward]] = {
    "mlp": MLP,
    "glu": GLU,
    "reglu": partial(GLU, activation="relu"),
    "geglu": partial(GLU, activation="gelu"),
    "swiglu": partial(GLU, activation="silu"),
    "bilinear": partial(GLU, activation="identity"),
    "switch": switch,
    "top_k": top_k,
    "product_keys": ProductKeys,
}


def make(kind: str, dim: int, **arguments: Any) -> FeedForward:
    """A feed-forward layer by name, as a configuration file has it: `make("swiglu", 512)`, `make("switch", 512, experts=8)`."""
    if kind not in KINDS:
        raise ValueError(f"no feed-forward layer {kind!r}: {nearest(str(kind), KINDS)}")
    return KINDS[kind](dim, **arguments)
