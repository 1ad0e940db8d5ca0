"""Show, attend and tell's soft attention as a mixer (Xu et al. 2015, arXiv 1502.03044)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions.additive import additive_scores
from regard.auxiliary import record_aux
from regard.can import NO_HEADS
from regard.cells.show_attend import doubly_stochastic
from regard.mixer import Can, Mixer, State, check_batch
from regard.numerics import attention_mask, masked_softmax


class SoftVisualAttention(Mixer):
    """out_t = σ(w · x_t + b) Σ_i α_ti a_i,  α_t = softmax_i(v · tanh(U x_t + W a_i + c)), a_i the
    context tokens.

    For whole sequences it records the auxiliary loss λ Σ_i (1 − Σ_t α_ti)² as "doubly stochastic".

    Args:
        dim: Model width.
        width: Width of the scoring network.
        penalty: λ.
        causal: Attend to earlier tokens only.
    """

    def __init__(self, dim: int, width: int, *, penalty: float = 1.0, causal: bool = False) -> None:
        super().__init__(dim, can=Can(heads=NO_HEADS), causal=causal)
        if isinstance(penalty, bool) or not isinstance(penalty, float | int) or penalty < 0:
            raise ValueError(f"penalty must be a number >= 0, not {penalty!r}")
        self.penalty = penalty
        self.query, self.key, self.gate = (
            nn.Linear(dim, width, bias=False),
            nn.Linear(dim, width),
            nn.Linear(dim, 1),
        )
        self.score = nn.Parameter(torch.empty(width).uniform_(-1, 1) / width**0.5)

    def initial_state(self) -> State:
        """State before the first token."""
        return (None, None)

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) and (b m d) -> (b n d). The state holds all tokens and their keys."""
        cells = x if context is None else context
        keys = self.key(cells)
        if state is not None and state[0] is not None:
            check_batch(state[0], cells)
            cells, keys = torch.cat((state[0], cells), 1), torch.cat((state[1], keys), 1)
        alpha = self._alpha(x, keys, mask, attn_mask)
        if state is None and self.penalty:
            self._tell(alpha, mask, context is None)
        y = torch.sigmoid(self.gate(x)) * (alpha @ cells)
        if state is None:
            return y, None
        # a state must not be a view of the caller's tokens
        return y, (cells.clone() if cells is x else cells, keys)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """α times the gate, (b 1 n m)."""
        alpha = self._alpha(x, self.key(x if context is None else context), mask, attn_mask)
        return (torch.sigmoid(self.gate(x)) * alpha)[:, None]

    def _alpha(
        self, x: Tensor, keys: Tensor, mask: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor:
        scores = additive_scores(self.query(x)[:, None], keys[:, None], self.score[None])
        keep = attention_mask(
            x.shape[1],
            keys.shape[1],
            causal=self.causal,
            mask=mask,
            device=x.device,
            attn_mask=attn_mask,
        )
        return masked_softmax(scores, keep)[:, 0]

    def _tell(self, alpha: Tensor, mask: Tensor | None, own: bool) -> None:
        """Left-out tokens neither look nor want to be looked at."""
        looked = alpha if mask is None or not own else alpha * mask[..., None]
        record_aux(
            "doubly stochastic",
            lambda: doubly_stochastic(looked, scale=self.penalty, mask=mask),
            is_loss=True,
        )
