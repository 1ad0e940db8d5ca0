"""Attention over blocks of the sequence, each compressed to one key and one value."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.attentions.kv_cache import CallPositions, pattern_capabilities
from regard.attentions.softmax import SoftmaxAttention
from regard.compression import BlockCompression
from regard.mixer import Attention, check_batch
from regard.pattern import Full, Pattern, StridedKeyBand


class BlockCompressedState(NamedTuple):
    """Compressed blocks, and the tokens that later blocks still need.

    Attributes:
        k: Keys of the blocks (b h blocks e), or None before the first token.
        v: Values of the blocks (b h blocks f).
        rest_k: Keys of the tokens after the last complete block (b h m e).
        rest_v: Values of these tokens (b h m f).
        dropped: Number of blocks dropped because no later query can see them.
        next_position: Position of the next token.
    """

    k: Tensor | None
    v: Tensor | None
    rest_k: Tensor | None
    rest_v: Tensor | None
    dropped: int
    next_position: int


class BlockCompressedAttention(Attention):
    """softmax(q k'ᵀ / √e) v', with one key k' and value v' for each block of the sequence.

    In the causal form a query sees only the blocks that end at or before it.

    Args:
        blocks: Compresses blocks.
        window: A query sees only blocks within this many tokens to either side. None for all.
        null: Initial value (2 h 1 e) of a learned key and value that all queries see, for queries
            before which no block is complete. Not available with a window.
    """

    def __init__(
        self, blocks: BlockCompression, *, window: int | None = None, null: Tensor | None = None
    ) -> None:
        super().__init__()
        if window is not None and null is not None:
            raise ValueError("null and window cannot be combined: all queries see the null key")
        self.blocks, self.window = blocks, window
        self.null = None if null is None else nn.Parameter(null)
        self.inner = SoftmaxAttention()
        self.can = blocks.can & pattern_capabilities(self._pattern(causal=False))
        self.can = self.can.without(rotary="its keys are mixtures of several positions")

    def _pattern(self, causal: bool) -> Pattern:
        """Which blocks each query sees. The position of a block is that of its last token."""
        if self.window is None and not causal:
            return Full()
        last = self.blocks.kernel - 1
        left = None if self.window is None else max(0, self.window - last)
        right = 0 if causal else self.window
        first = last if self.null is None else last - self.blocks.stride
        return StridedKeyBand(self.blocks.stride, first, left, right)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: BlockCompressedState | None = None,
    ) -> tuple[Tensor, BlockCompressedState | None]:
        """See `Attention.forward`."""
        if state is not None:
            return self._stream(q, k, v, state)
        k, v, mask = self.blocks(k, v, mask)
        if self.null is not None:
            null_k, null_v = self._null(k)
            k, v = torch.cat((null_k, k), 2), torch.cat((null_v, v), 2)
            mask = None if mask is None else torch.cat((torch.ones_like(mask[:, :1]), mask), 1)
        positions = CallPositions(self._pattern(causal=causal))
        return self.inner.attend(q, k, v, positions, mask=mask), None

    def _stream(
        self, q: Tensor, k: Tensor, v: Tensor, state: BlockCompressedState
    ) -> tuple[Tensor, BlockCompressedState]:
        """Attend from the next tokens. Complete blocks are compressed, the rest is kept for
        later."""
        kernel, stride = self.blocks.kernel, self.blocks.stride
        if state.rest_k is not None and state.rest_v is not None:
            check_batch(state.rest_k, k)
            k, v = torch.cat((state.rest_k, k), 2), torch.cat((state.rest_v, v), 2)
        all_k, all_v = state.k, state.v
        if all_k is None or all_v is None:
            all_k, all_v = (k[:, :, :0], v[:, :, :0]) if self.null is None else self._null(k)
        complete = max(0, (k.shape[2] - kernel) // stride + 1)
        if complete:
            end = (complete - 1) * stride + kernel
            real = k.new_ones(k.shape[0], complete, kernel, dtype=torch.bool)
            new_k, new_v = self.blocks.compress(k[:, :, :end], v[:, :, :end], real)
            all_k, all_v = torch.cat((all_k, new_k), 2), torch.cat((all_v, new_v), 2)
        positions = CallPositions(self._pattern(causal=True), state.next_position, state.dropped)
        out = self.inner.attend(q, all_k, all_v, positions)

        next_position, drop = state.next_position + q.shape[2], 0
        if self.window is not None:  # blocks that begin before the window
            drop = max(0, -(-(next_position - self.window) // stride) - state.dropped)
        all_k, all_v = all_k[:, :, drop:], all_v[:, :, drop:]
        k, v = k[:, :, complete * stride :], v[:, :, complete * stride :]
        dropped = state.dropped + drop
        return out, BlockCompressedState(all_k, all_v, k, v, dropped, next_position)

    def _null(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """The learned key and value for each example (b h 1 e)."""
        assert self.null is not None
        key, value = self.null.to(k.dtype)[:, None].expand(-1, k.shape[0], -1, -1, -1)
        return key, value

    def initial_state(self) -> BlockCompressedState:
        """No tokens yet."""
        return BlockCompressedState(None, None, None, None, 0, 0)
