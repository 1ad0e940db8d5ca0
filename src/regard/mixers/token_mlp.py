"""MLP-Mixer's token mixing: a small network over positions, the same for each channel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from regard.can import NO_HEADS
from regard.errors import check_int
from regard.mixer import Can, Mixer, State
from regard.numerics import slice_dim, token_matmul

OWN = "its weights mix all positions of one sequence"


class TokenMLP(Mixer):
    """out = W_2 gelu(W_1 x + b_1) + b_2 over tokens, with W_1 (hidden length), W_2 (length hidden).

    Tolstikhin et al. 2021, arXiv 2105.01601. The paper's channel mixing is the feed-forward layer
    of a block.
    """

    def __init__(self, dim: int, length: int, hidden: int, *, causal: bool = False) -> None:
        can = Can(
            causal=OWN,
            cross=OWN,
            stream=OWN,
            mask=OWN,
            attn_mask=OWN,
            length=f"its weights were built for {length} positions",
            maps="it is not linear in its tokens",
            heads=NO_HEADS,
        )
        check_int(1, length=length, hidden=hidden)
        super().__init__(dim, can=can, causal=causal, length=length)
        self.up, self.down = nn.Linear(length, hidden), nn.Linear(hidden, length)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d). A shorter sequence is treated as padded with zeros."""
        n = x.shape[1]
        hidden = F.gelu(token_matmul(slice_dim(self.up.weight, 1, 0, n), x, self.up.bias))
        weight, bias = (slice_dim(p, 0, 0, n) for p in (self.down.weight, self.down.bias))
        return token_matmul(weight, hidden, bias), None
