"""Softmax attention inside groups of tokens that a router forms from their content."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attentions.softmax import SoftmaxAttention
from regard.backends import token_groups
from regard.errors import check_int
from regard.mixer import Attention, SharedQKAttention, State
from regard.pattern import Band
from regard.route import Route


class RoutedAttention(Attention):
    """Softmax attention of each query over the keys of its groups. Several groups merge by
    log-sum-exp.

    Args:
        route: Assigns tokens to groups.
        scale: Scale of the scores. Defaults to 1/√e.
        normalize: Whether queries and keys of routed heads first pass a layer norm without scale
            and shift.
        local_heads: Heads before the routed ones, with softmax attention over a window.
        window: Tokens on each side that local heads attend to.
    """

    def __init__(
        self,
        route: Route,
        *,
        scale: float | None = None,
        normalize: bool = False,
        local_heads: int = 0,
        window: int = 128,
    ) -> None:
        super().__init__()
        check_int(0, local_heads=local_heads)
        self.route, self.scale, self.normalize = route, scale, normalize
        self.local_heads = local_heads
        self.heads = None if route.heads is None else local_heads + route.heads
        self.local = SoftmaxAttention(Band(window, window), scale=scale) if local_heads else None
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
        if self.local is None:
            return self._attend_in_groups(q, k, v, causal, mask), None
        h = self.local_heads
        near, _ = self.local(q[:, :h], k[:, :h], v[:, :h], causal=causal, mask=mask)
        far = self._attend_in_groups(q[:, h:], k[:, h:], v[:, h:], causal, mask)
        return torch.cat((near, far), 1), None

    def _attend_in_groups(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
    ) -> Tensor:
        """Attention of the routed heads."""
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
        return out


class SharedQKRoutedAttention(RoutedAttention, SharedQKAttention):
    """`RoutedAttention` whose keys are its queries."""
