"""Branches: the channels are split among several mixers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import and_

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.mixer import Mixer, State


class Branches(Mixer):
    """out = [mixer_1(x_1) ; mixer_2(x_2) ; ...]: each mixer gets `mixer.dim` channels of x (Wu
    et al. 2020, arXiv 2004.11886).

    The capabilities are those that all mixers have in common. The attention map has the heads of
    all mixers.

    Args:
        mixers: The mixers. All must be causal, or none.
    """

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        if not mixers:
            raise ValueError("Branches needs at least one mixer")
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
        """Initial states of all branches."""
        return tuple(branch.initial_state() for branch in self.branches)

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        states = [None] * len(self.widths) if state is None else state
        outputs, next_states = [], []
        for inputs, branch_state in zip(self._split(x, context), states, strict=True):
            branch, part, part_context = inputs
            if branch_state is None:
                masks = _optional(branch, global_attention_mask, attn_mask, query_mask)
                y, _ = branch.mix(part, part_context, mask, None, **masks)
            else:
                y, branch_state = branch.stream(part, branch_state)
            outputs.append(y)
            next_states.append(branch_state)
        return torch.cat(outputs, -1), None if state is None else tuple(next_states)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """(b h n m), with the heads of all branches."""
        maps = []
        for branch, part, part_context in self._split(x, context):
            masks = _optional(branch, global_attention_mask, attn_mask, query_mask)
            maps.append(branch.weights(part, part_context, mask, **masks))
        return torch.cat(maps, 1)

    def _split(
        self, x: Tensor, context: Tensor | None
    ) -> Iterator[tuple[Mixer, Tensor, Tensor | None]]:
        """Each branch with its channels of x and of the context."""
        contexts = [None] * len(self.widths) if context is None else context.split(self.widths, -1)
        return zip(self.branches, x.split(self.widths, -1), contexts, strict=True)


def _optional(
    branch: Mixer,
    global_attention_mask: Tensor | None,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
) -> dict[str, Tensor]:
    """As keyword arguments: not every mixer has these parameters."""
    if attn_mask is not None and attn_mask.shape[1] > 1:
        raise Unsupported(
            "Branches does not support a pair mask for each head, since its branches have heads of "
            "their own: use attn_mask of shape (n m) or (b n m)."
        )
    masks = {"global_attention_mask": global_attention_mask, "attn_mask": attn_mask}
    if not branch.can.independent_queries:
        masks["query_mask"] = query_mask
    return {name: mask for name, mask in masks.items() if mask is not None}
