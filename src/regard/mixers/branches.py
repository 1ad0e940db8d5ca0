"""Branches: the channels are dealt out to several mixers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import torch
from torch import Tensor, nn

from regard.mixer import Mixer, State


class Branches(Mixer):
    """out = [mixer_1(x_1) ; mixer_2(x_2) ; ...]: each mixer has as many channels of x as it is wide, in turn, and nothing
    crosses from one to the other before the feed-forward layer (Wu et al. 2020, arXiv 2004.11886).

    It can what all of them can; the map has the heads of all, one after the other.
    """

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        if not mixers:
            raise ValueError("there must be at least one branch")
        if len({mixer.causal for mixer in mixers}) > 1:
            raise ValueError("all branches must be causal, or none")
        limits = [mixer.length for mixer in mixers if mixer.length is not None]
        super().__init__(
            sum(mixer.dim for mixer in mixers),
            can=reduce(and_, (mixer.can for mixer in mixers)),
            causal=mixers[0].causal,
            length=min(limits, default=None),
        )
        self.branches: Sequence[Mixer] = nn.ModuleList(mixers)  # type: ignore[assignment]
        self.widths = [mixer.dim for mixer in mixers]

    def initial_state(self) -> State:
        """The states of all branches."""
        return tuple(branch.initial_state() for branch in self.branches)

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        states = [None] * len(self.widths) if state is None else state
        more = (
            {}
            if global_attention_mask is None
            else {"global_attention_mask": global_attention_mask}
        )
        parts = zip(
            self.branches, x.split(self.widths, -1), self._seen(context), states, strict=True
        )
        found = [branch.mix(part, seen, mask, mine, **more) for branch, part, seen, mine in parts]
        return torch.cat([y for y, _ in found], -1), None if state is None else tuple(
            mine for _, mine in found
        )

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(b h n m), with h the heads of all branches together."""
        more = (
            {}
            if global_attention_mask is None
            else {"global_attention_mask": global_attention_mask}
        )
        parts = zip(self.branches, x.split(self.widths, -1), self._seen(context), strict=True)
        return torch.cat(
            [branch.weights(part, seen, mask, **more) for branch, part, seen in parts], 1
        )

    def _seen(self, context: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * len(self.widths) if context is None else context.split(self.widths, -1)
