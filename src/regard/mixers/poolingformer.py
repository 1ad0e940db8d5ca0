"""Poolingformer: a sliding window, then a larger window of pooled keys over its output."""

from __future__ import annotations

from torch import Tensor, nn

from regard.attentions import BlockCompressedAttention, SoftmaxAttention
from regard.compression import MeanCompression
from regard.errors import check_int
from regard.mixer import Can, Mixer, MultiHead, State
from regard.pattern import Band


class Poolingformer(Mixer):
    """Poolingformer (Zhang et al. 2021, arXiv 2105.04371): out = W⁰ (y + z).

    y is the attention of x over |i − j| ≤ window. z is the attention of y over mean-pooled keys and
    values (`kernel` tokens each, `stride` apart) within ±reach.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        window: int,
        reach: int,
        kernel: int,
        stride: int,
        causal: bool = False,
    ) -> None:
        check_int(1, kernel=kernel)
        check_int(kernel - 1, reach=reach)  # else no pooled key would fit
        near = SoftmaxAttention(Band(window, window))
        far = BlockCompressedAttention(MeanCompression(kernel, stride), window=reach)
        no_maps = "the second level attends to the output of the first"
        can = near.can & far.can & Can("global_attention_mask", maps=no_maps)
        super().__init__(dim, can=can, causal=causal)
        self.near, self.far = (MultiHead(dim, heads, level, causal=causal) for level in (near, far))
        self.far.out = nn.Identity()

    def initial_state(self) -> State:
        """Initial states of both levels."""
        return self.near.initial_state(), self.far.initial_state()

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        near, far = (None, None) if state is None else state
        y, near = self.near.mix_heads(x, None, mask, near)
        z, far = self.far.mix_heads(y, None, mask, far)
        return self.near.out(y + z), (near, far)
