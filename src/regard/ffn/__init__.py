"""Feed-forward layers: each token independently, (b, n, d) -> (b, n, d)."""

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
    "GLU",
    "MLP",
    "Activation",
    "ExpertBank",
    "FeedForward",
    "MixtureOfExperts",
    "ProductKeyMemory",
    "Router",
    "ShardedExpertBank",
    "build_feed_forward",
    "get_activation",
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


def build_feed_forward(name: str, dim: int, **arguments: Any) -> FeedForward:
    """Build a feed-forward layer by name: `build_feed_forward("switch", 512, num_experts=8)`."""
    if name not in FEED_FORWARDS:
        raise ValueError(
            f"no feed-forward layer {name!r}: {did_you_mean(str(name), FEED_FORWARDS)}"
        )
    return FEED_FORWARDS[name](dim, **arguments)
