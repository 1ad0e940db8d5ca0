"""XCiT: channels attend to channels, and tokens meet their neighbours on a grid (El-Nouby
et al. 2021, arXiv 2106.09681).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.can import NO_HEADS
from regard.errors import check_choice, check_int
from regard.mixer import Can, Mixer, MultiHead, State, check_heads
from regard.numerics import at_least_float32, unit_vectors

WHOLE = "the covariance of channels is computed over the whole sequence"
CHANNELS = "channels attend to channels, not tokens to tokens"


class CrossCovarianceAttention(nn.Module):
    """Cross-covariance attention: out = W⁰ [V softmax(s K̂ᵀ Q̂)], with channels of Q̂ and K̂
    normalised over the tokens.

    (b n d) -> (b n d). The softmax runs over the e channels of a head; s is 1/τ of the paper, one
    number per head.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.sharpness = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Masked tokens have no influence."""
        v = self.v(x).unflatten(-1, (self.heads, -1))
        y = torch.einsum("bhce,bnhe->bnhc", self.channels(x, mask), v)
        return self.out(y.flatten(2))

    def channels(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention map between channels, (b h e e)."""
        q, k = (self._unit(f(x), mask) for f in (self.q, self.k))
        scores = torch.einsum("bnhc,bnhe->bhce", q, k)
        return (scores * self.sharpness[:, None, None]).softmax(-1)

    def _unit(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        return unit_vectors(x, dim=1).unflatten(-1, (self.heads, -1))


class MaskedInstanceNorm(nn.Module):
    """Normalises each channel over the unmasked tokens of each example."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(b n d) -> (b n d)."""
        wide = at_least_float32(x)  # squares overflow in float16
        real = torch.ones_like(wide[..., :1]) if mask is None else mask[..., None].to(wide.dtype)
        count = real.sum(1, keepdim=True).clamp(min=1)
        wide = wide - (wide * real).sum(1, keepdim=True) / count
        variance = (wide.square() * real).sum(1, keepdim=True) / count
        y = wide * torch.rsqrt(variance + self.eps)
        return y.to(x.dtype) * self.weight + self.bias


class MaskedBatchNorm(nn.Module):
    """Batch norm over all unmasked tokens of a batch.

    In training, examples influence each other.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(b n d) -> (b n d). Masked tokens become zero."""
        if mask is None:
            return self.norm(x.flatten(0, 1)).view_as(x)
        return torch.zeros_like(x).masked_scatter(mask[..., None], self.norm(x[mask]))


NORMS = {"instance": MaskedInstanceNorm, "batch": MaskedBatchNorm}


class LocalPatchInteraction(nn.Module):
    """Local patch interaction: two depth-wise 3 × 3 convolutions with gelu and a norm between them,
    on a grid of `width` columns.

    (b n d) -> (b n d). Masked tokens, and an incomplete last row, are padded with zeros.
    """

    def __init__(self, dim: int, width: int, *, norm: str = "instance") -> None:
        super().__init__()
        check_int(1, width=width)
        check_choice("norm", norm, NORMS)
        self.width, self.norm = width, NORMS[norm](dim)
        self.first, self.second = (nn.Conv2d(dim, dim, 3, padding=1, groups=dim) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Convolve, apply gelu and the norm, convolve."""
        y = self.norm(F.gelu(self._on_grid(self.first, x, mask)), mask)
        return self._on_grid(self.second, y, mask)

    def _on_grid(self, convolve: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        n = x.shape[1]
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        grid = F.pad(x, (0, 0, 0, -n % self.width)).mT.unflatten(2, (-1, self.width))
        return convolve(grid).flatten(2).mT[:, :n]


class XCiT(Mixer):
    """y = XCA(norm(x)), out = y + LPI(norm(x + y)): x + out is the paper's layer without its
    feed-forward part.
    """

    def __init__(
        self, dim: int, heads: int, width: int, *, norm: str = "instance", causal: bool = False
    ) -> None:
        can = Can(causal=WHOLE, cross=WHOLE, stream=WHOLE, maps=CHANNELS, attn_mask=CHANNELS)
        super().__init__(dim, can=can, causal=causal)
        self.covariance = CrossCovarianceAttention(dim, heads)
        self.patches = LocalPatchInteraction(dim, width, norm=norm)
        self.before_covariance, self.before_patches = (
            nn.LayerNorm(dim, eps=1e-6) for _ in range(2)
        )

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        y = self.covariance(self.before_covariance(x), mask)
        return y + self.patches(self.before_patches(x + y), mask), None


class XCiTComponent(Mixer):
    """One component of XCiT as a mixer: `CrossCovarianceAttention` or `LocalPatchInteraction`."""

    def __init__(
        self,
        dim: int,
        component: CrossCovarianceAttention | LocalPatchInteraction,
        *,
        causal: bool = False,
    ) -> None:
        can = Can(causal=WHOLE, cross=WHOLE, stream=WHOLE, maps=CHANNELS, attn_mask=CHANNELS)
        if isinstance(component, LocalPatchInteraction):
            can = can.without(heads=NO_HEADS)
        super().__init__(dim, can=can, causal=causal)
        self.component = component

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        return self.component(x, mask), None


class ClassAttention(nn.Module):
    """The class token (b 1 d) attends to itself and to all patches (b n d).

    The patches stay unchanged (Touvron et al. 2021, arXiv 2103.17239), as in XCiT's last layers.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attend = MultiHead(dim, heads, SoftmaxAttention(), bias=True)

    def forward(self, token: Tensor, tokens: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The updated class token."""
        context, mask = self._context(token, tokens, mask)
        return self.attend(token, context, mask=mask)

    def attention(self, token: Tensor, tokens: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attention map (b h 1 1+n); the class token comes first."""
        context, mask = self._context(token, tokens, mask)
        return self.attend.attention_map(token, context, mask=mask)

    def _context(
        self, token: Tensor, tokens: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The class token followed by the tokens, and their mask."""
        if token.dim() != 3 or token.shape[1] != 1:
            raise ValueError(f"the class token must be (b 1 d), not {tuple(token.shape)}")
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)
        return torch.cat((token, tokens), 1), mask
