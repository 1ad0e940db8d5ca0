"""Average attention network: the mean of all tokens so far, a feed-forward layer and a gate."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.can import NO_HEADS
from regard.errors import check_int
from regard.mixer import Can, Mixer, check_batch
from regard.numerics import at_least_float32
from regard.state import per_example


@per_example("tokens")
class AverageState(NamedTuple):
    """Sum (b 1 d) and number of the tokens so far, an int or (b); the sum is None before the
    first."""

    total: Tensor | None
    tokens: int | Tensor


class Average(Mixer):
    """Average attention network (Zhang et al. 2018, arXiv 1805.00631).

    g_i = FFN(mean of x_j, j ≤ i), [a, f] = σ(W [x_i; g_i]), out_i = a ⊙ x_i + f ⊙ g_i. If not
    causal, the mean is over all tokens.

    Args:
        dim: Model width.
        hidden: Width of the feed-forward layer. Default: 4 · dim.
        causal: Average earlier tokens only.
    """

    def __init__(self, dim: int, *, hidden: int | None = None, causal: bool = False) -> None:
        no_weights = "it averages all earlier tokens, without weights of pairs"
        super().__init__(dim, can=Can(attn_mask=no_weights, heads=NO_HEADS), causal=causal)
        hidden = 4 * dim if hidden is None else hidden
        check_int(1, hidden=hidden)
        self.ffn = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.gate = nn.Linear(2 * dim, 2 * dim)

    def initial_state(self) -> AverageState:
        """State before the first token."""
        return AverageState(None, 0)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: AverageState | None
    ) -> tuple[Tensor, AverageState | None]:
        """(b n d) -> (b n d)."""
        mean, state = self._mean(x, x if context is None else context, mask, state)
        g = self.ffn(mean.expand(x.shape))
        input_gate, forget_gate = self.gate(torch.cat((x, g), -1)).sigmoid().chunk(2, -1)
        return input_gate * x + forget_gate * g, state

    def _mean(
        self, x: Tensor, source: Tensor, mask: Tensor | None, state: AverageState | None
    ) -> tuple[Tensor, AverageState | None]:
        """Mean over the tokens that each token sees, and the next state.

        Masked tokens are zero already.
        """
        wide = at_least_float32(source)  # long sums lose precision in 16 bits
        real = wide.new_ones(source.shape[:2]) if mask is None else mask.to(wide.dtype)
        if not self.causal:
            count = real.sum(1)[:, None, None].clamp(min=1)
            return (wide.sum(1, keepdim=True) / count).to(x.dtype), None
        total, count = wide.cumsum(1), real.cumsum(1)[..., None]
        if state is not None:
            if state.total is not None:
                check_batch(state.total, wide)
                before = state.tokens
                before = before[:, None, None] if isinstance(before, Tensor) else before
                total, count = total + state.total, count + before
            state = AverageState(total[:, -1:], state.tokens + x.shape[1])
        return (total / count.clamp(min=1)).to(x.dtype), state

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """Weight of each token in each mean, (b 1 n m)."""
        m = x.shape[1] if context is None else context.shape[1]
        keep = torch.ones(x.shape[0], x.shape[1], m, dtype=x.dtype, device=x.device)
        keep = keep.tril() if self.causal else keep
        keep = keep if mask is None else keep * mask[:, None, :]
        return (keep / keep.sum(-1, keepdim=True).clamp(min=1))[:, None]
