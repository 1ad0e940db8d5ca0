"""RealFormer: each layer adds the scores of the layer before to its own."""

from __future__ import annotations

from torch import Tensor, nn

from regard.attentions import MaterializedAttention, SoftmaxAttention
from regard.errors import Unsupported
from regard.mixer import Can, Mixer, MultiHead, State, merge_heads


class RealFormer(Mixer):
    """S_l = Q Kᵀ / √e + S_{l−1};  out = softmax(S_l) V (He et al. 2021, arXiv 2012.11747).

    Called as a mixer it is the first layer, which is softmax attention; so is every layer of a
    stack that passes no scores on, which `regard.models.build` refuses. `chain` takes the scores of
    the layer before and returns its own:

        y, scores, _ = layers[0].chain(x)
        y, scores, _ = layers[1].chain(y, scores)

    In a model, `regard.stack.RealFormerStack` does this.
    """

    stack_name = "realformer"
    requires_stack = True

    def __init__(self, dim: int, heads: int, *, causal: bool = False) -> None:
        inner = SoftmaxAttention()
        super().__init__(dim, can=inner.can & Can(), causal=causal)
        self.heads = MultiHead(dim, heads, inner, causal=causal)

    def initial_state(self) -> State:
        """Empty KV cache."""
        return self.heads.initial_state()

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """The first layer: softmax attention."""
        return self.heads.mix(x, context, mask, state, attn_mask=attn_mask)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention map of the first layer."""
        return self.heads.weights(x, context, mask, attn_mask=attn_mask)

    def chain(
        self,
        x: Tensor,
        before: Tensor | None = None,
        *,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        state: State = None,
    ) -> tuple[Tensor, Tensor, State]:
        """One layer of a stack.

        Args:
            x: Tokens (b n d).
            before: Scores (b h n m) of the layer before. Default: none.
            context: Tokens (b m d) to attend to, for cross-attention.
            mask: (b m), True = keep.
            state: None for a whole sequence, or a stream's state; then m counts all tokens so far.

        Returns:
            Output (b n d), scores (b h n m) and the next state.
        """
        x, context = self._check_inputs(x, context, mask, None)
        if state is not None and not self.causal:
            raise Unsupported(
                f"{self.name} was not built causal, so the first chunk would depend on the last"
            )
        carried = ScoreResidual(before)
        q, k, v = self.heads.project(x, context)
        y, state = MaterializedAttention(before=carried)(
            q, k, v, causal=self.causal, mask=mask, state=state
        )
        assert carried.scores is not None
        return self.heads.out(merge_heads(y)), carried.scores, state


class ScoreResidual(nn.Module):
    """Adds the scores of the layer before, and stores the sum."""

    def __init__(self, before: Tensor | None) -> None:
        super().__init__()
        self.before = before
        self.scores: Tensor | None = None

    def forward(self, scores: Tensor) -> Tensor:
        if self.before is not None:
            if self.before.shape != scores.shape:
                raise ValueError(
                    f"before must have shape {tuple(scores.shape)}, not {tuple(self.before.shape)}"
                )
            scores = scores + self.before
        self.scores = scores
        return scores
