"""Funnel: pooled queries attend to all tokens, and their outputs are repeated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Can, Mixer, MultiHead, State, merge_heads, split_heads

POOLS_FUTURE_TOKENS = "a pooled query contains later tokens"
CAN = Can(
    causal=POOLS_FUTURE_TOKENS,
    stream=POOLS_FUTURE_TOKENS,
    independent_queries="a pooled query is the mean of several queries",
    attn_mask="a pooled query stands for several tokens",
)


class FunnelMixer(Mixer):
    """Dai et al. 2020, arXiv 2006.03236: h' = mean of `stride` consecutive tokens,
    y = MultiHead(h', x, x), and each y_i is repeated for the tokens it stands for.

    `mix` returns the repeated outputs; the block around the mixer adds x. `shorten` returns the
    input of the next, shorter layer, and `upsample` restores the length.

    Args:
        dim: Model width.
        heads: Number of heads.
        stride: Tokens per query.
        cls: Keep the first token unpooled.
        causal: Not supported.
    """

    def __init__(
        self, dim: int, heads: int, *, stride: int = 2, cls: bool = False, causal: bool = False
    ) -> None:
        super().__init__(dim, can=CAN, causal=causal)
        check_int(1, stride=stride)
        self.stride, self.cls = stride, cls
        self.attention = MultiHead(dim, heads, SoftmaxAttention())

    def pool(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Mean of each run of tokens (b p d), and the mask (b p); see `pool_tokens`."""
        return pool_tokens(x, mask, self.stride, cls=self.cls)

    def upsample(self, y: Tensor, n: int, x: Tensor | None = None) -> Tensor:
        """Repeat pooled tokens y (b p d) to n tokens, and add the residual x (b n d)."""
        out = upsample_tokens(y, n, self.stride, cls=self.cls)
        return out if x is None else x + out

    def shorten(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """h' + MultiHead(h', x, x), (b p d), and its mask (b p): the input of the next layer."""
        x, _ = self._check_inputs(x, None, mask, None)
        short, short_mask = self.pool(x, mask)
        return short + self.attention.mix(short, x, mask, None)[0], short_mask

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        short, _ = self.pool(x, mask if context is None else query_mask)
        y, _ = self.attention.mix(short, x if context is None else context, mask, None)
        return self.upsample(y, x.shape[1]), None

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention map of the pooled queries, with rows repeated."""
        short, _ = self.pool(x, mask if context is None else query_mask)
        weights = self.attention.weights(short, x if context is None else context, mask)
        return split_heads(self.upsample(merge_heads(weights), x.shape[1]), weights.shape[1])


def pool_tokens(
    x: Tensor, mask: Tensor | None, stride: int, *, cls: bool
) -> tuple[Tensor, Tensor | None]:
    """Mean of the unmasked tokens in each run of `stride`.

    Args:
        x: Tokens (b n d).
        mask: (b n), True = keep.
        stride: Tokens per run.
        cls: Keep the first token unpooled.

    Returns:
        Means (b p d), and the mask (b p) of runs with at least one unmasked token.
    """
    front = stride - 1 if cls else 0  # so that the first run ends with the first token
    real = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    back = -(x.shape[1] + front) % stride
    runs = F.pad(real, (front, back)).unflatten(1, (-1, stride))
    x = F.pad(x.masked_fill(~real[..., None], 0), (0, 0, front, back))
    counts = runs.sum(2).clamp(min=1)[..., None].to(x.dtype)
    means = x.unflatten(1, (-1, stride)).sum(2) / counts
    return means, None if mask is None else runs.any(2)


def upsample_tokens(y: Tensor, n: int, stride: int, *, cls: bool) -> Tensor:
    """Repeat pooled tokens y (b p d) for every token of their run: (b n d)."""
    front = stride - 1 if cls else 0
    return y[:, (torch.arange(n, device=y.device) + front) // stride]
