"""RealFormer: each layer adds the scores of the layer before to its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attend.call import make_call
from regard.attentions import SoftmaxAttention
from regard.attentions.cached import Cached, Place, can_over
from regard.mixer import Mixer, MultiHead, State
from regard.pattern import Full
from regard.weigh import Softmax


class RealFormer(Mixer):
    """S_l = Q Kᵀ / √e + S_{l−1};  out = softmax(S_l) V (He et al. 2021, arXiv 2012.11747).

    Called as any mixer it is the first layer, which has nothing before it.  `chain` takes the scores of the layer before
    and gives its own, so that a stack can hand them on:

        y, scores, _ = layers[0].chain(x)
        y, scores, _ = layers[1].chain(y, scores)
    """

    def __init__(self, dim: int, heads: int, *, causal: bool = False) -> None:
        inner = SoftmaxAttention()
        super().__init__(dim, can=inner.can, causal=causal)
        self.heads = MultiHead(dim, heads, inner, causal=causal)

    def start(self) -> State:
        """An empty cache of keys and values."""
        return self.heads.start()

    def mix(self, x: Tensor, memory: Tensor | None, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """The first layer: plain attention."""
        return self.heads.mix(x, memory, mask, state)

    def weights(self, x: Tensor, memory: Tensor | None, mask: Tensor | None) -> Tensor:
        """The map of the first layer."""
        return self.heads.weights(x, memory, mask)

    def chain(
        self, x: Tensor, before: Tensor | None = None, *, memory: Tensor | None = None, mask: Tensor | None = None,
        state: State = None,
    ) -> tuple[Tensor, Tensor, State]:  # fmt: skip
        """x (b n d), scores of the layer before (b h n m) -> (b n d), scores (b h n m), and the next state.

        `state` is None for a whole sequence; `start()` begins a stream, in which m counts all tokens so far.
        """
        x, memory = self._checked(x, memory, mask, None)
        attention = _Residual(before)
        q, k, v = self.heads.project(x, memory)
        y, state = attention.attend(q, k, v, causal=self.causal, mask=mask, state=state)
        assert attention.scores is not None
        return self.heads.out(y.transpose(1, 2).flatten(2)), attention.scores, state


class _Residual(Cached):
    """Attention for one call, that adds scores and keeps what came of it."""

    def __init__(self, before: Tensor | None) -> None:
        super().__init__()
        self.pattern, self.can, self.before = Full(), can_over(Full()), before
        self.scores: Tensor | None = None
        self.weigh = Softmax()

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, *, mask: Tensor | None = None, marks: Tensor | None = None
    ) -> Tensor:
        call = make_call(
            q, k, v, pattern=place.pattern, prior=None, mask=mask, marks=None, scale=1 / math.sqrt(q.shape[-1]),
            q_at=place.q_at, k_at=place.k_at,
        )  # fmt: skip
        scores = call.q @ call.k.transpose(-1, -2) * call.scale
        if self.before is not None:
            if self.before.shape != scores.shape:
                raise ValueError(f"the scores before must be {tuple(scores.shape)}, not {tuple(self.before.shape)}")
            scores = scores + self.before
        self.scores = scores
        return torch.matmul(self.weigh(scores, call.keep()), call.v)
