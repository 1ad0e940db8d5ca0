"""`StreamCache`: the state of a stream as `past_key_values` of transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.state import State, state_batch_size, take


class StreamCache:
    """The streams of a batch, joined into one state.

    Prompts of different lengths are read without their padding, one length after the other. Then
    all examples go on together, each at its own position. This is exact for all mixers, including
    those without masks.

    Attributes:
        state: State of the streams, or None before the first token.
        seen: Tokens of the batch so far, with padding.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.state: State = None
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens so far, with padding."""
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select and reorder examples, as beam search does."""
        self.state = take(self.state, beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each example."""
        count = state_batch_size(self.state) or 0
        self.reorder_cache(torch.arange(count).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Not supported."""
        raise Unsupported(
            "A stream cannot be cropped: assisted generation and prompt lookup are not supported."
        )


def split_by_length(ids: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Group left-padded prompts (b, n) by length k: the rows (g) and their tokens (g, k)."""
    if not mask[:, -1].all():
        raise ValueError("Prompts must be padded on the left to generate: set padding_side='left'.")
    lengths = mask.sum(1)
    groups = []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        groups.append((rows, ids[rows][mask[rows]].view(len(rows), length)))
    return groups
