"""Attention with an auxiliary loss that makes its heads differ."""

from __future__ import annotations

from torch import Tensor

from regard.auxiliary import record_aux
from regard.errors import check_choice, check_positive
from regard.mixer import Attention, QueryMaskAttention, State, identity_values
from regard.numerics import unit_vectors


class DisagreementAttention(QueryMaskAttention):
    """Any attention, with a disagreement regularization of its heads
    (Li et al. 2018, arXiv 1810.10183).

    Records the auxiliary loss "disagreement": `penalty` times the mean over all pairs of heads
    (i, j), including i = j, of the similarity given by `kind`. Padding is left out; next to a
    context that takes the `query_mask`.

    Args:
        inner: The attention.
        kind: "subspace": cos(v_i, v_j) of the values, for each token.
            "positions": Σ |A_i ⊙ A_j| of the attention maps, for each query.
            "outputs": cos(o_i, o_j) of the outputs, for each token.
        penalty: Weight of the loss.
    """

    KINDS = ("subspace", "positions", "outputs")

    def __init__(self, inner: Attention, *, kind: str = "outputs", penalty: float = 1.0) -> None:
        super().__init__()
        check_choice("kind", kind, self.KINDS)
        check_positive("penalty", penalty)
        self.inner, self.kind, self.penalty = inner, kind, penalty
        self.can, self.length, self.heads = inner.can, inner.length, inner.heads

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
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`. Streams record no loss, since they are not for training."""
        masks = {"mask": mask} if attn_mask is None else {"mask": mask, "attn_mask": attn_mask}
        if isinstance(self.inner, QueryMaskAttention):
            masks["query_mask"] = query_mask
        out, next_state = self.inner(q, k, v, causal=causal, state=state, **masks)

        def loss() -> Tensor:
            if self.kind == "subspace":
                similarity = _head_similarity(unit_vectors(v), mask)
            elif self.kind == "outputs":
                similarity = _head_similarity(unit_vectors(out), query_mask)
            else:
                maps = self.inner(q, k, identity_values(k, v), causal=causal, **masks)[0]
                similarity = _head_similarity(maps.abs(), query_mask)
            return self.penalty * similarity

        if state is None:
            record_aux("disagreement", loss, is_loss=True)
        return out, next_state

    def initial_state(self) -> State:
        """State of the inner attention."""
        return self.inner.initial_state()


def _head_similarity(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of x_i · x_j over tokens, examples and pairs of heads, for x (b h n e),
    mask (b n)."""
    total = x.sum(1)  # Σ_ij x_i · x_j = |Σ_i x_i|²
    similarity = (total * total).sum(-1) / x.shape[1] ** 2
    if mask is None:
        return similarity.mean()
    return similarity[mask].sum() / mask.sum().clamp(min=1)
