"""Attention to blocks of the sequence, each of which became one key."""

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
    """Blocks so far, k (b h blocks e) and v, and the tokens that blocks to come still need; None: no token yet."""

    k: Tensor | None
    v: Tensor | None
    rest_k: Tensor | None
    rest_v: Tensor | None
    dropped: int  # blocks that no later query may see
    next: int  # the position of the next token


class BlockCompressedAttention(Attention):
    """softmax(q k'ᵀ / √e) v', with k' and v' a key and a value for each block of the sequence.

    Causal: a query sees the blocks that end with it or before it, so that nothing of a block leaks before it is whole.

    window   sees only blocks that lie within so many tokens to either side; None: all
    null     shape (2 heads 1 e), where there is no window: a learned key and value that every query sees, as the first one;
             for queries before which no block is whole
    """

    no_rotary_reason = "its keys are mixtures of many positions, and no place is left to tell"

    def __init__(
        self, blocks: BlockCompression, *, window: int | None = None, null: Tensor | None = None
    ) -> None:
        super().__init__()
        if window is not None and null is not None:
            raise ValueError("a null key is seen by all, so there is none beside a window")
        self.blocks, self.window = blocks, window
        self.null = None if null is None else nn.Parameter(null)
        self.inner = SoftmaxAttention()
        self.can = blocks.can & pattern_capabilities(self._pattern(False))

    def _pattern(self, causal: bool) -> Pattern:
        """A block stands where its last token does."""
        if self.window is None and not causal:
            return Full()
        last = self.blocks.kernel - 1
        left = None if self.window is None else max(0, self.window - last)
        right = 0 if causal else self.window
        return StridedKeyBand(
            self.blocks.stride,
            last if self.null is None else last - self.blocks.stride,
            left,
            right,
        )

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
            return self._next(q, k, v, state)
        k, v, mask = self.blocks(k, v, mask)
        if self.null is not None:
            k, v = (torch.cat((null, x), 2) for null, x in zip(self._nulls(k), (k, v), strict=True))
            mask = None if mask is None else torch.cat((torch.ones_like(mask[:, :1]), mask), 1)
        return self.inner.attend(q, k, v, CallPositions(self._pattern(causal)), mask=mask), None

    def _next(
        self, q: Tensor, k: Tensor, v: Tensor, state: BlockCompressedState
    ) -> tuple[Tensor, BlockCompressedState]:
        """One more chunk: what is whole becomes blocks, and the rest waits."""
        kernel, stride, n = self.blocks.kernel, self.blocks.stride, q.shape[2]
        k, v = _joined(state.rest_k, k), _joined(state.rest_v, v)
        whole = max(0, (k.shape[2] - kernel) // stride + 1)
        all_k, all_v = state.k, state.v
        if all_k is None or all_v is None:
            all_k, all_v = (k[:, :, :0], v[:, :, :0]) if self.null is None else self._nulls(k)
        if whole:
            upto = (whole - 1) * stride + kernel
            inside = k.new_ones(k.shape[0], whole, kernel, dtype=torch.bool)
            new_k, new_v = self.blocks.shorten(k[:, :, :upto], v[:, :, :upto], inside)
            all_k, all_v = torch.cat((all_k, new_k), 2), torch.cat((all_v, new_v), 2)
        out = self.inner.attend(
            q, all_k, all_v, CallPositions(self._pattern(True), state.next, state.dropped)
        )
        gone = self._gone(state.next + n, state.dropped)
        rest_k, rest_v = k[:, :, whole * stride :], v[:, :, whole * stride :]
        return out, BlockCompressedState(
            all_k[:, :, gone:],
            all_v[:, :, gone:],
            rest_k,
            rest_v,
            state.dropped + gone,
            state.next + n,
        )

    def _nulls(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """The null key and value for each example, (b h 1 e)."""
        assert self.null is not None
        key, value = self.null.to(k.dtype)[:, None].expand(-1, k.shape[0], -1, -1, -1)
        return key, value

    def _gone(self, at: int, dropped: int) -> int:
        """How many more blocks no query from `at` on will see: those that begin before the window does."""
        if self.window is None:
            return 0
        return max(0, -(-(at - self.window) // self.blocks.stride) - dropped)

    def initial_state(self) -> BlockCompressedState:
        """No token yet."""
        return BlockCompressedState(None, None, None, None, 0, 0)


def _joined(old: Tensor | None, new: Tensor) -> Tensor:
    if old is None:
        return new
    check_batch(old, new)
    return torch.cat((old, new), 2)
