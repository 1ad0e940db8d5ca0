"""Feedback Transformer: all layers attend to one memory of the past, built from all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.block import Block, Layer, LayerInputs
from regard.errors import check_int
from regard.mixer import Can, check_batch
from regard.stack.memory_attention import (
    NO_GLOBAL_MASK,
    HiddenStates,
    MemoryAttention,
    check_causal,
    require_memory_attention,
)
from regard.stack.sequential import combine_capabilities


class FeedbackState(NamedTuple):
    """State of a `FeedbackStack`.

    Attributes:
        k: Keys (b, h, m, e) of the memory, for each layer or once for all; v are the values.
        mask: (b, m), True = keep.
        position: Position of the next token.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    mask: Tensor | None
    position: int


class FeedbackStack(Layer):
    """Each token attends, in every layer, to a memory of the tokens before it (Fan et al. 2020,
    arXiv 2002.09402):

        z_t^l = attention(h_t^{l-1}; m_{t-span} .. m_{t-1})
        m_t = Σ_{l=0..L} softmax(w)_l h_t^l

    where h^0 is the input of the stack. Low layers see what high layers computed for the past, so
    tokens are processed one by one, in training too. A token does not attend to itself, and the
    first one has no memory. Gradients are exact, through all time steps.

    Args:
        layers: Causal blocks with KV-cache attention.
        span: Number of memory vectors that a token attends to. None: all.
        share_kv: Share the key and value projections (and rotary embedding) of the first block
            among all blocks, so that a memory vector is projected once. With a pre-norm residual,
            the norm of the first block reads the memory.
    """

    def __init__(
        self, layers: Sequence[Block], *, span: int | None = None, share_kv: bool = True
    ) -> None:
        can, _, length = combine_capabilities(layers)
        check_causal(layers, "FeedbackStack")
        if span is not None:
            check_int(1, span=span)
        unsupported = can.unsupported | {"global_attention_mask": NO_GLOBAL_MASK}
        unsupported.pop("stream", None)
        can = Can("global_attention_mask", **unsupported)
        super().__init__(layers[0].dim, can=can, causal=True, length=length)
        self.span, self.share_kv = span, share_kv
        self.layers: Sequence[Block] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.weights = nn.Parameter(torch.zeros(len(layers) + 1))
        attentions = self._attentions()  # raises for layers without memory attention
        if share_kv:
            _share_kv(attentions)

    def initial_state(self) -> FeedbackState:
        """Empty memory."""
        return FeedbackState((), (), None, 0)

    def run(
        self, x: Tensor, inputs: LayerInputs, state: FeedbackState | None
    ) -> tuple[Tensor, FeedbackState | None]:
        """See `Layer`."""
        memory = self.initial_state() if state is None else state
        attentions, outputs = self._attentions(), [x[:, :0]]
        for t in range(x.shape[1]):
            mask = None if inputs.mask is None else inputs.mask[:, t : t + 1]
            token_inputs = inputs._replace(mask=mask)
            y, memory = self._run_token(attentions, x[:, t : t + 1], token_inputs, memory)
            outputs.append(y)
        return torch.cat(outputs, 1), None if state is None else memory

    def _run_token(
        self,
        attentions: Sequence[MemoryAttention],
        x: Tensor,
        inputs: LayerInputs,
        memory: FeedbackState,
    ) -> tuple[Tensor, FeedbackState]:
        """Run all layers on one token (b, 1, d), and append its memory vector."""
        hidden, position = [x], memory.position
        for i, attention in enumerate(attentions):
            q = attention.project_queries(HiddenStates(x, inputs.mask), position)
            if memory.k:
                k, v = (t[0 if self.share_kv else i] for t in (memory.k, memory.v))
                check_batch(k, q)  # not x, whose dtype may be another one under autocast
            else:
                k, v = attention.project_keys(HiddenStates(x[:, :0]), 0)
            y = attention.attend(q, k, v, position, position - k.shape[2], memory.mask)
            x = attention.block.finish(x, y, inputs)
            hidden.append(x)
        new = HiddenStates(torch.stack(hidden, -1) @ self.weights.softmax(0), inputs.mask)

        first = 0 if self.span is None or position < self.span else 1  # drop the oldest vector
        projecting = attentions[:1] if self.share_kv else attentions
        keys, values = zip(*(a.project_keys(new, position) for a in projecting), strict=True)
        if memory.k:
            keys, values = (
                tuple(torch.cat((a[:, :, first:], b), 2) for a, b in zip(old, added, strict=True))
                for old, added in ((memory.k, keys), (memory.v, values))
            )
        mask = new.mask
        if memory.mask is not None and mask is not None:
            mask = torch.cat((memory.mask[:, first:], mask), 1)
        return x, FeedbackState(keys, values, mask, position + 1)

    def _attentions(self) -> list[MemoryAttention]:
        return [require_memory_attention(layer, "FeedbackStack") for layer in self.layers]

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"span={self.span}, share_kv={self.share_kv}"


def _share_kv(attentions: Sequence[MemoryAttention]) -> None:
    """Share the key and value projections of the first block."""
    first, *others = [attention.mixer for attention in attentions]
    for mixer in others:
        if (mixer.heads, mixer.kv_heads) != (first.heads, first.kv_heads):
            mine, theirs = (f"{m.heads} heads ({m.kv_heads} KV heads)" for m in (mixer, first))
            raise ValueError(
                f"share_kv=True needs the same heads in all layers, but one has {mine} and the "
                f"first {theirs}: use share_kv=False"
            )
        mixer.k, mixer.v, mixer.rotary = first.k, first.v, first.rotary
