"""Feed-forward layers: each token by itself, (b n d) -> (b n d)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from regard.errors import did_you_mean
from regard.ffn.activations import ACTIVATIONS, Activation, get_activation
from regard.ffn.base import FeedForward
from regard.ffn.dense import GLU, MLP
from regard.ffn.expert_bank import ExpertBank, ShardedExpertBank
from regard.ffn.mixture_of_experts import MixtureOfExperts, switch_experts, top_k_experts
from regard.ffn.product_keys import ProductKeyMemory
from regard.ffn.router import Router

__all__ = [
    "ACTIVATIONS",
    "FEED_FORWARDS",
    "Activation",
    "get_activation",
    "build_feed_forward",
    "ExpertBank",
    "MixtureOfExperts",
    "FeedForward",
    "GLU",
    "MLP",
    "ProductKeyMemory",
    "Router",
    "ShardedExpertBank",
    "switch_experts",
    "top_k_experts",
]

FEED_FORWARDS: dict[str, Callable[..., FeedForward]] = {
    "mlp": MLP,
    "glu": GLU,
    "reglu": partial(GLU, activation="relu"),
    "geglu": partial(GLU, activation="gelu"),
    "swiglu": partial(GLU, activation="silu"),
    "bilinear": partial(GLU, activation="identity"),
    "switch": switch_experts,
    "top_k": top_k_experts,
    "product_keys": ProductKeyMemory,
}


def build_feed_forward(kind: str, dim: int, **arguments: Any) -> FeedForward:
    """A feed-forward layer by name, as a configuration file has it: `make("swiglu", 512)`, `make("switch", 512, experts=8)`."""
    if kind not in FEED_FORWARDS:
        raise ValueError(
            f"no feed-forward layer {kind!r}: {did_you_mean(str(kind), FEED_FORWARDS)}"
        )
    return FEED_FORWARDS[kind](dim, **arguments)
