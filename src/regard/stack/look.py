"""Attending back at tokens of earlier calls: what stacks with a memory share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attentions.cached import Cached, Place
from regard.block import Block, Given, Layer
from regard.common import blanked
from regard.errors import Unsupported
from regard.mixer import MultiHead, check_batch, merge, split

NO_MARKS = "marks are of the tokens of one call, and those of the memory have none"


class Held(NamedTuple):
    """Hidden states (b m d), and which of them are real, (b m), None: all."""

    x: Tensor
    mask: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.x.shape[1]

    def after(self, past: Held | None) -> Held:
        """These behind those of the past."""
        if past is None:
            return self
        check_batch(past.x, self.x)
        mask = None if past.mask is None or self.mask is None else torch.cat((past.mask, self.mask), 1)
        return Held(torch.cat((past.x, self.x), 1), mask)

    def cut(self, first: int, last: int) -> Held:
        """Those from `first` on, before `last`."""
        return Held(self.x[:, first:last], None if self.mask is None else self.mask[:, first:last])

    def last(self, count: int) -> Held:
        """The last of them, at most so many."""
        return self.cut(max(0, self.tokens - count), self.tokens)

    def detached(self) -> Held:
        """The same without their history; left-out ones are blank."""
        return Held(blanked(self.x.detach(), self.mask), self.mask)


class Attending(NamedTuple):
    """A block whose mixer attends with keys that may stand anywhere."""

    block: Block
    mixer: MultiHead
    inner: Cached

    def before(self, held: Held) -> Tensor:
        """What the mixer reads of hidden states, (b m d): normalised where the residual does so first, blank where left out."""
        return blanked(self.block.around_mixer.before(held.x, held.mask), held.mask)

    def queries(self, held: Held, at: int) -> Tensor:
        """Queries of hidden states that stand from position `at` on, (b h n e)."""
        q = split(self.mixer.q(self.before(held)), self.mixer.heads)
        return q if self.mixer.turn is None else self.mixer.turn(q, q, at, at)[0]

    def keys(self, held: Held, at: int) -> tuple[Tensor, Tensor]:
        """Keys and values of hidden states that stand from position `at` on, (b h m e)."""
        _, k, v = self.mixer.project(self.before(held), None, at)
        return k, v

    def behind(self, both: Held, before: int, at: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of all, queries of those behind the first `before`; the first of all stands at position `at`."""
        seen = self.before(both)
        if self.mixer.turn is None:
            return self.mixer.project(seen[:, before:], seen)
        q, k, v = self.mixer.project(seen, None, at)  # what turns knows one position for both
        return q[:, :, before:], k, v

    def over(self, q: Tensor, k: Tensor, v: Tensor, place: Place, mask: Tensor | None) -> Tensor:
        """Queries (b h n e) over keys and values (b h m e), merged and projected: (b n d)."""
        return self.mixer.out(merge(self.inner.over(q, k, v, place, mask=mask)))


def attends(layer: Layer) -> Attending | None:
    """The parts of a block that can be shown hidden states from before; None for any other layer."""
    if isinstance(layer, Block) and isinstance(layer.mixer, MultiHead) and isinstance(layer.mixer.inner, Cached):
        return Attending(layer, layer.mixer, layer.mixer.inner)
    return None


def attending(layer: Layer, why: str) -> Attending:
    """The same, where any other layer raises, with `why` it must be such a block."""
    found = attends(layer)
    if found is None:
        raise Unsupported(f"{named(layer)} has no keys that may stand anywhere, and {why}")
    return found


def named(layer: Layer) -> str:
    """What to call a layer in a message."""
    return layer.mixer.name if isinstance(layer, Block) else type(layer).__name__


def check_causal(layers: Sequence[Layer], what: str) -> None:
    """All layers must be causal for what goes through time."""
    for i, layer in enumerate(layers):
        if not layer.causal:
            raise Unsupported(
                f"{what} goes through time, and layer {i} ({named(layer)}) was not built causal: build it causal=True"
            )


def recall(look: Attending, past: Held | None, x: Tensor, given: Given, at: int) -> Tensor:
    """The block on x (b n d), which stands from position `at` on: queries of x, keys and values of the past and of x.

    The past stands right before x, one position each.
    """
    both = Held(x, given.mask).after(past)
    before = both.tokens - x.shape[1]
    q, k, v = look.behind(both, before, at - before)
    return look.block.join(x, look.over(q, k, v, Place(look.inner.past, at, at - before), both.mask), given)
