"""Localness modeling: a Gaussian bias whose centre and width are predicted from the queries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions.kv_cache import COMPARES_POSITIONS
from regard.backends import attend
from regard.errors import check_choice, check_positive
from regard.mixer import Attention, Can, State
from regard.numerics import at_least_float32
from regard.prior import Prior

NEEDS_LENGTH = "centre and width are fractions of the whole length, which the past does not know"
CENTRES, WINDOWS = ("token", "predicted"), ("query", "layer")


class LocalnessAttention(Attention):
    """softmax(q kᵀ / √e + G) v, G_ij = −(j − P_i)² / (2 σ_i²), σ_i = D_i / 2
    (Yang et al. 2018, arXiv 1810.10182).

    n is the number of real tokens and f the position of the first one. W (e e) and the u (e) are
    learned for each head.

    Args:
        heads: Number of heads.
        width: Head width e.
        centre: "predicted": P_i = f + n · sigmoid(u_p · tanh(W q_i)). "token": P_i = i.
        window: "query": D_i = n · sigmoid(u_d · tanh(W q_i)). "layer": one D, from the mean key.
        sigma: Fixed σ, so no window is predicted.
    """

    can = Can(
        cross=COMPARES_POSITIONS,
        causal=NEEDS_LENGTH,
        stream=NEEDS_LENGTH,
        rotary="it predicts positions from the queries",
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        centre: str = "predicted",
        window: str = "query",
        sigma: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("centre", centre, CENTRES)
        check_choice("window", window, WINDOWS)
        if sigma is not None:
            check_positive("sigma", sigma)
        self.heads, self.sigma = heads, sigma

        def parameter(*shape: int, used: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.randn(heads, *shape) / width**0.5) if used else None

        predicts_centre, predicts_window = centre == "predicted", sigma is None
        by_layer = predicts_window and window == "layer"
        by_query = predicts_window and window == "query"
        self.w = parameter(width, width, used=predicts_centre or by_query)
        self.u_centre = parameter(width, used=predicts_centre)
        self.u_window = parameter(width, used=predicts_window)
        self.w_keys = parameter(width, width, used=by_layer)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`."""
        real = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if mask is None else mask
        key_sum = k.masked_fill(~real[:, None, :, None], 0).sum(2)
        prior = _LocalnessPrior(self, real.sum(1), real.long().argmax(1), key_sum)
        return attend(q, k, v, prior=prior, mask=mask, attn_mask=attn_mask), None


class _LocalnessPrior(Prior):
    """The Gaussian of one call.

    Args:
        attention: Holds the parameters.
        n: Number of real tokens (b).
        first: Position of the first real token (b).
        key_sum: Sum of the real keys (b h e).
    """

    attention: LocalnessAttention
    uses_qk = True

    def __init__(
        self, attention: LocalnessAttention, n: Tensor, first: Tensor, key_sum: Tensor
    ) -> None:
        super().__init__()
        object.__setattr__(self, "attention", attention)  # not a submodule
        self.n, self.first, self.key_sum, self.heads = n, first, key_sum, attention.heads

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        module, q = self.attention, at_least_float32(q)
        per_example = (-1, *[1] * (q.dim() - 1))  # broadcasts against q (b h ... s e)
        n, first = self.n.to(q.dtype).view(per_example), self.first.view(per_example)
        hidden = q if module.w is None else _per_head_linear(q, module.w).tanh()
        centre = q_pos
        if module.u_centre is not None:
            centre = first + n * _per_head_dot(hidden, module.u_centre).sigmoid()
        sigma: Tensor | float = module.sigma or 0.0
        if module.u_window is not None:
            if module.w_keys is not None:
                mean = at_least_float32(self.key_sum) / self.n.clamp(min=1).view(-1, 1, 1)
                hidden = _per_head_linear(mean, module.w_keys).tanh()
                hidden = hidden.view(*mean.shape[:2], *[1] * (q.dim() - 3), mean.shape[2])
            window = n * _per_head_dot(hidden, module.u_window).sigmoid()
            sigma = (window / 2).clamp(min=1e-3)
        return -((k_pos - centre) ** 2) / (2 * sigma**2)


def _per_head_linear(x: Tensor, w: Tensor) -> Tensor:
    """x (b h ... e), w (h e f) -> (b h ... f)."""
    return torch.einsum("bh...e,hef->bh...f", x, w.to(x.dtype))


def _per_head_dot(x: Tensor, u: Tensor) -> Tensor:
    """x (b h ... e), u (h e) -> (b h ... 1)."""
    return torch.einsum("bh...e,he->bh...", x, u.to(x.dtype))[..., None]
