"""The gated unit of 2014, as its papers write it, and an encoder that reads in both directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.errors import check_int


class GatedUnit(nn.Module):
    """h' = (1 − z) ∘ h + z ∘ tanh(W x + U (r ∘ h) + C c),  z and r = σ(W x + U h + C c)  (Cho et al. 2014, arXiv 1406.1078;
    the context c as in Bahdanau et al. 2015, arXiv 1409.0473, appendix A).

    x (b inputs), h (b hidden), c (b context) -> (b hidden).  torch's GRU is another: it resets after U, and swaps z.
    """

    def __init__(self, inputs: int, hidden: int, *, context: int = 0) -> None:
        super().__init__()
        check_int(1, inputs=inputs, hidden=hidden)
        check_int(0, context=context)
        self.hidden = hidden
        self.x = nn.Linear(inputs, 3 * hidden)
        self.gates, self.candidate = (
            nn.Linear(hidden, 2 * hidden, bias=False),
            nn.Linear(hidden, hidden, bias=False),
        )
        self.context = nn.Linear(context, 3 * hidden, bias=False) if context else None

    def forward(self, x: Tensor, h: Tensor, c: Tensor | None = None) -> Tensor:
        """One step."""
        return self.step(self.x(x), h, c)

    def step(self, given: Tensor, h: Tensor, c: Tensor | None = None) -> Tensor:
        """One step, with W x + b (b 3·hidden) computed before, for all steps at once."""
        if (c is None) != (self.context is None):
            raise ValueError("a context must be given exactly if the unit was built for one")
        if self.context is not None:
            given = given + self.context(c)
        gates, candidate = given.split((2 * self.hidden, self.hidden), -1)
        z, r = torch.sigmoid(gates + self.gates(h)).chunk(2, -1)
        return (1 - z) * h + z * torch.tanh(candidate + self.candidate(r * h))


class BiEncoder(nn.Module):
    """Annotations [→h_i ; ←h_i] of each token: x (b n inputs), mask (b n) -> (b n 2·hidden).

    A left-out token changes neither state, so padding is as if cut off.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.forwards, self.backwards = GatedUnit(inputs, hidden), GatedUnit(inputs, hidden)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Read from both ends."""
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        order = range(x.shape[1])
        return torch.cat(
            (_read(self.forwards, x, mask, order), _read(self.backwards, x, mask, order[::-1])), -1
        )


def _read(unit: GatedUnit, x: Tensor, mask: Tensor | None, order: range) -> Tensor:
    """The states after each token, (b n hidden), in the order of the tokens."""
    h, given = x.new_zeros(x.shape[0], unit.hidden), unit.x(x)
    states = {}
    for i in order:
        new = unit.step(given[:, i], h)
        h = new if mask is None else torch.where(mask[:, i, None], new, h)
        states[i] = h
    return (
        torch.stack([states[i] for i in range(x.shape[1])], 1)
        if states
        else x.new_zeros(x.shape[0], 0, unit.hidden)
    )
