"""Calls whose examples stand at different positions, as after `regard.state.join`."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.call import check_positions
from regard.pattern import MAX_POSITION, Pattern
from regard.position.frequencies import token_positions
from regard.prior import Prior


class PositionGrid:
    """Positions of queries and keys that differ between examples.

    Args:
        q_start: Position of the first query of each example (b).
        k_positions: Positions of the keys (b m), -1 for keys that do not exist.
        n: Number of queries.
    """

    def __init__(self, q_start: int | Tensor, k_positions: int | Tensor, n: int) -> None:
        if (
            not isinstance(q_start, Tensor)
            or not isinstance(k_positions, Tensor)
            or q_start.dim() != 1
            or k_positions.dim() != 2
            or len(q_start) != len(k_positions)
        ):
            got = [tuple(x.shape) if isinstance(x, Tensor) else x for x in (q_start, k_positions)]
            raise ValueError(
                "positions that differ between examples are given as q_start (b) and k_positions "
                f"(b m), not {got[0]} and {got[1]}"
            )
        check_positions(q_start, "q_start")
        self.end = q_start + n
        self.q = token_positions(q_start, n, q_start.device)[:, :, None]  # (b n 1)
        self.exists = (k_positions >= 0)[:, None, :]  # (b 1 m)
        self.k = k_positions.clamp(0, MAX_POSITION)[:, None, :]

    def check_length(self, length: int | None, name: str) -> None:
        """Raise if a position lies beyond what a pattern or prior was built for."""
        last = 0 if length is None or not len(self.end) else int(self.end.max())
        if length is not None and last > length:
            raise ValueError(f"the {name} supports {length} positions, but the sequence has {last}")

    def visible(self, pattern: Pattern) -> Tensor:
        """The pairs that the pattern allows, (b 1 n m), or (b h n m) for `PerHead`."""
        self.check_length(pattern.length, "pattern")
        keep = pattern.resolve_global_mask(False, False).allows(self.q, self.k) & self.exists
        return keep.transpose(0, 1) if pattern.heads else keep[:, None]


class PerExamplePrior(Prior):
    """Pattern and prior of a call whose examples stand at different positions: -inf where a pair is
    not visible. The call itself counts queries and keys from 0.

    Args:
        prior: The prior, or None.
        grid: The positions.
        visible: The pairs that the pattern allows, (b h n m), h may be 1.
    """

    def __init__(self, prior: Prior | None, grid: PositionGrid, visible: Tensor) -> None:
        super().__init__()
        self.prior, self.grid, self.visible = prior, grid, visible
        if prior is not None:
            grid.check_length(prior.length, "prior")
            self.heads, self.uses_qk, self.num_terms = prior.heads, prior.uses_qk, prior.num_terms

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`. The inner prior gets the batch among the dimensions between heads and
        tokens, where it takes positions of any shape."""
        visible, n, m = self.visible, *self.visible.shape[2:]
        if (q_pos.shape, k_pos.shape) != ((n, 1), (1, m)):
            visible = visible[:, :, q_pos, k_pos]
        if self.prior is None:
            return torch.where(visible, 0.0, -torch.inf).to(q.dtype)
        q_pos, k_pos = self.grid.q[:, q_pos, 0], self.grid.k[:, 0, k_pos]
        bias = self.prior(q_pos, k_pos, q.transpose(0, 1)[None], k.transpose(0, 1)[None])
        if bias.dim() == q_pos.dim() + 2:  # (b h b ... s t): it depends on the tokens or examples
            bias = bias[0] if len(bias) == 1 else bias.diagonal(dim1=0, dim2=2).movedim(-1, 1)
        return torch.where(visible, bias.transpose(0, 1), -torch.inf)

    def for_scale(self, scale: float) -> PerExamplePrior:
        """See `Prior.for_scale`."""
        inner = None if self.prior is None else self.prior.for_scale(scale)
        return PerExamplePrior(inner, self.grid, self.visible)

    def sink_logits(self) -> Tensor | None:
        """See `Prior.sink_logits`."""
        return None if self.prior is None else self.prior.sink_logits()


def resolve_positions(
    pattern: Pattern, prior: Prior | None, q_start: Tensor, k_positions: int | Tensor, n: int
) -> Prior:
    """Pattern and prior of a call of n queries at positions that differ between examples, as one
    prior of a call without positions.

    Not as a pair mask: `regard.attend` copies keys and values to clear those that no query sees,
    but keys that do not exist are zero in a KV cache.
    """
    grid = PositionGrid(q_start, k_positions, n)
    return PerExamplePrior(prior, grid, grid.visible(pattern))
