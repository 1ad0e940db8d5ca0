"""`StreamCache`: the state of a stream as `past_key_values` of transformers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.state import State, take


class StreamGroup(NamedTuple):
    """Examples of equal length: their rows in the batch (g), and the state of their stream."""

    rows: Tensor
    state: State


class StreamCache:
    """Examples with prompts of equal length stream together, so that a stream has no padding.

    This is exact for all mixers, including those without masks. A step makes one call for each
    prompt length.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.groups: list[StreamGroup] = []
        self.seen = 0  # tokens of the batch so far, with padding

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens so far, with padding."""
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select and reorder examples, as beam search does."""
        groups = []
        for rows, state in self.groups:
            index = {row: i for i, row in enumerate(rows.tolist())}
            selected = [
                (new, index[old]) for new, old in enumerate(beam_idx.tolist()) if old in index
            ]
            if selected:
                new_rows, old_rows = zip(*selected, strict=True)
                groups.append(
                    StreamGroup(torch.tensor(new_rows, device=rows.device), take(state, old_rows))
                )
        self.groups = groups

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each example."""
        count = sum(len(group.rows) for group in self.groups)
        self.reorder_cache(torch.arange(count).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Not supported."""
        raise Unsupported(
            "A stream cannot be cropped: assisted generation and prompt lookup are not supported."
        )


def split_by_length(ids: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Group left-padded prompts (b, n) by length k: the rows (g) and their tokens (g, k)."""
    if mask is None:
        return [(torch.arange(len(ids), device=ids.device), ids)]
    if not mask[:, -1].all():
        raise ValueError("Prompts must be padded on the left to generate: set padding_side='left'.")
    lengths = mask.sum(1)
    groups = []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        groups.append((rows, ids[rows][mask[rows]].view(len(rows), length)))
    return groups
