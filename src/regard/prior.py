"""What is known about the scores before any token is seen: an addend that depends on positions.

A prior is called with positions that broadcast against each other, and with the queries and keys that stand there:

    prior(q_pos, k_pos, q, k)     q_pos (... s 1), k_pos (... 1 t), q (b h ... s e), k (b h ... t e)

and returns what is added to the scores: (h ... s t), or (b h ... s t) where it depends on the tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from regard.errors import check_whole


class Prior(nn.Module, ABC):
    """An addend to the scores; see the module's docstring."""

    heads: int | None = None  # how many it tells apart, None: any number

    @abstractmethod
    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor: ...


class ALiBi(Prior):
    """-slope * distance, with slopes 2^(-8 i / h) for head i = 1..h (Press et al. 2022, arXiv 2108.12409)."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        check_whole(1, heads=heads)
        self.heads = heads
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        gap = (q_pos - k_pos).abs()
        return -gap * self.slopes.to(q.dtype).view(-1, *[1] * gap.dim())
