"""Layers map tokens (b, n, d) to tokens (b, n, d); a block mixes tokens, then feeds them forward.

Layers nest: a stack is a layer made of layers. All of them train, stream and take masks alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from regard.backends import check_mask
from regard.errors import Unsupported
from regard.ffn import FeedForward
from regard.mixer import Can, Mixer, State, check_dtype, check_tokens
from regard.numerics import zero_padding_tokens
from regard.residual import PreNorm, Residual
from regard.state import JoinedState, check_state, run_by_group, start_groups

NO_CROSS_ATTENTION = "it has no cross-attention"
NO_PAIR_MASK = "a layer passes padding masks on; give a pair mask to its mixer"
MIXES_TOKENS = "a layer mixes its tokens before they read the context"
NO_ATTENTION_MAP = "a layer is not linear in its values; its mixers may have attention maps"


class LayerInputs(NamedTuple):
    """Inputs of a call that all layers share, next to the tokens (b, n, d).

    Attributes:
        mask: (b, n), True = keep.
        context: (b, m, d), the sequence that cross-attention reads; `context_mask` is (b, m).
        global_attention_mask: (b, n), True = token with global attention.
    """

    mask: Tensor | None = None
    context: Tensor | None = None
    context_mask: Tensor | None = None
    global_attention_mask: Tensor | None = None


class Layer(nn.Module, ABC):
    """Base class for blocks and stacks: maps tokens (b, n, d) to tokens (b, n, d).

    Subclasses implement `run`, for whole sequences and for streams. `forward` and `stream` validate
    their inputs and zero the padding; nested layers call each other's `run` directly.

    Args:
        dim: Width d of a token. `out_dim`, the width of the output, is the same for most layers.
        can: Capabilities. With "cross", calls must give a context.
        causal: Whether token i depends only on tokens <= i.
        length: Maximum sequence length, or None for any length.

    Attributes:
        runs_joined_states: Whether `run` takes a `regard.state.JoinedState`, because it passes its
            state on. Otherwise it is called once for each group of examples.
    """

    runs_joined_states: bool = False

    def __init__(self, dim: int, *, can: Can, causal: bool, length: int | None = None) -> None:
        super().__init__()
        self.dim, self.out_dim = dim, dim
        self.can = can.without(attn_mask=NO_PAIR_MASK, independent_queries=MIXES_TOKENS)
        self.causal, self.length = causal, length

    @abstractmethod
    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """Map validated tokens x (b, n, d) to (b, n, d), and return the next state.

        `state` is None for a whole sequence, and then the next state is None too.
        """

    def initial_state(self) -> State:
        """State before the first chunk."""
        raise Unsupported(f"{type(self).__name__} does not support streaming")

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Process a whole sequence x (b, n, d). See `LayerInputs` for the other arguments."""
        inputs = LayerInputs(mask, context, context_mask, global_attention_mask)
        return self.run(self.validate_inputs(x, inputs), inputs, None)[0]

    def stream(
        self,
        x: Tensor,
        state: State = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Process the next chunk of a causal sequence, of any length.

        Returns the output (b, n, d) and the state for the next chunk.
        """
        if not self.can.stream:
            raise Unsupported(
                f"{type(self).__name__} does not support streaming: {self.can.reason('stream')}"
            )
        if not self.causal:
            raise Unsupported(
                f"{type(self).__name__} was not built with causal=True, which streaming needs"
            )
        inputs = LayerInputs(None, context, context_mask)
        x = self.validate_inputs(x, inputs)
        first = self.initial_state()
        state = first if state is None else state
        check_state(state, first, x.shape[0])
        if isinstance(state, JoinedState):
            state = start_groups(state, first)
        return run_layer(self, x, inputs, state)

    def validate_inputs(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Check the inputs' shapes and the capabilities; return x (b, n, d) with zeroed padding."""
        name = type(self).__name__
        check_tokens(x, self.dim)
        check_dtype(x, self, "layer")
        for capability, value, argument in (
            ("mask", inputs.mask, "mask"),
            ("global_attention_mask", inputs.global_attention_mask, "global_attention_mask"),
            ("cross", inputs.context, "context"),
        ):
            reason = self.can.reason(capability)
            if value is not None and reason is not None:
                raise Unsupported(f"{name} does not support {argument}: {reason}")
        if inputs.context is None and self.can.cross:
            raise ValueError(f"{name} has cross-attention: give a context (b, m, d)")
        if inputs.context is None and inputs.context_mask is not None:
            raise ValueError("context_mask without a context")
        check_mask(inputs.mask, (x.shape[0], x.shape[1]), "mask")
        check_mask(inputs.global_attention_mask, (x.shape[0], x.shape[1]), "global_attention_mask")
        return zero_padding_tokens(x, inputs.mask)


class Block(Layer):
    """Transformer block: mixer, optional cross-attention and feed-forward, each with a residual.

    Args:
        mixer: Any mixer.
        ffn: Feed-forward layer. None: no feed-forward sub-layer.
        cross: Mixer for cross-attention; with a causal mixer it must have the capability
            `independent_queries`. None: no cross-attention.
        residual: Builds the residual of each sub-layer from the width.
        dropout: Dropout of the output of each sub-layer.
    """

    runs_joined_states = True

    def __init__(
        self,
        mixer: Mixer,
        ffn: FeedForward | None = None,
        *,
        cross: Mixer | None = None,
        residual: Callable[[int], Residual] = PreNorm,
        dropout: float = 0.0,
    ) -> None:
        unsupported = mixer.can.unsupported | {
            "cross": NO_CROSS_ATTENTION,
            "maps": NO_ATTENTION_MAP,
        }
        if cross is not None:
            del unsupported["cross"]
        can = Can("global_attention_mask", **unsupported)
        super().__init__(mixer.dim, can=can, causal=mixer.causal, length=mixer.length)
        for part, name in ((ffn, "ffn"), (cross, "cross")):
            if part is not None and part.dim != mixer.dim:
                raise ValueError(f"{name} has dim {part.dim} but the mixer has dim {mixer.dim}")
        if cross is not None:
            check_cross_attention(cross, causal=mixer.causal)
        self.mixer, self.cross, self.ffn = mixer, cross, ffn
        self.mixer_residual = residual(self.dim)
        self.cross_residual = None if cross is None else residual(self.dim)
        self.ffn_residual = None if ffn is None else residual(self.dim)
        self.dropout = nn.Dropout(dropout)

    def initial_state(self) -> State:
        """State of the mixer before the first chunk."""
        return self.mixer.initial_state()

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        y = self.mixer_residual.prepare(x, inputs.mask)
        y, state = run_mixer(self.mixer, y, inputs, state)
        return self.finish(x, y, inputs), state

    def finish(self, x: Tensor, mixed: Tensor, inputs: LayerInputs) -> Tensor:
        """Run the rest of the block on its input x and the mixer's output `mixed`, both (b, n, d).

        Stacks that replace the mixer's call by their own use this.
        """
        x = self.mixer_residual.add(x, self.dropout(mixed), inputs.mask)
        if self.cross is not None and self.cross_residual is not None:
            y = self.cross_residual.prepare(x, inputs.mask)
            y = self.cross(y, inputs.context, mask=inputs.context_mask, query_mask=inputs.mask)
            x = self.cross_residual.add(x, self.dropout(y), inputs.mask)
        if self.ffn is not None and self.ffn_residual is not None:
            y = self.ffn(self.ffn_residual.prepare(x, inputs.mask), inputs.mask)
            x = self.ffn_residual.add(x, self.dropout(y), inputs.mask)
        return x


def check_cross_attention(mixer: Mixer, *, causal: bool) -> None:
    """Check that a mixer can attend to another sequence, from a causal one if so."""
    if mixer.causal:
        raise Unsupported(f"{mixer.name} was built causal and cannot do cross-attention")
    mixer._require("cross")
    if causal:  # the context is no leak, but the queries are tokens of the causal sequence
        mixer._require("independent_queries")


def run_layer(layer: Layer, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
    """Run a layer on a whole sequence or with a state; with a `JoinedState` that the layer does not
    take, once for each group of examples."""
    if not isinstance(state, JoinedState) or layer.runs_joined_states:
        return layer.run(x, inputs, state)
    # Contexts of a `PerLayerContextStack` have the batch as second dimension.
    per_layer = inputs.context is not None and inputs.context.dim() == 4

    def run(group: State, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, State]:
        selected = LayerInputs(*tensors)
        if per_layer and selected.context is not None:
            selected = selected._replace(context=selected.context.transpose(0, 1))
        return layer.run(x, selected, group)

    if per_layer and inputs.context is not None:
        inputs = inputs._replace(context=inputs.context.transpose(0, 1))
    return run_by_group(run, state, x, *inputs)


def run_mixer(mixer: Mixer, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
    """Run a mixer on a whole sequence, or with a state on the next chunk."""
    if state is not None:
        return mixer.stream(x, state)
    mask, global_attention_mask = inputs.mask, inputs.global_attention_mask
    return mixer(x, mask=mask, global_attention_mask=global_attention_mask), None
