"""Softmax attention inside groups of tokens that a router forms from their content."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from regard.backends import token_groups
from regard.mixer import Attention, SharedQKAttention, State
from regard.route import Route


class RoutedAttention(Attention):
    """Softmax attention of each query over the keys of its groups. Several groups merge by
    log-sum-exp.

    Args:
        route: Assigns tokens to groups.
        scale: Scale of the scores. Defaults to 1/√e.
        normalize: Whether queries and keys first pass a layer norm without scale and shift.
    """

    def __init__(
        self,
        route: Route,
        *,
        scale: float | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.route, self.scale, self.normalize, self.heads = route, scale, normalize, route.heads
        self.can = route.can.without(
            attn_mask="its groups depend on all tokens",
            rotary="tokens would be routed by position instead of content",
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`."""
        if self.normalize:
            q, k = (F.layer_norm(x, x.shape[-1:]) for x in (q, k))
        groups = self.route(q, k, mask)
        if causal:
            groups = [
                g._replace(keep=past if g.keep is None else past & g.keep)
                for g in groups
                for past in [g.k[..., None, :] <= g.q[..., :, None]]
            ]
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        out, _ = token_groups.attend(q, k, v, groups, scale=scale, mask=mask)
        return out, None


class SharedQKRoutedAttention(RoutedAttention, SharedQKAttention):
    """`RoutedAttention` whose keys are its queries."""
