"""Dispatch of tokens to experts with limited capacity, by two stable sorts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertDispatch(NamedTuple):
    """Assignment of T tokens with k choices each to E expert buffers of C slots.

    Attributes:
        token: (E, C), index of the token in each slot; T = empty.
        slot: (T, k), slot of each choice among the E · C slots; E · C = dropped.
        load: (E), number of slots in use.
    """

    token: Tensor
    slot: Tensor
    load: Tensor

    def dispatch(self, x: Tensor) -> Tensor:
        """Copy tokens (T, d) into the buffers, (E, C, d); empty slots are zero."""
        return torch.cat((x, x.new_zeros(1, x.shape[1])))[self.token]

    def combine(self, y: Tensor, gates: Tensor) -> Tensor:
        """Σ_k gate_k y_k of the expert outputs (E, C, d) with gates (T, k): (T, d).

        Dropped choices count as zero.
        """
        outputs = torch.cat((y.flatten(0, 1), y.new_zeros(1, y.shape[2])))[self.slot]
        return torch.einsum("tk,tkd->td", gates.to(y.dtype), outputs)


def dispatch_tokens(
    choices: Tensor,
    num_experts: int,
    *,
    mask: Tensor | None = None,
    capacity: Tensor | None = None,
) -> ExpertDispatch:
    """Assign choices (b, n, k) of experts to slots. Padding, mask (b, n) False, gets none.

    Earlier tokens of an example come first, with all their choices, so that no token loses its slot
    to a later one.

    Args:
        capacity: (b), slots per expert for each example. None: unlimited.
    """
    b, n, k = choices.shape
    expert = choices.flatten()
    if mask is None:
        served = torch.ones_like(expert, dtype=torch.bool)
    else:
        served = mask.flatten().repeat_interleave(k)
    if capacity is not None:
        example = torch.arange(b, device=choices.device).repeat_interleave(n * k)
        rank = rank_equal(torch.where(served, example * num_experts + expert, -1))
        served = served & (rank < capacity[example])
    expert = torch.where(served, expert, num_experts)  # a last buffer collects the others
    load = expert.new_zeros(num_experts + 1).scatter_add(0, expert, torch.ones_like(expert))
    load = load[:num_experts]
    size = int(load.max()) if load.numel() else 0
    slot = torch.where(served, expert * size + rank_equal(expert), num_experts * size)
    token = torch.full((num_experts * size + 1,), b * n, device=choices.device)
    token[slot] = torch.arange(b * n, device=choices.device).repeat_interleave(k)
    return ExpertDispatch(token[:-1].view(num_experts, size), slot.view(b * n, k), load)


def rank_equal(keys: Tensor) -> Tensor:
    """Number of equal keys before each key, (t) -> (t)."""
    ordered, order = keys.sort(stable=True)
    positions = torch.arange(len(keys), device=keys.device)
    rank = positions - torch.searchsorted(ordered, ordered)
    return torch.empty_like(rank).scatter_(0, order, rank)
