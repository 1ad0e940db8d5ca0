"""Funnel: fewer queries ask all tokens, and their answers are spread out again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Can, Mixer, MultiHead, State, merge_heads, split_heads

POOLS_FUTURE_TOKENS = "a pooled query holds tokens that come later"


class FunnelMixer(Mixer):
    """Dai et al. 2020, arXiv 2006.03236: h' = means of `stride` tokens in a row, y = MultiHead(h', x, x), and y_i is repeated
    for each token of its run.

    `mix` gives the repeated answers alone: the block around a mixer adds x.  `pooled` gives what a stack of shorter layers
    goes on with, and `up` brings it back.

    cls   the first token is kept by itself, and runs begin after it
    """

    def __init__(
        self, dim: int, heads: int, *, stride: int = 2, cls: bool = False, causal: bool = False
    ) -> None:
        super().__init__(
            dim, can=Can(causal=POOLS_FUTURE_TOKENS, stream=POOLS_FUTURE_TOKENS), causal=causal
        )
        check_int(1, stride=stride)
        self.stride, self.cls = stride, cls
        self.ask = MultiHead(dim, heads, SoftmaxAttention())

    def pool(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The means of the real tokens of each run, x (b n d) -> (b p d), and which runs hold one, mask (b n) -> (b p)."""
        return pool_tokens(x, mask, self.stride, cls=self.cls)

    def up(self, y: Tensor, n: int, x: Tensor | None = None) -> Tensor:
        """Each of the pooled tokens y (b p d) once for every token of its run, (b n d); x (b n d) is added, as a residual."""
        out = upsample_tokens(y, n, self.stride, cls=self.cls)
        return out if x is None else x + out

    def pooled(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """h' + MultiHead(h', x, x), (b p d), and the mask (b p) that goes with it: what the next, shorter layer reads."""
        x, _ = self._check_inputs(x, None, mask, None)
        short, held = self.pool(x, mask)
        return short + self.ask.mix(short, x, mask, None)[0], held

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        short, _ = self.pool(x, mask if context is None else None)
        y, _ = self.ask.mix(short, x if context is None else context, mask, None)
        return self.up(y, x.shape[1]), None

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """The map of the pooled queries, row by row repeated."""
        short, _ = self.pool(x, mask if context is None else None)
        found = self.ask.weights(short, x if context is None else context, mask)
        return split_heads(self.up(merge_heads(found), x.shape[1]), found.shape[1])


def pool_tokens(
    x: Tensor, mask: Tensor | None, stride: int, *, cls: bool
) -> tuple[Tensor, Tensor | None]:
    """The means of the real tokens of each run of `stride`, x (b n d) -> (b p d), and which runs hold one, mask (b n) -> (b p).

    cls   the first token is a run by itself
    """
    front = stride - 1 if cls else 0  # so that the first token ends a run of its own
    real = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    back = -(x.shape[1] + front) % stride
    runs = F.pad(real, (front, back)).unflatten(1, (-1, stride))
    sums = (
        F.pad(x.masked_fill(~real[..., None], 0), (0, 0, front, back))
        .unflatten(1, (-1, stride))
        .sum(2)
    )
    return sums / runs.sum(2).clamp(min=1)[..., None].to(
        x.dtype
    ), None if mask is None else runs.any(2)


def upsample_tokens(y: Tensor, n: int, stride: int, *, cls: bool) -> Tensor:
    """Each of the pooled tokens y (b p d) once for every token of its run, (b n d)."""
    front = stride - 1 if cls else 0
    return y[:, (torch.arange(n, device=y.device) + front) // stride]
