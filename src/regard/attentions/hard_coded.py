"""Weights that no token chooses: a Gaussian around each position, the same for every input."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attentions.kv_cache import COMPARES_POSITIONS
from regard.errors import check_positive
from regard.mixer import Attention, Can, check_batch

NEGLIGIBLE = 9  # beyond so many standard deviations the density is below the rounding of float64


class HardCodedState(NamedTuple):
    """The last values of a stream that a later token may still see, (b h reach f)."""

    values: Tensor | None


class HardCodedAttention(Attention):
    """out_i = Σ_j N(j; i + offset_h, σ²) v_j: the density itself, whatever the tokens are (You et al. 2020, arXiv 2005.00742).

    offsets   one for each head, in turn; each may be taken as an aim: the token before, itself, the token after
    """

    no_rotary_reason = "it has no queries and keys"

    def __init__(self, heads: int, *, offsets: Sequence[int], sigma: float) -> None:
        super().__init__()
        check_positive("sigma", sigma)
        if (
            not isinstance(offsets, Sequence)
            or not offsets
            or not all(isinstance(x, int) for x in offsets)
        ):
            raise ValueError(f"offsets must be whole numbers, at least one, not {offsets!r}")
        self.can, self.heads = Can(cross=COMPARES_POSITIONS), heads
        self.reach = ceil(NEGLIGIBLE * sigma) + max(abs(x) for x in offsets)
        aims = torch.tensor([offsets[h % len(offsets)] for h in range(heads)], dtype=torch.float64)
        gap = torch.arange(-self.reach, self.reach + 1, dtype=torch.float64) - aims[:, None]
        self.taps = (-0.5 * (gap / sigma) ** 2).exp() / (
            sigma * (2 * torch.pi) ** 0.5
        )  # (h 2*reach+1), exact

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: HardCodedState | None = None,
    ) -> tuple[Tensor, HardCodedState | None]:
        """See `Attention.forward`."""
        if not v.numel():
            return v, state
        if mask is not None:
            v = v.masked_fill(~mask[:, None, :, None], 0)
        taps = self.taps.to(v)
        if causal:
            taps = taps.masked_fill(
                torch.arange(2 * self.reach + 1, device=v.device) > self.reach, 0
            )
        past = torch.cat((self._before(v, state), v), 2)
        return _slide(
            F.pad(past, (0, 0, 0, self.reach)), taps
        ), None if state is None else HardCodedState(past[:, :, -self.reach :])

    def _before(self, v: Tensor, state: HardCodedState | None) -> Tensor:
        """The values before v, (b h reach f): those of the stream, or zeros."""
        if state is None or state.values is None:
            return v.new_zeros(*v.shape[:2], self.reach, v.shape[3])
        check_batch(state.values, v)
        return state.values

    def initial_state(self) -> HardCodedState:
        """No value yet."""
        return HardCodedState(None)


def _slide(v: Tensor, taps: Tensor) -> Tensor:
    """v (b h n+r f), taps (h r+1) -> (b h n f): each head with its own."""
    b, h, n, f = v.shape
    flat = v.permute(0, 3, 1, 2).reshape(b * f, h, n)
    return F.conv1d(flat, taps[:, None], groups=h).unflatten(0, (b, f)).permute(0, 2, 3, 1)
