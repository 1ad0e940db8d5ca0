"""Average pooling as a mixer: a token becomes the mean of its neighbours, less itself (Yu et al. 2022, arXiv 2111.11418)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_int
from regard.mixer import Can, Mixer, State, check_batch
from regard.numerics import at_least_float32


class AveragePool(Mixer):
    """out_i = mean of x_j over the `window` × `window` cells around i that hold a token, less x_i.

    width    columns of the grid on which tokens stand, row by row; None: they stand in a line
    window   odd; causal: of those cells the ones that do not come after i, and in a line the last `window` tokens
    """

    kernel: Tensor

    def __init__(
        self, dim: int, window: int, *, width: int | None = None, causal: bool = False
    ) -> None:
        check_int(1, window=window, **({} if width is None else {"width": width}))
        if window % 2 == 0 and not (causal and width is None):
            raise ValueError(f"window must be odd, so that it has a middle, not {window}")
        super().__init__(dim, can=Can(cross="neighbours are of one sequence"), causal=causal)
        self.window, self.width = window, width
        self.register_buffer("kernel", _kernel(window, width, causal), persistent=False)

    def initial_state(self) -> State:
        """Nothing yet."""
        return (None, 0)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d); a stream keeps the tokens that a window may still reach."""
        past, end = self.initial_state() if state is None else state
        seen = _joined(past, x)
        real = x.new_ones(1, seen.shape[1], 1) if mask is None else mask[..., None].to(x.dtype)
        total, count = self._sum(seen), self._sum(real)
        y = ((total / count.clamp(min=1)).to(x.dtype) - seen)[:, seen.shape[1] - x.shape[1] :]
        end += x.shape[1]
        return y, None if state is None else (
            seen[:, seen.shape[1] - min(seen.shape[1], self._needed(end)) :],
            end,
        )

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """(b 1 n n): one over the count, and one less on the diagonal."""
        n = x.shape[1]
        one = torch.eye(n, dtype=x.dtype, device=x.device)
        if mask is None:
            return self._map(one[None], one.new_ones(1, n, 1)).expand(x.shape[0], 1, n, n)
        return self._map(one * mask[:, None], mask[..., None].to(x.dtype))

    def _map(self, one: Tensor, real: Tensor) -> Tensor:
        return ((self._sum(one) / self._sum(real).clamp(min=1)).to(one.dtype) - one)[:, None]

    def _sum(self, x: Tensor) -> Tensor:
        """(b n c) -> (b n c): the sum over each token's window."""
        if not x.numel():
            return x
        b, n, c = x.shape
        wide = at_least_float32(x)
        width = self.width or n
        grid = F.pad(wide, (0, 0, 0, -n % width)).mT.reshape(b * c, 1, -1, width)
        rows, columns = self.kernel.shape[2:]
        if self.causal and self.width is None:
            grid = F.pad(grid, (columns - 1, 0))
        padding = (0, 0) if self.causal and self.width is None else (rows // 2, columns // 2)
        return (
            F.conv2d(grid, self.kernel.to(wide.dtype), padding=padding).reshape(b, c, -1).mT[:, :n]
        )

    def _needed(self, end: int) -> int:
        """How many of the last tokens a window of the tokens from `end` on may reach, from the start of a row."""
        if self.width is None:
            return self.window - 1
        return end - max(0, end // self.width - self.window // 2) * self.width


def _joined(past: Tensor | None, x: Tensor) -> Tensor:
    """Tokens (b n d) after those that a stream has kept."""
    if past is None:
        return x
    check_batch(past, x)
    return torch.cat((past, x), 1)


def _kernel(window: int, width: int | None, causal: bool) -> Tensor:
    """Ones over the cells that count: (1 1 rows columns)."""
    ones = torch.ones(1 if width is None else window, window)
    if causal and width is not None:
        before = torch.arange(window * window).view(window, window) <= window * window // 2
        ones = ones * before
    return ones[None, None]
