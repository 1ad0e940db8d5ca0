"""Calls whose examples stand at different positions, as after `regard.state.join`."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.call import default_scale
from regard.pattern import Pattern
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
        self.end = q_start + n
        self.q = token_positions(q_start, n, q_start.device)[:, :, None]  # (b n 1)
        self.exists = (k_positions >= 0)[:, None, :]  # (b 1 m)
        self.k = k_positions.clamp(min=0)[:, None, :]

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

    def bias(self, prior: Prior, q: Tensor, k: Tensor) -> Tensor:
        """The prior of all pairs, (b h n m), for q (b h n e) and k (b h m e).

        A prior takes any dimensions between heads and tokens, so the batch goes there.
        """
        self.check_length(prior.length, "prior")
        if k.shape[1] != q.shape[1]:  # grouped-query attention
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        bias: Tensor = prior(self.q, self.k, q.transpose(0, 1)[None], k.transpose(0, 1)[None])
        if bias.dim() == 5 and len(bias) > 1:  # the prior has values of its own for each example
            return bias.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        bias = bias[0] if bias.dim() == 5 else bias
        return bias.transpose(0, 1)


class ComputedBias(Prior):
    """A prior whose values (b h n m) are known, for queries and keys from position 0 on.

    Args:
        bias: The values.
        prior: The prior that they come from, whose sinks it keeps.
    """

    uses_qk = True

    def __init__(self, bias: Tensor, prior: Prior | None) -> None:
        super().__init__()
        self.bias, self.num_terms = bias, 1 if prior is None else prior.num_terms
        self.sinks = None if prior is None else prior.sink_logits()

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        if (q_pos.shape, k_pos.shape) == ((self.bias.shape[2], 1), (1, self.bias.shape[3])):
            return self.bias
        return self.bias[:, :, q_pos, k_pos]

    def sink_logits(self) -> Tensor | None:
        """See `Prior.sink_logits`."""
        return self.sinks


def resolve_positions(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    prior: Prior | None,
    q_start: int | Tensor,
    k_positions: int | Tensor,
    scale: float | None,
) -> Prior:
    """Pattern and prior of a call with positions that differ between examples, as a prior that is
    -inf where a pair is not visible."""
    grid = PositionGrid(q_start, k_positions, q.shape[2])
    added = None if prior is None else prior.for_scale(default_scale(q, prior, scale))
    bias = q.new_zeros(()) if added is None else grid.bias(added, q, k)
    bias = torch.where(grid.visible(pattern), bias, -torch.inf)
    return ComputedBias(bias, prior)
