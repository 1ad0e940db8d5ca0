"""Average pooling as a token mixer (PoolFormer, Yu et al. 2022, arXiv 2111.11418)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.can import NO_HEADS
from regard.errors import check_int
from regard.mixer import Can, Mixer, State, check_batch
from regard.numerics import at_least_float32

NEIGHBOURS = "it pools over neighbours in one sequence"


class AveragePool(Mixer):
    """out_i = (mean of x_j over the window around i) − x_i, over unmasked tokens.

    Args:
        dim: Model width.
        window: Size of the window in tokens, or its rows and columns on a grid. Odd, except for a
            causal sequence, where it is the last `window` tokens. On a causal grid, later cells are
            left out.
        width: Columns of the grid. Default: a sequence.
        causal: Pool over earlier tokens only.
    """

    def __init__(
        self, dim: int, window: int, *, width: int | None = None, causal: bool = False
    ) -> None:
        check_int(1, window=window, **({} if width is None else {"width": width}))
        if window % 2 == 0 and not (causal and width is None):
            raise ValueError(f"window must be odd, not {window}")
        super().__init__(
            dim,
            can=Can(
                cross=NEIGHBOURS,
                attn_mask="it averages neighbours, without weights of pairs",
                heads=NO_HEADS,
            ),
            causal=causal,
        )
        self.window, self.width = window, width

    def initial_state(self) -> State:
        """State before the first token."""
        return (None, 0)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d). The state holds the tokens that later windows reach."""
        past, end = self.initial_state() if state is None else state
        n, end, tokens = x.shape[1], end + x.shape[1], x
        if past is not None:
            check_batch(past, x)
            tokens = torch.cat((past, x), 1)
        real = x.new_ones(1, tokens.shape[1], 1) if mask is None else mask[..., None].to(x.dtype)
        mean = self._sum(tokens) / self._sum(real).clamp(min=1)
        y = (mean.to(x.dtype) - tokens)[:, tokens.shape[1] - n :]
        if state is None:
            return y, None
        needed = self.window - 1
        if self.width is not None:  # from the start of the first row that a later window reaches
            needed = end - max(0, end // self.width - self.window // 2) * self.width
        kept = tokens[:, max(0, tokens.shape[1] - needed) :]
        # a state must not be a view of the caller's tokens
        return y, (kept.clone() if past is None else kept, end)

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """(b 1 n n): one over the size of the window, minus one on the diagonal."""
        n = x.shape[1]
        one = torch.eye(n, dtype=x.dtype, device=x.device)
        if mask is None:
            return self._map(one[None], one.new_ones(1, n, 1)).expand(x.shape[0], 1, n, n)
        return self._map(one * mask[:, None], mask[..., None].to(x.dtype))

    def _map(self, one: Tensor, real: Tensor) -> Tensor:
        return ((self._sum(one) / self._sum(real).clamp(min=1)).to(one.dtype) - one)[:, None]

    def _sum(self, x: Tensor) -> Tensor:
        """(b n c) -> (b n c): sum over each token's window."""
        if not x.numel():
            return x
        b, n, c = x.shape
        wide = at_least_float32(x)
        width = self.width or n
        grid = F.pad(wide, (0, 0, 0, -n % width)).mT.reshape(b * c, 1, -1, width)
        kernel = self._kernel(wide)
        rows, columns = kernel.shape[2:]
        if self.causal and self.width is None:
            grid = F.pad(grid, (columns - 1, 0))
        padding = (0, 0) if self.causal and self.width is None else (rows // 2, columns // 2)
        return F.conv2d(grid, kernel, padding=padding).reshape(b, c, -1).mT[:, :n]

    def _kernel(self, x: Tensor) -> Tensor:
        """Ones over the cells of the window: (1 1 rows columns), with the dtype and device of x.

        Not a buffer: one that is not saved would hold arbitrary numbers after `to_empty`.
        """
        window = self.window
        ones = x.new_ones(1 if self.width is None else window, window)
        if self.causal and self.width is not None:
            cells = torch.arange(window * window, device=x.device).view(window, window)
            ones = ones * (cells <= window * window // 2)
        return ones[None, None]
