"""Axial attention in two passes: along the rows, then along the columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.backends import attend
from regard.mixer import Can, Mixer, MultiHead, State, check_batch
from regard.pattern import Band, Chunks


class AxialState(NamedTuple):
    """Cells of the unfinished row, output of the row above, states of `columns` and `inner`."""

    row: Tensor | None
    above: Tensor | None
    columns: State
    inner: State


class AxialPasses(Mixer):
    """Ho et al. 2019, arXiv 1912.12180, on an image of `width` columns in raster order.

        not causal:   out = columns(rows(x))
        causal:       u = columns(rows(x)), columns causal;  out = inner(x + u of the cell above)

    The causal form follows the paper's decoder: whole rows are read, but passed on to later rows
    only, and `inner` is causal attention within the cell's own row. Every earlier cell is reached,
    and no later one.
    """

    def __init__(self, dim: int, heads: int, width: int, *, causal: bool = False) -> None:
        row, column = SoftmaxAttention(Chunks(width)), SoftmaxAttention(Band(step=width))
        can = row.can & Can(
            maps="each of its passes has its own map",
            attn_mask="tokens reach each other by two passes, over rows and columns",
        )
        super().__init__(dim, can=can, causal=causal)
        self.width = width
        self.rows = MultiHead(dim, heads, row)
        self.columns = MultiHead(dim, heads, column, causal=causal)
        inner = SoftmaxAttention(Chunks(width))
        self.inner = MultiHead(dim, heads, inner, causal=True) if causal else None

    def initial_state(self) -> State:
        """State before the first cell."""
        assert self.inner is not None
        return AxialState(None, None, self.columns.initial_state(), self.inner.initial_state())

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        if self.inner is None:
            return self._mix_both_ways(x, mask), None
        row, above, columns, inner = state or AxialState(None, None, None, None)
        if row is not None:
            check_batch(row, x)
        cells = x if row is None else torch.cat((row, x), 1)
        below, columns = self._pass_down(cells, mask, columns)
        if above is None:  # the first row
            above = x.new_zeros(x.shape[0], min(self.width, cells.shape[1]), self.dim)
        down = torch.cat((above, below), 1)
        first = cells.shape[1] - x.shape[1]
        y, inner = self.inner.mix(x + down[:, first : cells.shape[1]], None, mask, inner)
        rest = cells[:, cells.shape[1] // self.width * self.width :]
        if row is None and state is not None:
            rest = rest.clone()  # a state must not be a view of the caller's tokens
        last = down[:, -self.width :] if down.shape[1] >= self.width else None
        return y, AxialState(rest, last, columns, inner)

    def _mix_both_ways(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend along the rows, then along the columns; an unfinished row is padded."""
        n, padding = x.shape[1], -x.shape[1] % self.width
        if padding:
            mask = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
            mask, x = F.pad(mask, (0, padding)), F.pad(x, (0, 0, 0, padding))
        y = self._attend_lines(self.rows, x, mask, columns=False)
        return self._attend_lines(self.columns, y, mask, columns=True)[:, :n]

    def _attend_lines(
        self, heads: MultiHead, x: Tensor, mask: Tensor | None, *, columns: bool
    ) -> Tensor:
        """Dense attention within each row, or each column, of whole rows."""
        q, k, v = (_lines(t, self.width, columns) for t in heads.project(x, None))
        if mask is not None:
            mask = _lines(mask[:, None, :, None], self.width, columns)[:, 0, :, 0]
        y = attend(q, k, v, mask=mask)
        y = y.unflatten(0, (x.shape[0], -1)).transpose(2, 3)  # (b lines cells h e)
        return heads.out((y.transpose(1, 2) if columns else y).flatten(1, 2).flatten(2))

    def _pass_down(self, cells: Tensor, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """What the cells of finished rows pass to the cells below them; masked cells pass zero."""
        done = cells[:, : cells.shape[1] // self.width * self.width]
        if not done.numel():
            return done, state
        real = None if mask is None else mask[:, : done.shape[1]]
        y = self._attend_lines(self.rows, done, real, columns=False)
        u, state = self.columns.mix(y, None, real, state)
        return u if real is None else u.masked_fill(~real[..., None], 0), state


def _lines(x: Tensor, width: int, columns: bool) -> Tensor:
    """(b h n e) of whole rows -> (b·lines h cells e), by rows or by columns."""
    cells = x.unflatten(2, (-1, width))
    return (cells.transpose(2, 3) if columns else cells).transpose(1, 2).flatten(0, 1)
