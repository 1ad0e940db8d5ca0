"""From choices to places: which token stands where in the buffers of the experts, and who finds no room.

No loop over tokens: two stable sorts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertDispatch(NamedTuple):
    """Where tokens go.  T tokens with k choices each, and E buffers of C places.

    source   (E C), the number of the token that stands there, T = none
    place    (T k), the place of each choice in the E * C places, E * C = it found no room
    load     (E), how many places of each buffer are taken
    """

    source: Tensor
    place: Tensor
    load: Tensor

    def give(self, x: Tensor) -> Tensor:
        """Tokens (T d) into the buffers, (E C d); empty places are zero."""
        return torch.cat((x, x.new_zeros(1, x.shape[1])))[self.source]

    def take(self, y: Tensor, gates: Tensor) -> Tensor:
        """Results (E C d) back to the tokens, Σ_k gate_k y_k with gates (T k): (T d), zero where there was no room."""
        found = torch.cat((y.flatten(0, 1), y.new_zeros(1, y.shape[2])))[self.place]
        return torch.einsum("tk,tkd->td", gates.to(y.dtype), found)


def dispatch_tokens(
    chosen: Tensor, count: int, *, real: Tensor | None = None, room: Tensor | None = None
) -> ExpertDispatch:
    """Choices (b n k) among `count` experts.  Padding, real (b n) False, takes no place.

    room (b) tells how many places of each expert belong to an example; None: as many as it needs.  Earlier tokens are
    served before later ones of the same example, with all their choices: so no token loses its place to a later one.
    """
    b, n, k = chosen.shape
    expert = chosen.flatten()
    taken = (
        torch.ones_like(expert, dtype=torch.bool)
        if real is None
        else real.flatten().repeat_interleave(k)
    )
    if room is not None:
        example = torch.arange(b, device=chosen.device).repeat_interleave(n * k)
        taken = taken & (ranks(torch.where(taken, example * count + expert, -1)) < room[example])
    expert = torch.where(taken, expert, count)  # a last buffer collects what is not served
    load = torch.bincount(expert, minlength=count + 1)[:count]
    size = int(load.max()) if load.numel() else 0
    place = torch.where(taken, expert * size + ranks(expert), count * size)
    source = torch.full((count * size + 1,), b * n, device=chosen.device)
    source[place] = torch.arange(b * n, device=chosen.device).repeat_interleave(k)
    return ExpertDispatch(source[:-1].view(count, size), place.view(b * n, k), load)


def ranks(key: Tensor) -> Tensor:
    """How many equal keys stand before each, (t) -> (t)."""
    ordered, order = key.sort(stable=True)
    behind = torch.arange(len(key), device=key.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(behind).scatter_(0, order, behind)
