"""A memory of two kinds: recent hidden states, and older ones that were compressed."""

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
    attend_to_memory,
    require_memory_attention,
)
from regard.stack.segments import ASKED, SegmentMemory


class Ask(NamedTuple):
    """The content-based attention of a block with its weights held fixed: no positions, no pattern, and scores over √e."""

    look: MemoryAttention
    segment: HiddenStates

    def projected(self, held: HiddenStates) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of hidden states; gradients reach the states and not the weights."""
        part = _Projection(self.look)
        fixed = {name: p.detach() for name, p in part.named_parameters()} | {
            n: b.clone() for n, b in part.named_buffers()
        }
        found: tuple[Tensor, Tensor, Tensor] = functional_call(part, fixed, (held,))
        return found

    def read(self, held: HiddenStates) -> Tensor:
        """What the tokens of the segment read in them, (b h n e)."""
        q, (_, k, v) = self.projected(self.segment)[0], self.projected(held)
        return attend(q, k, v, mask=held.mask)

    def usage(self, held: HiddenStates) -> Tensor:
        """How much of the attention of the segment goes to each, (b t): the mean over heads, summed over real tokens."""
        q, (_, k, v) = self.projected(self.segment)[0], self.projected(held)
        weights = attend(q, k, identity_values(k, v), mask=held.mask).mean(1)
        if self.segment.mask is not None:
            weights = weights * self.segment.mask[..., None]
        used = weights.sum(1)
        return (
            used if held.mask is None else used.masked_fill(~held.mask, -1)
        )  # left out: chosen last


class _Projection(nn.Module):
    """What a block makes of hidden states before it attends, but for their positions."""

    def __init__(self, look: MemoryAttention) -> None:
        super().__init__()
        self.block: Block = look.block
        self.look = look

    def forward(self, held: HiddenStates) -> tuple[Tensor, Tensor, Tensor]:
        mixer, x = self.look.mixer, self.look.before(held)
        return (
            split_heads(mixer.q(x), mixer.heads),
            split_heads(mixer.k(x), mixer.kv_heads),
            split_heads(mixer.v(x), mixer.kv_heads),
        )


class CompressionLoss(nn.Module, ABC):
    """What the compression of hidden states of width `dim`, `rate` to one, is trained by."""

    name: str

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        check_int(1, dim=dim, rate=rate)

    @abstractmethod
    def forward(self, ask: Ask, old: HiddenStates, new: HiddenStates) -> Tensor:
        """A scalar: what `new` lost of `old`."""


class AttentionReconstructionLoss(CompressionLoss):
    """The mean of (attn(h, old) − attn(h, new))²: what the segment would read in the states and in their compression."""

    name = "attention reconstruction"

    def forward(self, ask: Ask, old: HiddenStates, new: HiddenStates) -> Tensor:
        """See `CompressionLoss`."""
        gap = (ask.read(old) - ask.read(new)).square().mean((1, 3))
        return _mean(gap, ask.segment.mask)


class AutoEncodingLoss(CompressionLoss):
    """The mean of (old − g(new))², with g a transposed convolution."""

    name = "auto-encoding"

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__(dim, rate)
        self.decode = nn.ConvTranspose1d(dim, dim, rate, stride=rate)

    def forward(self, ask: Ask, old: HiddenStates, new: HiddenStates) -> Tensor:
        """See `CompressionLoss`."""
        gap = (old.x - self.decode(new.x.transpose(1, 2)).transpose(1, 2)).square().mean(2)
        return _mean(gap, old.mask)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Of the real ones of x (b n); zero where there is none."""
    return x.mean() if mask is None else (x * mask).sum() / mask.sum().clamp(min=1)


class CompressiveState(NamedTuple):
    """What a layer holds: compressed states, and recent ones behind them."""

    old: HiddenStates | None
    recent: HiddenStates | None


class CompressiveMemory(SegmentMemory):
    """Recent hidden states as they were, and older ones compressed (Rae et al. 2020, arXiv 1911.05507):

        h̃ = [compressed ; recent ; h_τ],   q of h_τ, k and v of h̃

    Where a segment ends, its states join the recent ones, and the oldest beyond `recent` go, in whole runs of `rate`, through
    the compression into the compressed ones, of which the last `compressed` stay.  In h̃ each stands one position behind the
    other, so a compressed state counts as one token to a relative prior.

    No gradient of the task enters the memory.  The compression is trained by `training_loss` alone, which is told as a cost and, in
    turn, reaches nothing but the compression: `with regard.collect_aux() as notes`, then `notes.cost()`.

    recent      how many states stay as they are, or up to rate − 1 more
    compressed  how many compressed ones stay: the past is recent + rate x compressed tokens long
    rate        how many become one
    compress    makes the compression, from width and rate
    loss        makes what trains it; None: the task does, through later segments, and the state that `stream` hands out
                keeps its history (see `regard.state.detach`)
    weight      of the loss
    """

    def __init__(
        self,
        dim: int,
        *,
        recent: int,
        compressed: int,
        rate: int,
        compress: Callable[[int, int], CompressionFunction] = Conv1dCompression,
        loss: Callable[[int, int], CompressionLoss] | None = AttentionReconstructionLoss,
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        check_int(1, recent=recent, compressed=compressed, rate=rate)
        check_positive("weight", weight)
        if recent < rate:
            raise ValueError(
                f"recent must hold a run of rate tokens or more, and {recent} is less than {rate}"
            )
        self.recent, self.compressed, self.weight = recent, compressed, weight
        self.compress = compress(dim, rate)
        self.loss = None if loss is None else loss(dim, rate)

    def initial_state(self, layer: Layer) -> CompressiveState:
        """Nothing."""
        return CompressiveState(None, None)

    def step(
        self, layer: Layer, x: Tensor, given: LayerInputs, state: CompressiveState, at: int
    ) -> tuple[Tensor, CompressiveState]:
        """See `Memory`."""
        past = state.old if state.recent is None else state.recent.after(state.old)
        y = attend_to_memory(require_memory_attention(layer, ASKED), past, x, given, at)
        return y, state._replace(recent=HiddenStates(x, given.mask).after(state.recent))

    def close(self, layer: Layer, state: CompressiveState, size: int) -> CompressiveState:
        """Compress what is no longer recent."""
        assert state.recent is not None
        held, rate = state.recent.detached(), self.compress.rate
        leaving = max(0, held.tokens - self.recent) // rate * rate
        if not leaving:
            return CompressiveState(state.old, held)
        new = self._compressed(
            Ask(require_memory_attention(layer, ASKED), held.last(size)), held.cut(0, leaving)
        )
        return CompressiveState(
            new.after(state.old).last(self.compressed), held.cut(leaving, held.tokens)
        )

    def _compressed(self, ask: Ask, old: HiddenStates) -> HiddenStates:
        """The compression of states, and what it costs."""
        new = self.compress(old, lambda: ask.usage(old).detach())
        if self.loss is None:
            return new
        loss, learns = self.loss, next(self.parameters(), None) is not None
        record_aux(loss.name, lambda: self.weight * loss(ask, old, new), is_loss=learns)
        return new.detached()

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"recent={self.recent}, compressed={self.compressed}, rate={self.compress.rate}"
