"""The decoder that began it: each step looks back at all annotations (Bahdanau et al. 2015, arXiv 1409.0473)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.attentions.additive import additive_scores
from regard.cells.gated import GatedUnit
from regard.errors import check_int
from regard.numerics import masked_softmax


class AlignmentOutput(NamedTuple):
    """What was seen: the context (b annotations), and how much each annotation gave to it (b m)."""

    context: Tensor
    weights: Tensor


class Alignment(nn.Module):
    """e_j = v · tanh(W s + U h_j),  context = Σ_j softmax(e)_j h_j:  s (b state), h (b m annotations) -> `Look`."""

    def __init__(self, state: int, annotations: int, width: int) -> None:
        super().__init__()
        check_int(1, state=state, annotations=annotations, width=width)
        self.query, self.key = nn.Linear(state, width, bias=False), nn.Linear(annotations, width)
        self.v = nn.Parameter(torch.empty(width).uniform_(-1, 1) / width**0.5)

    def keys(self, annotations: Tensor) -> Tensor:
        """U h, once for all steps: (b m width)."""
        return self.key(annotations)

    def forward(
        self,
        state: Tensor,
        annotations: Tensor,
        *,
        keys: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> AlignmentOutput:
        """Look once; left-out annotations (mask (b m), False) get no weight."""
        if mask is not None:
            annotations = annotations.masked_fill(~mask[..., None], 0)
        weights = self.weights(state, self.keys(annotations) if keys is None else keys, mask)
        return AlignmentOutput((weights[:, None] @ annotations)[:, 0], weights)

    def weights(self, state: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(e), (b m)."""
        scores = additive_scores(self.query(state)[:, None, None], keys[:, None], self.v[None])
        return masked_softmax(scores[:, 0, 0], mask)


class DecoderOutput(NamedTuple):
    """All steps: states (b t hidden), contexts (b t annotations), weights (b t m): the map of the translation."""

    states: Tensor
    contexts: Tensor
    weights: Tensor


class BahdanauDecoder(nn.Module):
    """s_i = unit(y_{i−1}, s_{i−1}, c_i), where c_i is what s_{i−1} sees of the annotations.

    inputs       width of a word vector
    annotations  width of an annotation, twice the hidden width of a `BiEncoder`
    width        of the alignment network, `hidden` unless given
    """

    def __init__(
        self, inputs: int, hidden: int, annotations: int, *, width: int | None = None
    ) -> None:
        super().__init__()
        self.look = Alignment(hidden, annotations, hidden if width is None else width)
        self.unit = GatedUnit(inputs, hidden, context=annotations)
        self.middle = annotations // 2  # where the half that was read backwards begins
        self.first = nn.Linear(annotations - self.middle, hidden)

    def initial_state(self, annotations: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """s_0 = tanh(W ←h_1): of the first real annotation, the half that was read backwards."""
        rows = torch.arange(len(annotations), device=annotations.device)
        first = torch.zeros_like(rows) if mask is None else mask.long().argmax(1)
        return torch.tanh(self.first(annotations[rows, first, self.middle :]))

    def step(
        self,
        y: Tensor,
        s: Tensor,
        annotations: Tensor,
        *,
        keys: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentOutput]:
        """One step from the word y (b inputs) before it and the state s (b hidden)."""
        seen = self.look(s, annotations, keys=keys, mask=mask)
        return self.unit(y, s, seen.context), seen

    def forward(
        self, words: Tensor, annotations: Tensor, *, mask: Tensor | None = None
    ) -> DecoderOutput:
        """All steps, given the words before each, (b t inputs)."""
        if mask is not None:
            annotations = annotations.masked_fill(~mask[..., None], 0)
        s, keys = self.initial_state(annotations, mask=mask), self.look.keys(annotations)
        states, seen = [], []
        for y in words.unbind(1):
            s, look = self.step(y, s, annotations, keys=keys, mask=mask)
            states.append(s)
            seen.append(look)
        return DecoderOutput(
            torch.stack(states, 1), *(torch.stack(part, 1) for part in zip(*seen, strict=True))
        )


class DeepOutput(nn.Module):
    """Logits of the next word: W max over pairs of (U s_{i−1} + V y_{i−1} + C c_i), a maxout layer; (b ...) -> (b words)."""

    def __init__(
        self, inputs: int, hidden: int, annotations: int, words: int, *, width: int
    ) -> None:
        super().__init__()
        check_int(1, words=words, width=width)
        self.s, self.y = nn.Linear(hidden, 2 * width), nn.Linear(inputs, 2 * width, bias=False)
        self.c, self.out = nn.Linear(annotations, 2 * width, bias=False), nn.Linear(width, words)

    def forward(self, s: Tensor, y: Tensor, c: Tensor) -> Tensor:
        """The state before, the word before, and the context."""
        return self.out((self.s(s) + self.y(y) + self.c(c)).unflatten(-1, (-1, 2)).amax(-1))
