"""DRAW's read and write operations as mixers of pixels (Gregor et al. 2015, arXiv 1502.04623)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.can import NO_HEADS
from regard.cells.draw import DrawFilters, FilterBank, read_patch, write_patch
from regard.errors import check_int
from regard.mixer import Can, Mixer, State
from regard.numerics import at_least_float32, saturate

FILTERS = "its weights are products of filters over rows and columns, not a softmax over pairs"
WHOLE = "all tokens together decide where the filters are"


class GlimpseRead(Mixer):
    """DRAW's read operation: out = γ F_Yᵀ (F_Y x F_Xᵀ) F_X, a patch read and written back in place.

    The mean of x sets the position of the filters. With a context, they read the image of the
    context, and the patch is written to the same position of the image of x.

    Args:
        dim: Model width.
        patch: Rows and columns of the filter grid.
        width: Columns of the image; the last row may be incomplete.
        causal: Not supported.
    """

    def __init__(self, dim: int, patch: int, width: int, *, causal: bool = False) -> None:
        can = Can(
            causal=WHOLE,
            stream=WHOLE,
            independent_queries=WHOLE,
            attn_mask=FILTERS,
            heads=NO_HEADS,
        )
        super().__init__(dim, can=can, causal=causal)
        check_int(1, width=width)
        self.bank, self.width = FilterBank(dim, patch), width

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        source, here, there = self._filters(x, context, mask, query_mask)
        patch = read_patch(_image(at_least_float32(source), self.width), there)
        image = here.rows[:, None].mT @ patch @ here.columns[:, None]  # keeps the intensity γ
        return saturate(_tokens(image, x.shape[1]), x.dtype), None

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """(b 1 n m): γ times the product of a map over rows and one over columns."""
        if not x.numel():
            m = x.shape[1] if context is None else context.shape[1]
            return x.new_zeros(x.shape[0], 1, x.shape[1], m)
        source, here, there = self._filters(x, context, mask, query_mask)
        rows, columns = here.rows.mT @ there.rows, here.columns.mT @ there.columns
        full = torch.einsum("bij,bkl->bikjl", rows, columns).flatten(3).flatten(1, 2)
        full = full * there.intensity[:, None, None]
        full = saturate(full[:, : x.shape[1], : source.shape[1]], x.dtype)
        return (full if mask is None else full * mask[:, None])[:, None]

    def _filters(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        query_mask: Tensor | None,
    ) -> tuple[Tensor, DrawFilters, DrawFilters]:
        """The tokens that are read, the filters for x and the filters for those tokens."""
        if context is None:
            filters = _build_filters(self.bank, _mean(x, mask), x.shape[1], self.width, mask)
            return x, filters, filters
        state = _mean(x, query_mask)
        here = _build_filters(self.bank, state, x.shape[1], self.width, query_mask)
        there = _build_filters(self.bank, state, context.shape[1], self.width, mask)
        return context, here, there


class GlimpseWrite(Mixer):
    """DRAW's write operation: out = 1/γ F_Yᵀ w F_X; the patch w (N N d) = W s + b and the filters
    depend on s, the mean token.

    With a context, s is the mean of the context, and only the number of tokens of x matters.
    """

    def __init__(self, dim: int, patch: int, width: int, *, causal: bool = False) -> None:
        can = Can(
            causal=WHOLE,
            stream=WHOLE,
            independent_queries="the number of queries is the size of its image",
            maps="the output depends on the mean of all tokens, and not linearly",
            attn_mask=FILTERS,
            heads=NO_HEADS,
        )
        super().__init__(dim, can=can, causal=causal)
        check_int(1, width=width)
        self.bank, self.width = FilterBank(dim, patch), width
        self.draw = nn.Linear(dim, dim * patch * patch)

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        mean = _mean(x if context is None else context, mask)
        patch = self.draw(mean).unflatten(-1, (self.dim, self.bank.patch, self.bank.patch))
        query_mask = mask if context is None else query_mask
        filters = _build_filters(self.bank, mean, x.shape[1], self.width, query_mask)
        return _tokens(write_patch(patch, filters), x.shape[1]), None


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """(b n d) -> (b d), the mean over unmasked tokens; masked ones are zero already."""
    if mask is None:
        return x.mean(1)
    total = at_least_float32(x).sum(1)
    return (total / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


def _build_filters(
    bank: FilterBank, state: Tensor, n: int, width: int, mask: Tensor | None
) -> DrawFilters:
    """Filters for n tokens; an image ends with the row of its last unmasked token."""
    height = (n + width - 1) // width
    if mask is None:
        return bank(state, height, width)
    last = (mask * torch.arange(1, n + 1, device=mask.device)).amax(1).clamp(min=1)
    return bank(state, height, width, heights=(last + width - 1) // width)


def _image(x: Tensor, width: int) -> Tensor:
    """(b n d) -> (b d height width), with an incomplete last row padded by zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[1] % width)).mT.unflatten(2, (-1, width))


def _tokens(image: Tensor, n: int) -> Tensor:
    return image.flatten(2).mT[:, :n]
