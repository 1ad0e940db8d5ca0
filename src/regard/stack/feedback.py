"""Feedback: each layer looks at one memory of the past, made of all layers, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.attentions.kv_cache import CallPositions
from regard.block import Block, Layer, LayerInputs
from regard.errors import check_int
from regard.mixer import Can, check_batch
from regard.stack.memory_attention import (
    NO_MARKS,
    HiddenStates,
    MemoryAttention,
    check_causal,
    require_memory_attention,
)
from regard.stack.sequential import combine_capabilities

ASKS = "feedback shows each layer the memory as keys"


class FeedbackState(NamedTuple):
    """Keys and values (b h m e) of the memory, of each layer or once for all; which are real (b m); the next position."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    mask: Tensor | None
    next: int


class FeedbackStack(Layer):
    """Each token attends, in every layer, at memories of the tokens before it, and leaves one (Fan et al. 2020, arXiv
    2002.09402):

        z_t^l = attention(h_t^{l-1}; m_{t-span} .. m_{t-1}),      m_t = Σ_{l=0..L} softmax(w)_l h_t^l

    where h^0 is what enters the stack.  So low layers see what high layers made of the past, and a token must wait for the
    one before it: the whole is a loop over tokens, in training too.  A token does not look at itself, and the first sees
    no memory.  Gradients are exact, through all of time.

    layers  causal blocks of `MultiHead` over a pattern
    span    how many memories a token sees; None: all
    shared  one projection to keys and to values for all layers, so that a memory is projected once: all blocks are given
            the projections of the first, and its turn (and its norm reads the memory, where the residual has one before it)
    """

    def __init__(
        self, layers: Sequence[Block], *, span: int | None = None, shared: bool = True
    ) -> None:
        can, _, length = combine_capabilities(layers)
        check_causal(layers, "feedback")
        if span is not None:
            check_int(1, span=span)
        unsupported = can.unsupported | {"global_attention_mask": NO_MARKS}
        unsupported.pop("stream", None)
        super().__init__(
            layers[0].dim,
            can=Can(supports_global_mask=True, **unsupported),
            causal=True,
            length=length,
        )
        self.span, self.shared = span, shared
        self.layers: Sequence[Block] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.weights = nn.Parameter(torch.zeros(len(layers) + 1))
        looks = self._looks()  # so that a layer that cannot is refused now
        if shared:
            _share(looks)

    def initial_state(self) -> FeedbackState:
        """No memory yet."""
        return FeedbackState((), (), None, 0)

    def run(
        self, x: Tensor, given: LayerInputs, state: FeedbackState | None
    ) -> tuple[Tensor, FeedbackState | None]:
        """See `Layer`."""
        here, parts, looks = (
            self.initial_state() if state is None else state,
            [x[:, :0]],
            self._looks(),
        )
        if here.k:
            check_batch(here.k[0], x)
        for t in range(x.shape[1]):
            mask = None if given.mask is None else given.mask[:, t : t + 1]
            y, here = self._token(looks, x[:, t : t + 1], given._replace(mask=mask), here)
            parts.append(y)
        return torch.cat(parts, 1), None if state is None else here

    def _token(
        self, looks: Sequence[MemoryAttention], x: Tensor, given: LayerInputs, here: FeedbackState
    ) -> tuple[Tensor, FeedbackState]:
        """All layers on one token, (b 1 d), and the memory that it leaves."""
        every = [x]
        for i, look in enumerate(looks):
            x = look.block.join(x, _read(look, x, given, here, 0 if self.shared else i), given)
            every.append(x)
        m = torch.stack(every, -1) @ self.weights.softmax(0)
        return x, self._grown(
            looks[:1] if self.shared else looks, HiddenStates(m, given.mask), here
        )

    def _grown(
        self, looks: Sequence[MemoryAttention], new: HiddenStates, here: FeedbackState
    ) -> FeedbackState:
        """The memories with one more, and without the one beyond the span."""
        first = 0 if self.span is None or here.next < self.span else 1
        pairs = [look.keys(new, here.next) for look in looks]
        k, v = (
            _joined(old, [pair[i] for pair in pairs], first)
            for i, old in enumerate((here.k, here.v))
        )
        mask = (
            new.mask
            if here.mask is None or new.mask is None
            else torch.cat((here.mask[:, first:], new.mask), 1)
        )
        return FeedbackState(k, v, mask, here.next + 1)

    def _looks(self) -> list[MemoryAttention]:
        return [require_memory_attention(layer, ASKS) for layer in self.layers]

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"span={self.span}, shared={self.shared}"


def _joined(old: tuple[Tensor, ...], new: Sequence[Tensor], first: int) -> tuple[Tensor, ...]:
    """(b h m e) of each layer, those from `first` on, with one more."""
    return (
        tuple(torch.cat((a[:, :, first:], b), 2) for a, b in zip(old, new, strict=True))
        if old
        else tuple(new)
    )


def _read(
    look: MemoryAttention, x: Tensor, given: LayerInputs, here: FeedbackState, i: int
) -> Tensor:
    """What one token, (b 1 d), reads in the memories."""
    q = look.queries(HiddenStates(x, given.mask), here.next)
    k, v = (here.k[i], here.v[i]) if here.k else look.keys(HiddenStates(x[:, :0]), 0)
    return look.attend(
        q,
        k,
        v,
        CallPositions(look.inner.causal_pattern, here.next, here.next - k.shape[2]),
        here.mask,
    )


def _share(looks: Sequence[MemoryAttention]) -> None:
    """One projection to keys and one to values, for all."""
    first, *others = [look.mixer for look in looks]
    for mixer in others:
        if (mixer.heads, mixer.kv_heads) != (first.heads, first.kv_heads):
            mine, theirs = (f"{m.heads} heads ({m.kv_heads} of keys)" for m in (mixer, first))
            raise ValueError(
                f"a layer has {mine} and the first {theirs}: to share keys give all the same, or shared=False"
            )
        mixer.k, mixer.v, mixer.rotary = first.k, first.v, first.rotary
