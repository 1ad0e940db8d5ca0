"""Set Transformer: attention blocks that ignore the order (Lee et al. 2019, arXiv 1810.00825)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.backends import check_mask
from regard.errors import check_int
from regard.mixer import Can, Mixer, MultiHead, State

NO_ORDER = "a set has no order"
SET = Can(
    causal=NO_ORDER,
    stream=NO_ORDER,
    maps="its layer norm and feed-forward layer are not linear in the values",
)


class MAB(Mixer):
    """MAB(X, Y) = norm(H + rFF(H)), H = norm(X + MultiHead(X, Y, Y)), with rFF(H) = relu(W H + b).

    X is x, and Y is the context, or x.

    Args:
        dim: Model width.
        heads: Number of heads.
        norm: Use the two layer norms.
        causal: Not supported.
    """

    def __init__(self, dim: int, heads: int, *, norm: bool = True, causal: bool = False) -> None:
        super().__init__(dim, can=SET, causal=causal)
        self.attention, self.rff = MultiHead(dim, heads, SoftmaxAttention()), nn.Linear(dim, dim)
        self.norm_attention, self.norm_rff = (
            nn.LayerNorm(dim) if norm else nn.Identity() for _ in range(2)
        )

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        h = self.norm_attention(
            x + self.attention.mix(x, context, mask, None, attn_mask=attn_mask)[0]
        )
        return self.norm_rff(h + self.rff(h).relu()), None


class SAB(Mixer):
    """SAB(X) = MAB(X, X): every element of a set attends to every other."""

    def __init__(self, dim: int, heads: int, *, norm: bool = True, causal: bool = False) -> None:
        super().__init__(dim, can=SET, causal=causal)
        self.block = MAB(dim, heads, norm=norm)

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        return self.block.mix(x, context, mask, None, attn_mask)


class ISAB(Mixer):
    """ISAB(X) = MAB(X, MAB(I, X)) with learned inducing points I (points d)."""

    def __init__(
        self, dim: int, heads: int, *, points: int, norm: bool = True, causal: bool = False
    ) -> None:
        by_points = "elements reach each other by the inducing points, which see all of them"
        super().__init__(dim, can=SET & Can(attn_mask=by_points), causal=causal)
        check_int(1, points=points)
        self.points = nn.Parameter(torch.randn(points, dim))
        self.gather, self.spread = (MAB(dim, heads, norm=norm) for _ in range(2))

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        points = self.points.expand(x.shape[0], -1, -1)
        held, _ = self.gather.mix(points, x if context is None else context, mask, None)
        return self.spread.mix(x, held, None, None)


class PMA(nn.Module):
    """Pooling by multi-head attention: PMA(Z) = MAB(S, rFF(Z)) with learned seeds S (seeds d).

    z (b n d) -> (b seeds d), independent of the order of the n elements. The number of vectors
    changes, so it is not a mixer.
    """

    def __init__(self, dim: int, heads: int, *, seeds: int = 1, norm: bool = True) -> None:
        super().__init__()
        check_int(1, seeds=seeds)
        self.seeds, self.rff = nn.Parameter(torch.randn(seeds, dim)), nn.Linear(dim, dim)
        self.block = MAB(dim, heads, norm=norm)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """z (b n d), mask (b n), True = keep -> (b seeds d)."""
        check_mask(mask, (z.shape[0], z.shape[1]), "mask")
        z = z if mask is None else z.masked_fill(~mask[..., None], 0)
        return self.block(self.seeds.expand(z.shape[0], -1, -1), self.rff(z).relu(), mask=mask)
