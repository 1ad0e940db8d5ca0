"""Segment recurrence (Transformer-XL): a memory of earlier segments, without gradients into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.block import Layer, LayerInputs, run_layer
from regard.errors import Unsupported, check_int
from regard.mixer import Can, State
from regard.stack.memory_attention import (
    NO_GLOBAL_MASK,
    HiddenStates,
    check_causal,
    find_memory_attention,
    layer_name,
    require_memory_attention,
)
from regard.stack.sequential import combine_capabilities
from regard.state import detach

NO_MASK = "one of its layers carries a recurrent state between segments, which takes no mask"


class SegmentState(NamedTuple):
    """State of a `SegmentStack`: the memory of each layer, and the position of the next token."""

    layers: tuple[State, ...]
    position: int


class SegmentMemory(nn.Module, ABC):
    """What a layer keeps of earlier segments.

    Segments end at fixed positions, so chunks of a segment give the same result as the whole.
    """

    supports_mask: bool = True

    @abstractmethod
    def initial_state(self, layer: Layer) -> State:
        """Memory before the first token."""

    @abstractmethod
    def step(
        self, layer: Layer, x: Tensor, inputs: LayerInputs, state: State, start: int
    ) -> tuple[Tensor, State]:
        """Run the layer on the next chunk of a segment, x (b, n, d) from position `start` on."""

    @abstractmethod
    def end_segment(self, layer: Layer, state: State, segment_length: int) -> State:
        """Memory after the end of a segment."""


class HiddenStateMemory(SegmentMemory):
    """The last `size` hidden states that the layer read before the segment: Transformer-XL.

    States are detached. Norms, keys and values are recomputed with the current weights, so that
    these get gradients through the memory; earlier segments do not.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        check_int(0, memory=size)
        self.size = size

    def initial_state(self, layer: Layer) -> None:
        """Empty."""

    def step(
        self, layer: Layer, x: Tensor, inputs: LayerInputs, state: HiddenStates | None, start: int
    ) -> tuple[Tensor, HiddenStates]:
        """See `SegmentMemory`."""
        y = require_memory_attention(layer, "SegmentStack").run(x, state, inputs, start)
        return y, HiddenStates(x, inputs.mask).append_to(state)

    def end_segment(self, layer: Layer, state: HiddenStates, segment_length: int) -> HiddenStates:
        """The last `size` states, detached."""
        return state.last(self.size).detach()

    def extra_repr(self) -> str:
        """Shown by print."""
        return str(self.size)


class RecurrentStateMemory(SegmentMemory):
    """Streaming state of the layer, detached at the end of a segment: truncated backpropagation."""

    supports_mask = False

    def initial_state(self, layer: Layer) -> State:
        """State of the layer before the first chunk."""
        return layer.initial_state()

    def step(
        self, layer: Layer, x: Tensor, inputs: LayerInputs, state: State, start: int
    ) -> tuple[Tensor, State]:
        """See `SegmentMemory`."""
        return run_layer(layer, x, inputs, state)

    def end_segment(self, layer: Layer, state: State, segment_length: int) -> State:
        """The same state, detached."""
        return detach(state)


class SegmentStack(Layer):
    """Processes a sequence in segments; layer l of segment τ attends to hidden states of earlier
    segments (Dai et al. 2019, arXiv 1901.02860):

        h̃ = [stop_gradient(h^{l-1} of the last `memory` tokens before τ) ; h_τ^{l-1}],
        q of h_τ, k and v of h̃

    A token at position t sees positions s − memory to t, where s is the start of its segment; L
    layers see about L times as far. Positions are absolute and continue over segments, so use a
    relative positional encoding.

    Blocks with KV-cache attention store hidden states. Any other layer that streams (linear
    attention, recurrences) stores its own state, detached at the end of a segment and not limited
    by `memory`.

    Args:
        segment_length: Tokens per segment.
        memory: Number of hidden states that a layer stores, or a factory (width ->
            `SegmentMemory`).
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        segment_length: int,
        memory: int | Callable[[int], SegmentMemory] | None = None,
    ) -> None:
        can, _, length = combine_capabilities(layers)
        check_int(1, segment_length=segment_length)
        check_causal(layers, "SegmentStack")
        attending = [layer for layer in layers if find_memory_attention(layer) is not None]
        if attending and memory is None:
            raise ValueError(f"{layer_name(attending[0])} needs a memory: set it, as in memory=128")
        if not attending and memory is not None:
            raise ValueError(
                f"no layer stores hidden states ({layer_name(layers[0])} carries a recurrent "
                "state): leave memory out"
            )
        memories = [_build_memory(layer, memory) for layer in layers]
        unsupported = can.unsupported | {"global_attention_mask": NO_GLOBAL_MASK}
        if not all(m.supports_mask for m in memories):
            unsupported["mask"] = NO_MASK
        can = Can("global_attention_mask", **unsupported)
        super().__init__(layers[0].dim, can=can, causal=True, length=length)
        self.segment_length = segment_length
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.memories: Sequence[SegmentMemory] = nn.ModuleList(memories)  # type: ignore[assignment]

    def initial_state(self) -> SegmentState:
        """Memory of all layers before the first token."""
        layers = zip(self.memories, self.layers, strict=True)
        return SegmentState(tuple(memory.initial_state(layer) for memory, layer in layers), 0)

    def run(
        self, x: Tensor, inputs: LayerInputs, state: SegmentState | None
    ) -> tuple[Tensor, SegmentState | None]:
        """See `Layer`. A whole sequence is all its segments, the first with an empty memory."""
        current = self.initial_state() if state is None else state
        if state is not None:
            x = x.clone()  # the first layer's memory must not be a view of the caller's tokens
        outputs = [x[:, :0]]
        for chunk, mask in self._split(x, inputs.mask, current.position):
            y, current = self._step(chunk, inputs._replace(mask=mask), current)
            outputs.append(y)
        return torch.cat(outputs, 1), None if state is None else current

    def _split(
        self, x: Tensor, mask: Tensor | None, start: int
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Split x, from position `start` on, at the ends of segments."""
        first, n = 0, x.shape[1]
        while first < n:
            last = min(n, first + self.segment_length - (start + first) % self.segment_length)
            yield x[:, first:last], None if mask is None else mask[:, first:last]
            first = last

    def _step(
        self, x: Tensor, inputs: LayerInputs, current: SegmentState
    ) -> tuple[Tensor, SegmentState]:
        """Run all layers on a chunk of one segment."""
        start, end = current.position, current.position + x.shape[1]
        states = []
        for layer, memory, state in zip(self.layers, self.memories, current.layers, strict=True):
            x, state = memory.step(layer, x, inputs, state, start)
            if end % self.segment_length == 0:
                state = memory.end_segment(layer, state, self.segment_length)
            states.append(state)
        return x, SegmentState(tuple(states), end)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"segment_length={self.segment_length}"


def _build_memory(
    layer: Layer, memory: int | Callable[[int], SegmentMemory] | None
) -> SegmentMemory:
    """Memory of a layer: hidden states if it can attend to them, else its streaming state."""
    if find_memory_attention(layer) is not None and memory is not None:
        return memory(layer.dim) if callable(memory) else HiddenStateMemory(memory)
    if not layer.can.stream:
        raise Unsupported(
            f"{layer_name(layer)} can neither attend to a memory nor stream: "
            f"{layer.can.reason('stream')}"
        )
    return RecurrentStateMemory()
