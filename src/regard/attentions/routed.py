"""Softmax attention inside groups that the tokens themselves form."""

from __future__ import annotations

import math

from torch import Tensor

from regard.attend import groups
from regard.attend.groups import Indexed
from regard.mixer import Attention, State
from regard.route import Route


class Routed(Attention):
    """softmax attention of each query over the keys of its groups; several groups merge by their log-sum-exp."""

    def __init__(self, route: Route, *, scale: float | None = None) -> None:
        super().__init__()
        self.route, self.scale, self.can = route, scale, route.can

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, state: State = None
    ) -> tuple[Tensor, State]:
        """See `Attention.attend`."""
        found = self.route(q, k, mask)
        if causal:
            found = [_past(group) for group in found]
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        return groups.attend(q, k, v, found, scale=scale, mask=mask), None


def _past(group: Indexed) -> Indexed:
    keep = group.k[..., None, :] <= group.q[..., :, None]
    return group._replace(keep=keep if group.keep is None else keep & group.keep)
