"""Softmax attention inside groups that the tokens themselves form."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from regard.backends import token_groups
from regard.backends.token_groups import TokenGroups
from regard.mixer import Attention, State
from regard.route import Route


class RoutedAttention(Attention):
    """softmax attention of each query over the keys of its groups; several groups merge by their log-sum-exp.

    scale     of the scores, 1/sqrt(e) unless given
    keyless   keys are the queries, so there is no projection to keys
    level     queries and keys pass a layer norm first, which has neither scale nor shift
    """

    no_rotary_reason = (
        "turned queries and keys would be routed by their places, not by what they say"
    )

    def __init__(
        self,
        route: Route,
        *,
        scale: float | None = None,
        shared_qk: bool = False,
        level: bool = False,
    ) -> None:
        super().__init__()
        self.route, self.scale, self.shared_qk, self.level = route, scale, shared_qk, level
        self.can, self.heads = route.can, route.heads

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
        if self.level:
            q, k = (F.layer_norm(x, x.shape[-1:]) for x in (q, k))
        found = self.route(q, k, mask)
        if causal:
            found = [_past(group) for group in found]
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        return token_groups.attend(q, k, v, found, scale=scale, mask=mask), None


def _past(group: TokenGroups) -> TokenGroups:
    keep = group.k[..., None, :] <= group.q[..., :, None]
    return group._replace(keep=keep if group.keep is None else keep & group.keep)
