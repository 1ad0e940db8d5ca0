"""The gated recurrent unit of 2014, as its papers define it, and a bidirectional encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.errors import check_int


class GatedUnit(nn.Module):
    """h' = (1 − z) ∘ h + z ∘ tanh(W x + U (r ∘ h) + C c),  z and r = σ(W x + U h + C c)
    (Cho et al. 2014, arXiv 1406.1078; context c: Bahdanau et al. 2015, arXiv 1409.0473, appendix
    A).

    x (b inputs), h (b hidden), c (b context) -> (b hidden). `torch.nn.GRU` differs: it applies r
    after U, and swaps z and 1 − z.

    Args:
        inputs: Width of the input.
        hidden: Width of the state.
        context: Width of the context, or 0 for none.
    """

    def __init__(self, inputs: int, hidden: int, *, context: int = 0) -> None:
        super().__init__()
        check_int(1, inputs=inputs, hidden=hidden)
        check_int(0, context=context)
        self.hidden = hidden
        self.x = nn.Linear(inputs, 3 * hidden)
        self.gates = nn.Linear(hidden, 2 * hidden, bias=False)
        self.candidate = nn.Linear(hidden, hidden, bias=False)
        self.context = nn.Linear(context, 3 * hidden, bias=False) if context else None

    def forward(self, x: Tensor, h: Tensor, c: Tensor | None = None) -> Tensor:
        """One step."""
        return self.step(self.x(x), h, c)

    def step(
        self, projected: Tensor, h: Tensor, c: Tensor | None = None, *, gates: Tensor | None = None
    ) -> Tensor:
        """One step with W x + b (b 3·hidden) computed before, for all steps at once.

        Args:
            projected: W x + b.
            h: State.
            c: Context, for a unit with one.
            gates: U h of the two gates (b 2·hidden), if it was computed before.
        """
        if (c is None) != (self.context is None):
            raise ValueError("Pass a context if, and only if, the unit was built with context > 0.")
        if self.context is not None:
            projected = projected + self.context(c)
        return self.advance(projected, h, self.gates(h) if gates is None else gates)

    def advance(self, projected: Tensor, h: Tensor, gates: Tensor) -> Tensor:
        """The next state from W x + C c + b (b 3·hidden), the state and U h of the gates."""
        inner, candidate = projected.split((2 * self.hidden, self.hidden), -1)
        z, r = torch.sigmoid(inner + gates).chunk(2, -1)
        return h + z * (torch.tanh(candidate + self.candidate(r * h)) - h)


class BiEncoder(nn.Module):
    """Bidirectional encoder: x (b n inputs), mask (b n) -> annotations [→h_i ; ←h_i] (b n
    2·hidden).

    Masked tokens do not change the state, so padding has no effect.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.forwards, self.backwards = GatedUnit(inputs, hidden), GatedUnit(inputs, hidden)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Annotations of all tokens."""
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        order = range(x.shape[1])
        directions = (self.forwards, order), (self.backwards, order[::-1])
        return torch.cat([_run_unit(unit, x, mask, order) for unit, order in directions], -1)


def _run_unit(unit: GatedUnit, x: Tensor, mask: Tensor | None, order: range) -> Tensor:
    """States after each token (b n hidden), sorted by position, when reading in this order."""
    b, n, _ = x.shape
    h, projected, states = x.new_zeros(b, unit.hidden), unit.x(x), {}
    for i in order:
        new = unit.step(projected[:, i], h)
        h = new if mask is None else torch.where(mask[:, i, None], new, h)
        states[i] = h
    return torch.stack([states[i] for i in range(n)], 1) if n else h.new_zeros(b, 0, unit.hidden)
