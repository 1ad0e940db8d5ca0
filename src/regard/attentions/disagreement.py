"""Attention whose heads pay for being alike."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from regard.auxiliary import record_aux
from regard.errors import check_choice, check_positive
from regard.mixer import Attention, State, identity_values


class DisagreementAttention(Attention):
    """Any attention whose heads are asked to differ (Li et al. 2018, arXiv 1810.10183).

    What the heads have in common is told as a cost, `penalty` times the mean over all pairs of heads (i, j), i = j too, of

    "subspace"   cos(v_i, v_j), the values, token by token
    "positions"  Σ_jk |A_i ⊙ A_j|, the maps, query by query
    "outputs"    cos(o_i, o_j), the results, token by token
    """

    KINDS = ("subspace", "positions", "outputs")
    needs_query_mask = True

    def __init__(self, inner: Attention, *, kind: str = "outputs", penalty: float = 1.0) -> None:
        super().__init__()
        check_choice("kind", kind, self.KINDS)
        check_positive("penalty", penalty)
        self.inner, self.kind, self.penalty = inner, kind, penalty
        self.can, self.length, self.heads, self.supports_gqa = (
            inner.can,
            inner.length,
            inner.heads,
            inner.supports_gqa,
        )
        self.no_rotary_reason = inner.no_rotary_reason

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`; query_mask (b n) says which queries count.  A stream tells nothing: it does not train."""
        out, after = self.inner(q, k, v, causal=causal, mask=mask, state=state)
        if state is not None:
            return out, after

        def common() -> Tensor:
            if self.kind == "subspace":
                return _alike(F.normalize(v, dim=-1), mask)
            if self.kind == "outputs":
                return _alike(F.normalize(out, dim=-1), query_mask)
            return _alike(
                self.inner(q, k, identity_values(k, v), causal=causal, mask=mask)[0].abs(),
                query_mask,
            )

        record_aux("disagreement", lambda: self.penalty * common(), is_loss=True)
        return out, after

    def initial_state(self) -> State:
        """The state of the attention inside."""
        return self.inner.initial_state()


def _alike(x: Tensor, query_mask: Tensor | None) -> Tensor:
    """The mean over query_mask tokens, examples and pairs of heads of x_i · x_j, for x (b h n e)."""
    total = x.sum(1)  # Σ_ij x_i · x_j = |Σ_i x_i|²
    each = (total * total).sum(-1) / x.shape[1] ** 2
    return (
        each.mean()
        if query_mask is None
        else each[query_mask].sum() / query_mask.sum().clamp(min=1)
    )
