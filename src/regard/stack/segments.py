"""Segment by segment: a long sequence in pieces, with a memory of the pieces before and no gradient into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.block import Layer, LayerInputs
from regard.errors import Unsupported, check_int
from regard.mixer import Can, State
from regard.stack.memory_attention import (
    NO_MARKS,
    HiddenStates,
    attend_to_memory,
    check_causal,
    find_memory_attention,
    layer_name,
    require_memory_attention,
)
from regard.stack.sequential import combine_capabilities
from regard.state import detach

NO_MASK = "a layer carries a state of its own from segment to segment, and a state takes no mask"

ASKED = "a memory of hidden states is asked by keys"


class SegmentState(NamedTuple):
    """Where a segmented sequence stands: what each layer holds, and the position of the next token."""

    layers: tuple[State, ...]
    next: int


class SegmentMemory(nn.Module, ABC):
    """What one layer keeps of the past.  Segments end at fixed positions, so pieces of a segment give what the whole gives."""

    takes_mask: bool = True

    @abstractmethod
    def initial_state(self, layer: Layer) -> State:
        """What is held before the first token."""

    @abstractmethod
    def step(
        self, layer: Layer, x: Tensor, given: LayerInputs, state: State, at: int
    ) -> tuple[Tensor, State]:
        """The layer on the next piece of a segment, x (b n d) from position `at` on: (b n d), and what is held then."""

    @abstractmethod
    def close(self, layer: Layer, state: State, size: int) -> State:
        """What is held once a segment of `size` tokens has ended."""


class HiddenStateMemory(SegmentMemory):
    """The hidden states that the layer read last, `size` tokens before the segment: Transformer-XL.

    Held as they were, without their history.  Norms, keys and values of them are made anew with the weights of now, so that
    gradients reach those weights through the memory, but no earlier segment.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        check_int(0, memory=size)
        self.size = size

    def initial_state(self, layer: Layer) -> None:
        """Nothing."""

    def step(
        self, layer: Layer, x: Tensor, given: LayerInputs, state: HiddenStates | None, at: int
    ) -> tuple[Tensor, HiddenStates]:
        """See `Memory`."""
        y = attend_to_memory(require_memory_attention(layer, ASKED), state, x, given, at)
        return y, HiddenStates(x, given.mask).after(state)

    def close(self, layer: Layer, state: HiddenStates, size: int) -> HiddenStates:
        """The last of them, detached."""
        return state.last(self.size).detached()

    def extra_repr(self) -> str:
        """Shown by print."""
        return str(self.size)


class RecurrentStateMemory(SegmentMemory):
    """The state that the layer streams with, whole, cut from its history where a segment ends: truncated backpropagation."""

    takes_mask = False

    def initial_state(self, layer: Layer) -> State:
        """The state before the first chunk."""
        return layer.initial_state()

    def step(
        self, layer: Layer, x: Tensor, given: LayerInputs, state: State, at: int
    ) -> tuple[Tensor, State]:
        """The next chunk of a stream."""
        return layer.run(x, given, state)

    def close(self, layer: Layer, state: State, size: int) -> State:
        """The same, detached."""
        return detach(state)


class SegmentStack(Layer):
    """A sequence in segments of `segment` tokens, where layer l of segment τ looks at what it read of the segments before
    (Dai et al. 2019, arXiv 1901.02860):

        h̃ = [stop_gradient(h^{l-1} of the last `memory` tokens before τ) ; h_τ^{l-1}],   q of h_τ, k and v of h̃

    A token at position t thus sees the positions from s − memory to t, where s is the first of its segment; with L layers
    the past that has a say is about L times as long.  Positions are absolute and go on, so the attention should know
    positions by their difference alone, as with a relative prior.

    Blocks of `MultiHead` over a pattern hold hidden states.  Any other layer that streams (linear attention, recurrences)
    holds its own state, detached where a segment ends; `memory` does not bound that.

    segment  tokens of a segment
    memory   how many hidden states a layer holds, or what makes a `Memory` from the width
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        segment: int,
        memory: int | Callable[[int], SegmentMemory] | None = None,
    ) -> None:
        can, _, length = combine_capabilities(layers)
        check_int(1, segment=segment)
        check_causal(layers, "a segmented stack")
        _check_memory(layers, memory)
        memories = [_memory(layer, memory) for layer in layers]
        unsupported = can.unsupported | {"global_attention_mask": NO_MARKS}
        if not all(m.takes_mask for m in memories):
            unsupported["mask"] = NO_MASK
        super().__init__(
            layers[0].dim,
            can=Can(supports_global_mask=True, **unsupported),
            causal=True,
            length=length,
        )
        self.segment = segment
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.memories: Sequence[SegmentMemory] = nn.ModuleList(memories)  # type: ignore[assignment]

    def initial_state(self) -> SegmentState:
        """What the layers hold before the first token."""
        return SegmentState(
            tuple(
                m.initial_state(layer) for m, layer in zip(self.memories, self.layers, strict=True)
            ),
            0,
        )

    def run(
        self, x: Tensor, given: LayerInputs, state: SegmentState | None
    ) -> tuple[Tensor, SegmentState | None]:
        """See `Layer`.  The whole is all segments one after the other, the first without a memory."""
        here, parts = self.initial_state() if state is None else state, [x[:, :0]]
        for piece, mask in self._pieces(x, given.mask, here.next):
            y, here = self._step(piece, given._replace(mask=mask), here)
            parts.append(y)
        return torch.cat(parts, 1), None if state is None else here

    def _pieces(
        self, x: Tensor, mask: Tensor | None, at: int
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """x cut where segments end; `at` is the position of its first token."""
        first, n = 0, x.shape[1]
        while first < n:
            last = min(n, first + self.segment - (at + first) % self.segment)
            yield x[:, first:last], None if mask is None else mask[:, first:last]
            first = last

    def _step(
        self, x: Tensor, given: LayerInputs, here: SegmentState
    ) -> tuple[Tensor, SegmentState]:
        """All layers on a piece of one segment, and what they keep of it where it ends the segment."""
        end, states = here.next + x.shape[1], []
        for layer, memory, state in zip(self.layers, self.memories, here.layers, strict=True):
            x, state = memory.step(layer, x, given, state, here.next)
            states.append(state if end % self.segment else memory.close(layer, state, self.segment))
        return x, SegmentState(tuple(states), end)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"segment={self.segment}"


def _check_memory(
    layers: Sequence[Layer], memory: int | Callable[[int], SegmentMemory] | None
) -> None:
    asks = [layer for layer in layers if find_memory_attention(layer) is not None]
    if asks and memory is None:
        raise ValueError(
            f"{layer_name(asks[0])} looks back at hidden states: say how many it keeps, as memory=128"
        )
    if not asks and memory is not None:
        raise ValueError(
            f"no layer keeps hidden states ({layer_name(layers[0])} carries a state of its own): leave memory out"
        )


def _memory(layer: Layer, memory: int | Callable[[int], SegmentMemory] | None) -> SegmentMemory:
    """What a layer keeps: hidden states where it can be asked about them, else its own state."""
    if find_memory_attention(layer) is not None and memory is not None:
        return memory(layer.dim) if callable(memory) else HiddenStateMemory(memory)
    if not layer.can.stream:
        raise Unsupported(
            f"{layer_name(layer)} can neither look back at hidden states nor stream: {layer.can.reason('stream')}"
        )
    return RecurrentStateMemory()
