"""Show, attend and tell: a decoder that looks at the cells of an image, softly or at one (Xu et al. 2015, arXiv 1502.03044)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.cells.bahdanau import Alignment, AlignmentOutput


class LSTMState(NamedTuple):
    """The state of the LSTM: what it says, and what it keeps, both (b hidden)."""

    h: Tensor
    c: Tensor


class CaptionStep(NamedTuple):
    """One step: the context ẑ (b annotations), the weights α (b m), and where it looked (b), if at one cell."""

    context: Tensor
    weights: Tensor
    chosen: Tensor | None


class CaptionCell(nn.Module):
    """An LSTM whose input is the word before and ẑ = β Σ_i α_i a_i, with α from the state before and β = σ(w · h + b).

    step(word (b inputs), memory, cells (b m annotations)) -> memory, `CaptionStep`.  Hard: ẑ = β a_s with s drawn from α, by
    the generator that is given.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        annotations: int,
        *,
        width: int | None = None,
        hard: bool = False,
    ) -> None:
        super().__init__()
        self.hard = hard
        self.look = Alignment(hidden, annotations, hidden if width is None else width)
        self.gate, self.cell = nn.Linear(hidden, 1), nn.LSTMCell(inputs + annotations, hidden)
        self.first_h, self.first_c = nn.Linear(annotations, hidden), nn.Linear(annotations, hidden)

    def initial_state(self, cells: Tensor, *, mask: Tensor | None = None) -> LSTMState:
        """From the mean of all cells, by one tanh layer each."""
        real = torch.ones_like(cells[..., :1]) if mask is None else mask[..., None].to(cells.dtype)
        if mask is not None:
            cells = cells.masked_fill(~mask[..., None], 0)
        mean = cells.sum(1) / real.sum(1).clamp(min=1)
        return LSTMState(torch.tanh(self.first_h(mean)), torch.tanh(self.first_c(mean)))

    def step(
        self,
        word: Tensor,
        memory: LSTMState,
        cells: Tensor,
        *,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[LSTMState, CaptionStep]:
        """Look, then take the word in."""
        seen, chosen = self.look(memory.h, cells, mask=mask), None
        context = seen.context
        if self.hard:
            context, chosen = _choose(seen, cells, generator)
        context = torch.sigmoid(self.gate(memory.h)) * context
        h, c = self.cell(torch.cat((word, context), -1), (memory.h, memory.c))
        return LSTMState(h, c), CaptionStep(context, seen.weights, chosen)


class CaptionOutput(nn.Module):
    """Logits of the next word: L_o (y + L_h h + L_z ẑ), (b inputs), (b hidden), (b annotations) -> (b words)."""

    def __init__(self, inputs: int, hidden: int, annotations: int, words: int) -> None:
        super().__init__()
        self.h, self.z = nn.Linear(hidden, inputs), nn.Linear(annotations, inputs, bias=False)
        self.out = nn.Linear(inputs, words)

    def forward(self, word: Tensor, h: Tensor, context: Tensor) -> Tensor:
        """The word before, the new state, and the context."""
        return self.out(word + self.h(h) + self.z(context))


def _choose(
    seen: AlignmentOutput, cells: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    if generator is None:
        raise ValueError(
            "hard attention draws at random, and needs a generator: torch.Generator().manual_seed(0)"
        )
    if not bool((seen.weights.sum(-1) > 0).all()):
        raise ValueError(
            "hard attention must choose a cell, and there is an example in which all are left out"
        )
    chosen = torch.multinomial(seen.weights.detach(), 1, generator=generator)[:, 0]
    return cells[torch.arange(len(chosen), device=cells.device), chosen], chosen


def doubly_stochastic(weights: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """λ Σ_i (1 − Σ_t α_ti)²: over all steps each cell should be looked at once.  weights (b t m), mask (b m) -> scalar,
    the mean over examples."""
    missed = (1 - weights.sum(1)).square()
    if mask is not None:
        missed = missed * mask
    return scale * missed.sum(-1).mean()


class Reinforce(nn.Module):
    """The loss whose gradient is the paper's estimate for hard attention, with a moving baseline and an entropy:

    −[log p(y|s) + λ_r (log p(y|s) − b) Σ_t log α_{t s_t} + λ_e Σ_t H(α_t)],    b ← 0.9 b + 0.1 log p(y|s)

    log p (b), weights (b t m), chosen (b t) -> scalar, the mean over examples.  The factor log p − b has no gradient.
    """

    baseline: Tensor

    def __init__(self, *, scale: float = 1.0, entropy: float = 0.0, momentum: float = 0.9) -> None:
        super().__init__()
        self.scale, self.entropy, self.momentum = scale, entropy, momentum
        self.register_buffer("baseline", torch.zeros(()))

    def forward(self, log_likelihood: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """In training the baseline moves, after it was used."""
        reward = log_likelihood.detach() - self.baseline
        taken = weights.gather(2, chosen[..., None])[..., 0].log().sum(1)
        entropy = torch.special.entr(weights).sum((1, 2))
        record_aux("baseline", lambda: self.baseline)
        loss = -(log_likelihood + self.scale * reward * taken + self.entropy * entropy).mean()
        if self.training:
            self.baseline.lerp_(
                log_likelihood.detach().mean().to(self.baseline.dtype), 1 - self.momentum
            )
        return loss
