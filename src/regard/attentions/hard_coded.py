"""Hard-coded Gaussian attention: fixed weights around each position, independent of the tokens."""

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

CAN = Can(
    cross=COMPARES_POSITIONS,
    attn_mask="its weights are fixed, not a softmax over visible keys",
    rotary="it has no queries and keys",
)
MAX_SIGMAS = 9  # beyond this many standard deviations the density is below float64 rounding


class HardCodedState(NamedTuple):
    """The last values of a stream that a later token may still see, (b h reach f)."""

    values: Tensor | None


class HardCodedAttention(Attention):
    """out_i = Σ_j N(j; i + offset_h, σ²) v_j, without normalization
    (You et al. 2020, arXiv 2005.00742).

    Args:
        heads: Number of heads.
        offsets: Offset of the centre for each head, cycled over the heads: -1 is the previous
            token.
        sigma: Standard deviation σ.
    """

    def __init__(self, heads: int, *, offsets: Sequence[int], sigma: float) -> None:
        super().__init__()
        check_positive("sigma", sigma)
        valid = isinstance(offsets, Sequence) and all(isinstance(x, int) for x in offsets)
        if not valid or not offsets:
            raise ValueError(f"offsets must be a non-empty sequence of integers, not {offsets!r}")
        self.can, self.heads = CAN, heads
        self.reach = ceil(MAX_SIGMAS * sigma) + max(map(abs, offsets))
        centres = [offsets[h % len(offsets)] for h in range(heads)]
        # On the CPU also under torch.device("meta"): it is no buffer, so nothing would fill it.
        span = torch.arange(-self.reach, self.reach + 1, dtype=torch.float64, device="cpu")
        distance = span - torch.tensor(centres, dtype=torch.float64, device="cpu")[:, None]
        density = (-0.5 * (distance / sigma) ** 2).exp() / (sigma * (2 * torch.pi) ** 0.5)
        self.kernel = density  # (h, 2 * reach + 1), kept in float64 whatever the module's dtype

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
        kernel = self.kernel.to(v)
        if causal:
            future = torch.arange(kernel.shape[1], device=v.device) > self.reach
            kernel = kernel.masked_fill(future, 0)
        if state is None or state.values is None:
            past = v.new_zeros(*v.shape[:2], self.reach, v.shape[3])
        else:
            check_batch(state.values, v)
            past = state.values
        v = torch.cat((past, v), 2)
        next_state = None if state is None else HardCodedState(v[:, :, -self.reach :])
        b, h, _, f = v.shape
        flat = F.pad(v, (0, 0, 0, self.reach)).permute(0, 3, 1, 2).flatten(0, 1)  # (b * f, h, n)
        out = F.conv1d(flat, kernel[:, None], groups=h)
        return out.unflatten(0, (b, f)).permute(0, 2, 3, 1), next_state

    def initial_state(self) -> HardCodedState:
        """No values yet."""
        return HardCodedState(None)
