"""Axial attention as passes: along the rows, then along the columns, each with projections of its own."""

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
    """Where a stream stands: the cells of the unfinished row, what the row above passes down, and the two caches."""

    row: Tensor | None
    above: Tensor | None
    columns: State
    inner: State


class AxialPasses(Mixer):
    """Ho et al. 2019, arXiv 1912.12180, on an image of `width` columns in raster order.

        not causal:   out = columns(rows(x))
        causal:       u = columns(rows(x)),  where columns look up only;  out = inner(x + u of the cell above)

    The causal form is the paper's decoder in small: whole rows are read, but they are passed on to later rows only, and
    `inner` is masked attention in the cell's own row.  So every earlier cell is reached, and no later one.
    """

    def __init__(self, dim: int, heads: int, width: int, *, causal: bool = False) -> None:
        row, column = SoftmaxAttention(Chunks(width)), SoftmaxAttention(Band(step=width))
        can = row.can & Can(maps="each of its passes has a map of its own")
        super().__init__(dim, can=can, causal=causal)
        self.width = width
        self.rows, self.columns = (
            MultiHead(dim, heads, row),
            MultiHead(dim, heads, column, causal=causal),
        )
        self.inner = (
            MultiHead(dim, heads, SoftmaxAttention(Chunks(width)), causal=True) if causal else None
        )

    def initial_state(self) -> State:
        """Nothing yet above, and empty caches."""
        assert self.inner is not None
        return AxialState(None, None, self.columns.initial_state(), self.inner.initial_state())

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        return self._past(x, mask, state) if self.causal else (self._both(x, mask), None)

    def _past(self, x: Tensor, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Down the columns to each whole row, from there to the row below it, and along that."""
        assert self.inner is not None
        row, above, columns, inner = state or AxialState(None, None, None, None)
        if row is not None:
            check_batch(row, x)
        cells = x if row is None else torch.cat((row, x), 1)
        below, columns = self._passed_on(cells, mask, columns)
        if above is None:  # the first row has none above it
            above = x.new_zeros(x.shape[0], min(self.width, cells.shape[1]), self.dim)
        down = torch.cat((above, below), 1)
        first = cells.shape[1] - x.shape[1]
        y, inner = self.inner.mix(x + down[:, first : cells.shape[1]], None, mask, inner)
        rest = cells[:, cells.shape[1] // self.width * self.width :]
        last = down[:, -self.width :] if down.shape[1] >= self.width else None
        return y, AxialState(rest, last, columns, inner)

    def _both(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Along the rows, and then along the columns; an unfinished row is filled up with cells that are left out."""
        n, fill = x.shape[1], -x.shape[1] % self.width
        if fill:
            mask = F.pad(
                x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask, (0, fill)
            )
            x = F.pad(x, (0, 0, 0, fill))
        y = self._pass(self.rows, x, mask, down=False)
        return self._pass(self.columns, y, mask, down=True)[:, :n]

    def _pass(self, heads: MultiHead, x: Tensor, mask: Tensor | None, *, down: bool) -> Tensor:
        """Attention in each row, or down each column, of whole rows: every line is an example of its own, and dense."""
        q, k, v = (_lines(t, self.width, down) for t in heads.project(x, None))
        real = (
            None if mask is None else _lines(mask[:, None, :, None], self.width, down)[:, 0, :, 0]
        )
        y = (
            attend(q, k, v, mask=real).unflatten(0, (x.shape[0], -1)).transpose(2, 3)
        )  # (b lines cells h e)
        return heads.out((y.transpose(1, 2) if down else y).flatten(1, 2).flatten(2))

    def _passed_on(self, cells: Tensor, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """What the cells of finished rows hand to the cells below them; left-out cells hand on nothing."""
        done = cells[:, : cells.shape[1] // self.width * self.width]
        if not done.numel():
            return done, state
        real = None if mask is None else mask[:, : done.shape[1]]
        y = self._pass(self.rows, done, real, down=False)
        u, state = self.columns.mix(y, None, real, state)
        return u if real is None else u.masked_fill(~real[..., None], 0), state


def _lines(x: Tensor, width: int, down: bool) -> Tensor:
    """(b h n e) of whole rows -> (b·lines h cells e), by rows or by columns."""
    cells = x.unflatten(2, (-1, width))
    return (cells.transpose(2, 3) if down else cells).transpose(1, 2).flatten(0, 1)
