"""Attending back at tokens of earlier calls: what stacks with a memory share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attentions.kv_cache import CallPositions, KVCacheAttention
from regard.block import Block, Layer, LayerInputs
from regard.errors import Unsupported
from regard.mixer import MultiHead, check_batch, merge_heads, split_heads
from regard.numerics import zero_padding_tokens

NO_MARKS = "marks are of the tokens of one call, and those of the memory have none"


class HiddenStates(NamedTuple):
    """Hidden states (b m d), and which of them are real, (b m), None: all."""

    x: Tensor
    mask: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.x.shape[1]

    def after(self, past: HiddenStates | None) -> HiddenStates:
        """These behind those of the past."""
        if past is None:
            return self
        check_batch(past.x, self.x)
        mask = (
            None if past.mask is None or self.mask is None else torch.cat((past.mask, self.mask), 1)
        )
        return HiddenStates(torch.cat((past.x, self.x), 1), mask)

    def cut(self, first: int, last: int) -> HiddenStates:
        """Those from `first` on, before `last_row`."""
        return HiddenStates(
            self.x[:, first:last], None if self.mask is None else self.mask[:, first:last]
        )

    def last(self, count: int) -> HiddenStates:
        """The last of them, at most so many."""
        return self.cut(max(0, self.tokens - count), self.tokens)

    def detached(self) -> HiddenStates:
        """The same without their history; left-out ones are blank."""
        return HiddenStates(zero_padding_tokens(self.x.detach(), self.mask), self.mask)


class MemoryAttention(NamedTuple):
    """A block whose mixer attends with keys that may stand anywhere."""

    block: Block
    mixer: MultiHead
    inner: KVCacheAttention

    def before(self, held: HiddenStates) -> Tensor:
        """What the mixer reads of hidden states, (b m d): normalised where the residual does so first, blank where left out."""
        return zero_padding_tokens(self.block.mixer_residual.before(held.x, held.mask), held.mask)

    def queries(self, held: HiddenStates, at: int) -> Tensor:
        """Queries of hidden states that stand from position `at` on, (b h n e)."""
        q = split_heads(self.mixer.q(self.before(held)), self.mixer.heads)
        return q if self.mixer.rotary is None else self.mixer.rotary(q, q, at, at)[0]

    def keys(self, held: HiddenStates, at: int) -> tuple[Tensor, Tensor]:
        """Keys and values of hidden states that stand from position `at` on, (b h m e)."""
        _, k, v = self.mixer.project(self.before(held), None, at)
        return k, v

    def behind(self, both: HiddenStates, before: int, at: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of all, queries of those behind the first `before`; the first of all stands at position `at`."""
        seen = self.before(both)
        if self.mixer.rotary is None:
            return self.mixer.project(seen[:, before:], seen)
        q, k, v = self.mixer.project(seen, None, at)  # what turns knows one position for both
        return q[:, :, before:], k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, place: CallPositions, mask: Tensor | None
    ) -> Tensor:
        """Queries (b h n e) over keys and values (b h m e), merged and projected: (b n d)."""
        return self.mixer.out(merge_heads(self.inner.attend(q, k, v, place, mask=mask)))


def find_memory_attention(layer: Layer) -> MemoryAttention | None:
    """The parts of a block that can be shown hidden states from before; None for any other layer."""
    if (
        isinstance(layer, Block)
        and isinstance(layer.mixer, MultiHead)
        and isinstance(layer.mixer.inner, KVCacheAttention)
    ):
        return MemoryAttention(layer, layer.mixer, layer.mixer.inner)
    return None


def require_memory_attention(layer: Layer, why: str) -> MemoryAttention:
    """The same, where any other layer raises, with `why` it must be such a block."""
    found = find_memory_attention(layer)
    if found is None:
        raise Unsupported(f"{layer_name(layer)} has no keys that may stand anywhere, and {why}")
    return found


def layer_name(layer: Layer) -> str:
    """What to call a layer in a message."""
    return layer.mixer.name if isinstance(layer, Block) else type(layer).__name__


def check_causal(layers: Sequence[Layer], what: str) -> None:
    """All layers must be causal for what goes through time."""
    for i, layer in enumerate(layers):
        if not layer.causal:
            raise Unsupported(
                f"{what} goes through time, and layer {i} ({layer_name(layer)}) was not built causal: build it causal=True"
            )


def attend_to_memory(
    look: MemoryAttention, past: HiddenStates | None, x: Tensor, given: LayerInputs, at: int
) -> Tensor:
    """The block on x (b n d), which stands from position `at` on: queries of x, keys and values of the past and of x.

    The past stands right before x, one position each.
    """
    both = HiddenStates(x, given.mask).after(past)
    before = both.tokens - x.shape[1]
    q, k, v = look.behind(both, before, at - before)
    return look.block.join(
        x,
        look.attend(q, k, v, CallPositions(look.inner.causal_pattern, at, at - before), both.mask),
        given,
    )
