"""Show, attend and tell: a caption decoder with soft or hard visual attention
(Xu et al. 2015, arXiv 1502.03044)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.backends import check_mask
from regard.cells.bahdanau import Alignment


class LSTMState(NamedTuple):
    """Hidden state h and cell state c of an LSTM, both (b hidden)."""

    h: Tensor
    c: Tensor


class CaptionStep(NamedTuple):
    """One step: context ẑ (b annotations), weights α (b m), and the chosen cell (b) if attention is
    hard."""

    context: Tensor
    weights: Tensor
    chosen: Tensor | None


class CaptionCell(nn.Module):
    """LSTM whose input is the previous word and ẑ = β Σ_i α_i a_i, with β = σ(w · h + b).

    Hard attention has ẑ = β a_s instead, with s drawn from α.

    Args:
        inputs: Width of a word vector.
        hidden: Width of the state.
        annotations: Width of an image cell.
        width: Hidden width of the alignment network. Defaults to `hidden`.
        hard: Whether attention is hard.
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
        self.align = Alignment(hidden, annotations, hidden if width is None else width)
        self.gate, self.cell = nn.Linear(hidden, 1), nn.LSTMCell(inputs + annotations, hidden)
        self.first_h, self.first_c = nn.Linear(annotations, hidden), nn.Linear(annotations, hidden)

    def initial_state(self, cells: Tensor, *, mask: Tensor | None = None) -> LSTMState:
        """From the mean of the image cells, by a tanh layer each."""
        if mask is None:
            mean = cells.sum(1) / max(cells.shape[1], 1)
        else:
            cells = cells.masked_fill(~mask[..., None], 0)
            mean = cells.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return LSTMState(torch.tanh(self.first_h(mean)), torch.tanh(self.first_c(mean)))

    def step(
        self,
        word: Tensor,
        state: LSTMState,
        cells: Tensor,
        *,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[LSTMState, CaptionStep]:
        """Attend to the image, then process a word.

        Args:
            word: Previous word (b inputs).
            state: State before the step.
            cells: Image cells (b m annotations).
            mask: Which cells are real (b m).
            generator: Draws the cell if attention is hard.
        """
        (context, weights), chosen = self.align(state.h, cells, mask=mask), None
        if self.hard:
            if generator is None:
                raise ValueError(
                    "Hard attention samples: pass generator=torch.Generator().manual_seed(0)."
                )
            if not bool((weights.sum(-1) > 0).all()):
                raise ValueError("Hard attention needs at least one unmasked cell in each example.")
            chosen = torch.multinomial(weights.detach(), 1, generator=generator)[:, 0]
            context = cells[torch.arange(len(chosen), device=cells.device), chosen]
        context = torch.sigmoid(self.gate(state.h)) * context
        h, c = self.cell(torch.cat((word, context), -1), state)
        return LSTMState(h, c), CaptionStep(context, weights, chosen)


class CaptionOutput(nn.Module):
    """Logits of the next word: L_o (y + L_h h + L_z ẑ), for y (b inputs), h (b hidden), ẑ (b
    annotations)."""

    def __init__(self, inputs: int, hidden: int, annotations: int, words: int) -> None:
        super().__init__()
        self.h, self.z = nn.Linear(hidden, inputs), nn.Linear(annotations, inputs, bias=False)
        self.out = nn.Linear(inputs, words)

    def forward(self, word: Tensor, h: Tensor, context: Tensor) -> Tensor:
        """Previous word, new state and context -> (b words)."""
        return self.out(word + self.h(h) + self.z(context))


def doubly_stochastic(weights: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """λ Σ_i (1 − Σ_t α_ti)²: over all steps, each cell should get a total weight of one.

    Args:
        weights: Attention weights (b t m).
        scale: Factor λ.
        mask: Which cells are real (b m).

    Returns:
        The mean over examples, a scalar.
    """
    error = (1 - weights.sum(1)).square()
    if mask is not None:
        error = error * mask
    return scale * error.sum(-1).mean()


class Reinforce(nn.Module):
    """Loss for hard attention, with a moving baseline b and an entropy term:

        −[log p(y|s) + λ_r (log p(y|s) − b) Σ_t log α_{t s_t} + λ_e Σ_t H(α_t)]
        b ← 0.9 b + 0.1 log p(y|s)

    The factor log p − b has no gradient.

    Args:
        scale: Weight λ_r of the score function.
        entropy: Weight λ_e of the entropy.
        momentum: Momentum of the baseline.
    """

    baseline: Tensor

    def __init__(self, *, scale: float = 1.0, entropy: float = 0.0, momentum: float = 0.9) -> None:
        super().__init__()
        self.scale, self.entropy, self.momentum = scale, entropy, momentum
        self.register_buffer("baseline", torch.zeros(()))

    def forward(
        self,
        log_likelihood: Tensor,
        weights: Tensor,
        chosen: Tensor,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """log p (b), weights (b t m), chosen cells (b t) -> mean over examples, a scalar.

        In training mode the baseline is updated afterwards.

        Args:
            log_likelihood: log p(y|s) of each example, summed over its real steps.
            weights: Attention weights of each step.
            chosen: The cell that was drawn in each step.
            mask: Which steps are real (b t), True = keep. The others have no effect.
        """
        check_mask(mask, (weights.shape[0], weights.shape[1]), "mask")
        if mask is not None:  # a weight of 1 has no entropy, and its logarithm is 0
            weights = weights.masked_fill(~mask[..., None], 1)
            chosen = chosen.masked_fill(~mask, 0)
        reward = log_likelihood.detach() - self.baseline
        score = weights.gather(2, chosen[..., None])[..., 0].log().sum(1)
        entropy = torch.special.entr(weights).sum((1, 2))
        record_aux("baseline", lambda: self.baseline)
        loss = -(log_likelihood + self.scale * reward * score + self.entropy * entropy).mean()
        if self.training:
            mean = log_likelihood.detach().mean().to(self.baseline.dtype)
            self.baseline.lerp_(mean, 1 - self.momentum)
        return loss
