"""The count of a lecture, to the unit: parameters and operations of one block whose heads are each as wide as a token.

In Keras, and so in many lectures, a head has a width of its own, here that of a token, and every layer has a bias.  An
operation is a multiplication in x_iᵀ W x_j, which scores one pair by a matrix (d d): d d for each pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from regard.attentions import SoftmaxAttention
from regard.block import Block
from regard.ffn import MLP
from regard.measure.cost import cost
from regard.measure.pairs import count_pairs
from regard.measure.work import product
from regard.mixer import MultiHead
from regard.pattern import Full
from regard.residual import PostNorm


class Line(NamedTuple):
    """A line of the table: what is counted, and how many there are."""

    name: str
    number: int


def wide_block(dim: int, heads: int, hidden: int) -> Block:
    """Attention whose heads are each `dim` wide, and a feed-forward layer, with biases and layer norms behind each."""
    mixer = MultiHead(dim, heads, SoftmaxAttention())
    mixer.q, mixer.k, mixer.v = (nn.Linear(dim, heads * dim) for _ in range(3))
    mixer.out = nn.Linear(heads * dim, dim)
    return Block(mixer, MLP(dim, hidden, activation=F.relu), residual=PostNorm)


def textbook(dim: int, heads: int, hidden: int, length: int) -> list[Line]:
    """Parameters part by part and in all, and the operations of self-attention for one token and for all."""
    with torch.device("meta"):
        block = wide_block(dim, heads, hidden)
    mixer = block.mixer
    assert isinstance(mixer, MultiHead)
    parts = {
        "queries, keys and values": (mixer.q, mixer.k, mixer.v),
        "projection": (mixer.out,),
        "feed-forward": (block.ffn,),
        "layer norms": (block.mixer_residual, block.ffn_residual),
    }
    lines = [Line(name, sum(_count(part) for part in found)) for name, found in parts.items()]
    each, every = (
        product(count_pairs(Full(), n, length, 1), 1, dim, dim).forward // 2 for n in (1, length)
    )
    total = cost(block, length).parameters
    return [
        *lines,
        Line("parameters", total),
        Line("operations, one token", each),
        Line("operations, all tokens", every),
    ]


def _count(part: nn.Module | None) -> int:
    return 0 if part is None else sum(p.numel() for p in part.parameters())
