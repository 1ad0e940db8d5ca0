"""The state of a stream as transformers carries it from step to step: `past_key_values`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.state import State, take


class StreamGroup(NamedTuple):
    """Examples that have come equally far: their rows of the batch (g), and the state of their stream."""

    rows: Tensor
    state: State


class StreamCache:
    """Examples whose prompts are equally long stream together, and others beside them: so there is no padding in a stream.

    That is exact for every mechanism, whether it takes a mask or not.  A step costs a call for each length of prompt.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.groups: list[StreamGroup] = []
        self.seen = 0  # how many tokens of the batch, padding included

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens have gone in, padding included."""
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these examples in this order, repeated or not: what beams ask for."""
        found = []
        for rows, state in self.groups:
            place = {row: i for i, row in enumerate(rows.tolist())}
            kept = [(new, place[old]) for new, old in enumerate(beam_idx.tolist()) if old in place]
            if kept:
                new, old = zip(*kept, strict=True)
                found.append(StreamGroup(torch.tensor(new, device=rows.device), take(state, old)))
        self.groups = found

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each example so many times."""
        count = sum(len(group.rows) for group in self.groups)
        self.reorder_cache(torch.arange(count).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Refused."""
        raise Unsupported(
            "a stream cannot be taken back, as assisted generation and prompt lookup ask: go without them"
        )


def by_length(ids: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """ids (b n), mask (b n) -> for each number of real tokens, the rows that have so many (g) and their tokens (g k)."""
    if mask is None:
        return [(torch.arange(len(ids), device=ids.device), ids)]
    if not mask[:, -1].all():
        raise ValueError(
            "to go on from a prompt its last token must be real: pad on the left (padding_side='left')"
        )
    counts = mask.sum(1)
    found = []
    for count in counts.unique().tolist():
        rows = (counts == count).nonzero()[:, 0]
        found.append((rows, ids[rows][mask[rows]].view(len(rows), count)))
    return found


def real_first(mask: Tensor) -> Tensor:
    """mask (b n) -> the order (b n) in which real tokens come first, in their order."""
    return mask.logical_not().int().argsort(dim=1, stable=True)
