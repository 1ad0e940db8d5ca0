"""Attention decoder of Bahdanau et al. 2015 (arXiv 1409.0473)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions.additive import additive_scores
from regard.cells.gated import GatedUnit
from regard.errors import check_int
from regard.numerics import masked_softmax


class AlignmentOutput(NamedTuple):
    """Context vector (b annotations), and the weight of each annotation (b m)."""

    context: Tensor
    weights: Tensor


class Alignment(nn.Module):
    """e_j = v · tanh(W s + U h_j),  context = Σ_j softmax(e)_j h_j, for s (b state) and h (b m
    annotations).

    Args:
        state: Width of the decoder state.
        annotations: Width of an annotation.
        width: Hidden width of the alignment network.
    """

    def __init__(self, state: int, annotations: int, width: int) -> None:
        super().__init__()
        check_int(1, state=state, annotations=annotations, width=width)
        self.query = nn.Linear(state, width, bias=False)
        self.key = nn.Linear(annotations, width)
        self.v = nn.Parameter(torch.empty(width).uniform_(-1, 1) / width**0.5)

    def keys(self, annotations: Tensor) -> Tensor:
        """U h (b m width), the same for all steps."""
        return self.key(annotations)

    def forward(
        self,
        state: Tensor,
        annotations: Tensor,
        *,
        keys: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> AlignmentOutput:
        """One step. Masked annotations (mask (b m), False) get no weight."""
        if mask is not None:
            annotations = annotations.masked_fill(~mask[..., None], 0)
        keys = self.keys(annotations) if keys is None else keys
        query = self.query(state)[:, None, None]
        scores = additive_scores(query, keys[:, None], self.v[None])[:, 0, 0]
        weights = masked_softmax(scores, mask)
        return AlignmentOutput((weights[:, None] @ annotations)[:, 0], weights)


class DecoderOutput(NamedTuple):
    """All steps: states (b t hidden), contexts (b t annotations) and attention weights (b t m)."""

    states: Tensor
    contexts: Tensor
    weights: Tensor


class DecoderState(NamedTuple):
    """State before a step: hidden (b hidden), and what all steps share: the keys of the annotations
    (b m width), or a fixed context (b annotations)."""

    hidden: Tensor
    shared: Tensor


class DecoderRun(NamedTuple):
    """Several steps: the states before each (b t hidden), the contexts (b t annotations), the
    attention weights (b t m), None for a fixed context, and the state after the last."""

    before: Tensor
    contexts: Tensor
    weights: Tensor | None
    state: DecoderState


class BahdanauDecoder(nn.Module):
    """s_i = unit(y_{i−1}, s_{i−1}, c_i), where c_i is the context that s_{i−1} attends to.

    Args:
        inputs: Width of a word vector.
        hidden: Width of the state.
        annotations: Width of an annotation: twice the hidden width of a `BiEncoder`.
        width: Hidden width of the alignment network. Defaults to `hidden`.
    """

    def __init__(
        self, inputs: int, hidden: int, annotations: int, *, width: int | None = None
    ) -> None:
        super().__init__()
        self.align = Alignment(hidden, annotations, hidden if width is None else width)
        self.unit = GatedUnit(inputs, hidden, context=annotations)
        self.middle = annotations // 2  # where the backward states begin
        self.first = nn.Linear(annotations - self.middle, hidden)

    def initial_state(self, annotations: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """s_0 = tanh(W ←h_1), from the backward state of the first real annotation."""
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
        """One step from the previous word y (b inputs) and state s (b hidden)."""
        output = self.align(s, annotations, keys=keys, mask=mask)
        return self.unit(y, s, output.context), output

    def forward(
        self, words: Tensor, annotations: Tensor, *, mask: Tensor | None = None
    ) -> DecoderOutput:
        """All steps, given the word before each (b t inputs)."""
        if mask is not None:
            annotations = annotations.masked_fill(~mask[..., None], 0)
        run = self.run(words, self.start(annotations, mask), annotations, mask)
        states = torch.cat((run.before[:, 1:], run.state.hidden[:, None]), 1)
        assert run.weights is not None
        return DecoderOutput(states, run.contexts, run.weights)

    def start(self, annotations: Tensor, mask: Tensor | None) -> DecoderState:
        """s_0 and the keys of the annotations."""
        first = self.initial_state(annotations, mask=mask)
        return DecoderState(first, self.align.keys(annotations))

    def run(
        self,
        words: Tensor,
        state: DecoderState,
        annotations: Tensor,
        mask: Tensor | None = None,
        word_mask: Tensor | None = None,
    ) -> DecoderRun:
        """All steps from the words before each (b t inputs); masked words, word_mask (b t), do not
        change the state. What does not depend on the state is computed for all steps at once."""
        s, keys = state
        projected = self.unit.x(words)
        # both are products with s
        weight = torch.cat((self.align.query.weight, self.unit.gates.weight))
        width = len(self.align.query.weight)
        before, contexts, weights = [], [], []
        for i in range(words.shape[1]):
            query, gates = F.linear(s, weight).split((width, 2 * self.unit.hidden), -1)
            scores = torch.tanh(keys + query[:, None]) @ self.align.v
            attention = masked_softmax(scores, mask)
            context = (attention[:, None] @ annotations)[:, 0]
            before.append(s)
            contexts.append(context)
            weights.append(attention)
            new = self.unit.step(projected[:, i], s, context, gates=gates)
            s = new if word_mask is None else torch.where(word_mask[:, i, None], new, s)
        return DecoderRun(
            torch.stack(before, 1),
            torch.stack(contexts, 1),
            torch.stack(weights, 1),
            DecoderState(s, keys),
        )


class FixedContextDecoder(nn.Module):
    """s_i = unit(y_{i−1}, s_{i−1}, c) and s_0 = tanh(W c), where c = [→h_m ; ←h_1] is the whole
    source for all steps (Cho et al. 2014, arXiv 1406.1078).

    Args:
        inputs: Width of a word vector.
        hidden: Width of the state.
        annotations: Width of an annotation: twice the hidden width of a `BiEncoder`.
    """

    def __init__(self, inputs: int, hidden: int, annotations: int) -> None:
        super().__init__()
        self.unit = GatedUnit(inputs, hidden, context=annotations)
        self.middle = annotations // 2  # where the backward states begin
        self.first = nn.Linear(annotations, hidden)

    def start(self, annotations: Tensor, mask: Tensor | None) -> DecoderState:
        """s_0 and the context, from the last state of each direction."""
        rows = torch.arange(len(annotations), device=annotations.device)
        first, last = torch.zeros_like(rows), torch.full_like(rows, annotations.shape[1] - 1)
        if mask is not None:
            first, last = mask.long().argmax(1), last - mask.long().flip(1).argmax(1)
        forwards = annotations[rows, last, : self.middle]
        context = torch.cat((forwards, annotations[rows, first, self.middle :]), -1)
        return DecoderState(torch.tanh(self.first(context)), context)

    def run(
        self,
        words: Tensor,
        state: DecoderState,
        annotations: Tensor,
        mask: Tensor | None = None,
        word_mask: Tensor | None = None,
    ) -> DecoderRun:
        """All steps from the words before each (b t inputs), as `BahdanauDecoder.run`; the
        annotations are not read again."""
        s, context = state
        assert self.unit.context is not None
        projected = self.unit.x(words) + self.unit.context(context)[:, None]
        before = []
        for i in range(words.shape[1]):
            before.append(s)
            gates = self.unit.gates(s)
            new = self.unit.advance(projected[:, i], s, gates)
            s = new if word_mask is None else torch.where(word_mask[:, i, None], new, s)
        contexts = context[:, None].expand(-1, words.shape[1], -1)
        return DecoderRun(torch.stack(before, 1), contexts, None, DecoderState(s, context))


class DeepOutput(nn.Module):
    """Logits of the next word: W maxout(U s_{i−1} + V y_{i−1} + C c_i), over pairs of units.

    Args:
        inputs: Width of a word vector.
        hidden: Width of the state.
        annotations: Width of an annotation.
        words: Size of the vocabulary.
        width: Width of the maxout layer.
    """

    def __init__(
        self, inputs: int, hidden: int, annotations: int, words: int, *, width: int
    ) -> None:
        super().__init__()
        check_int(1, words=words, width=width)
        self.s, self.y = nn.Linear(hidden, 2 * width), nn.Linear(inputs, 2 * width, bias=False)
        self.c, self.out = nn.Linear(annotations, 2 * width, bias=False), nn.Linear(width, words)

    def forward(self, s: Tensor, y: Tensor, c: Tensor) -> Tensor:
        """Previous state (b hidden), previous word (b inputs) and context (b annotations) -> (b
        words)."""
        return self.out((self.s(s) + self.y(y) + self.c(c)).unflatten(-1, (-1, 2)).amax(-1))
