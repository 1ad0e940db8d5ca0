"""Compressive Transformer: a memory of recent hidden states, and older ones compressed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from regard.auxiliary import record_aux
from regard.backends import attend
from regard.block import Block, Layer, LayerInputs
from regard.errors import check_int, check_positive
from regard.mixer import identity_values, split_heads
from regard.stack.compression_functions import CompressionFunction, Conv1dCompression
from regard.stack.memory_attention import (
    HiddenStates,
    MemoryAttention,
    require_memory_attention,
)
from regard.stack.segments import SegmentMemory


class ContentAttention(NamedTuple):
    """Attention of a segment with the weights of a block held fixed: no positions, no pattern."""

    attention: MemoryAttention
    segment: HiddenStates

    def project(self, states: HiddenStates) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, h, m, e); gradients reach the states, not the weights."""
        module = _Projection(self.attention)
        fixed = {name: p.detach() for name, p in module.named_parameters()}
        fixed |= {name: buffer.clone() for name, buffer in module.named_buffers()}
        q, k, v = functional_call(module, fixed, (states,))
        return q, k, v

    def attend(self, states: HiddenStates) -> Tensor:
        """Attention output of the segment over the states, (b, h, n, e)."""
        q, (_, k, v) = self.project(self.segment)[0], self.project(states)
        return attend(q, k, v, mask=states.mask)

    def usage(self, states: HiddenStates) -> Tensor:
        """Attention that each state receives, (b, t): mean over heads, sum over real tokens."""
        q, (_, k, v) = self.project(self.segment)[0], self.project(states)
        weights = attend(q, k, identity_values(k, v), mask=states.mask).mean(1)
        if self.segment.mask is not None:
            weights = weights * self.segment.mask[..., None]
        usage = weights.sum(1)
        return usage if states.mask is None else usage.masked_fill(~states.mask, -1)  # padding last


class _Projection(nn.Module):
    """Queries, keys and values of a block, without positions."""

    def __init__(self, attention: MemoryAttention) -> None:
        super().__init__()
        self.block: Block = attention.block
        self.attention = attention

    def forward(self, states: HiddenStates) -> tuple[Tensor, Tensor, Tensor]:
        mixer, x = self.attention.mixer, self.attention.prepare(states)
        return (
            mixer.project_queries(x),
            mixer.project_keys(x),
            split_heads(mixer.v(x), mixer.kv_heads),
        )


class CompressionLoss(nn.Module, ABC):
    """Loss that trains the compression of hidden states of width `dim` by a factor `rate`."""

    name: str

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        check_int(1, dim=dim, rate=rate)

    @abstractmethod
    def forward(self, content: ContentAttention, old: HiddenStates, new: HiddenStates) -> Tensor:
        """Scalar loss of compressing `old` to `new`."""


class AttentionReconstructionLoss(CompressionLoss):
    """Mean of (attn(h, old) − attn(h, new))², where h is the last segment."""

    name = "attention_reconstruction_loss"

    def forward(self, content: ContentAttention, old: HiddenStates, new: HiddenStates) -> Tensor:
        """See `CompressionLoss`."""
        error = (content.attend(old) - content.attend(new)).square().mean((1, 3))
        return _masked_mean(error, content.segment.mask)


class AutoEncodingLoss(CompressionLoss):
    """Mean of (old − g(new))², with a transposed convolution g."""

    name = "auto_encoding_loss"

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__(dim, rate)
        self.decode = nn.ConvTranspose1d(dim, dim, rate, stride=rate)

    def forward(self, content: ContentAttention, old: HiddenStates, new: HiddenStates) -> Tensor:
        """See `CompressionLoss`."""
        decoded = self.decode(new.x.transpose(1, 2)).transpose(1, 2)
        return _masked_mean((old.x - decoded).square().mean(2), old.mask)


def _masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the real values of x (b, n); zero if there are none."""
    return x.mean() if mask is None else (x * mask).sum() / mask.sum().clamp(min=1)


class CompressiveState(NamedTuple):
    """Memory of a layer: compressed states, followed by recent ones."""

    compressed: HiddenStates | None
    recent: HiddenStates | None


class CompressiveMemory(SegmentMemory):
    """Recent hidden states, and older ones compressed (Rae et al. 2020, arXiv 1911.05507):

        h̃ = [compressed ; recent ; h_τ],   q of h_τ, k and v of h̃

    At the end of a segment, its states join the recent ones. The oldest beyond `memory_length` are
    compressed, in whole groups of `compression_rate`, and the last `compressed_length` compressed
    states are kept. A compressed state counts as one position.

    The task's gradient does not enter the memory. The compression is trained by `loss` only, which
    is recorded as an auxiliary loss and reaches nothing but the compression: collect it with
    `regard.collect_aux()` and add `aux.loss()`.

    Args:
        memory_length: Number of uncompressed states, or up to compression_rate − 1 more.
        compressed_length: Number of compressed states. The memory covers
            memory_length + compression_rate · compressed_length tokens.
        compression_rate: Number of states that become one.
        compression: Builds the compression function from width and rate.
        loss: Builds the loss from width and rate. None: the task trains the compression through
            later segments, and states that `stream` returns keep their graph (see
            `regard.state.detach`).
        loss_weight: Weight of the loss.
    """

    def __init__(
        self,
        dim: int,
        *,
        memory_length: int,
        compressed_length: int,
        compression_rate: int,
        compression: Callable[[int, int], CompressionFunction] = Conv1dCompression,
        loss: Callable[[int, int], CompressionLoss] | None = AttentionReconstructionLoss,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__()
        check_int(
            1,
            memory_length=memory_length,
            compressed_length=compressed_length,
            compression_rate=compression_rate,
        )
        check_positive("loss_weight", loss_weight)
        if memory_length < compression_rate:
            raise ValueError(
                f"memory_length must be at least compression_rate ({compression_rate}), "
                f"not {memory_length}"
            )
        self.memory_length, self.compressed_length = memory_length, compressed_length
        self.loss_weight = loss_weight
        self.compression = compression(dim, compression_rate)
        self.loss = None if loss is None else loss(dim, compression_rate)

    def initial_state(self, layer: Layer) -> CompressiveState:
        """Empty."""
        return CompressiveState(None, None)

    def step(
        self, layer: Layer, x: Tensor, inputs: LayerInputs, state: CompressiveState, start: int
    ) -> tuple[Tensor, CompressiveState]:
        """See `SegmentMemory`."""
        compressed, recent = state
        past = compressed if recent is None else recent.append_to(compressed)
        y = require_memory_attention(layer, "SegmentStack").run(x, past, inputs, start)
        return y, CompressiveState(compressed, HiddenStates(x, inputs.mask).append_to(recent))

    def end_segment(
        self, layer: Layer, state: CompressiveState, segment_length: int
    ) -> CompressiveState:
        """Compress states that are no longer recent."""
        assert state.recent is not None
        recent, rate = state.recent.detach(), self.compression.rate
        leaving = max(0, recent.length - self.memory_length) // rate * rate
        if not leaving:
            return CompressiveState(state.compressed, recent)

        attention = require_memory_attention(layer, "SegmentStack")
        content, old = (
            ContentAttention(attention, recent.last(segment_length)),
            recent.slice(0, leaving),
        )
        new = self.compression(old, lambda: content.usage(old).detach())
        if self.loss is not None:
            loss = self.loss
            record_aux(
                loss.name,
                lambda: self.loss_weight * loss(content, old, new),
                is_loss=next(self.parameters(), None) is not None,
            )
        compressed = new if self.loss is None else new.detach()
        return CompressiveState(
            compressed.append_to(state.compressed).last(self.compressed_length),
            recent.slice(leaving, recent.length),
        )

    def extra_repr(self) -> str:
        """Shown by print."""
        return (
            f"memory_length={self.memory_length}, compressed_length={self.compressed_length}, "
            f"compression_rate={self.compression.rate}"
        )
