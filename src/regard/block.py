"""A layer maps tokens (b n d) to tokens (b n d) and may look at another sequence; a block is mixing, then feeding forward.

Layers nest: a stack is a layer made of layers, and all of them train, stream and take masks in the same way.
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
from regard.state import check_state

NO_CONTEXT = "no layer of it looks at another sequence"
NO_MAP = "a layer is not linear in its values; its mixers may have maps"


class LayerInputs(NamedTuple):
    """What stands beside the tokens of a call, the same for all layers.

    mask           (b n), True = a real token
    context        (b m d), another sequence to look at; `context_mask` (b m)
    marks          (b n), True = a marked token
    """

    mask: Tensor | None = None
    context: Tensor | None = None
    context_mask: Tensor | None = None
    global_attention_mask: Tensor | None = None


class Layer(nn.Module, ABC):
    """(b n d) -> (b n d), with a state where it streams.  A subclass writes `run`, once.

    What `run` is given was checked by whoever was called from outside: there, left-out tokens were set to zero.

    dim     the width d of a token; `wide`, that of what comes out, where a stack ends wider
    can     what it promises; `cross`: it looks at another sequence, and then must be given one
    causal  no token depends on later ones
    length  the longest sequence, None: any
    """

    def __init__(self, dim: int, *, can: Can, causal: bool, length: int | None = None) -> None:
        super().__init__()
        self.dim, self.wide, self.can, self.causal, self.length = dim, dim, can, causal, length

    @abstractmethod
    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """x (b n d) -> (b n d) and the next state; `state` is None for a whole sequence."""

    def initial_state(self) -> State:
        """The state before the first chunk."""
        raise Unsupported(f"{type(self).__name__} cannot run chunk by chunk")

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The whole sequence: x (b n d), context (b m d) for layers that look at another sequence; see `Given`."""
        given = LayerInputs(mask, context, context_mask, global_attention_mask)
        return self.run(self.checked(x, given), given, None)[0]

    def stream(
        self,
        x: Tensor,
        state: State = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """The next chunk of a causal sequence, of any length: (b n d) -> (b n d) and the state for the chunk after it."""
        if not self.can.stream:
            raise Unsupported(f"it cannot run chunk by chunk: {self.can.reason('stream')}")
        if not self.causal:
            raise Unsupported(
                "a layer of it was not built causal, so the first chunk would depend on the last"
            )
        given = LayerInputs(None, context, context_mask)
        x = self.checked(x, given)
        first = self.initial_state()
        state = first if state is None else state
        check_state(state, first, x.shape[0])
        return self.run(x, given, state)

    def checked(self, x: Tensor, given: LayerInputs) -> Tensor:
        """Refuse what is not promised, say what is malformed, and blank what is left out: x (b n d)."""
        check_tokens(x, self.dim)
        check_dtype(x, self, "layer")
        for promise, what, name in (
            ("mask", given.mask, "mask"),
            ("global_attention_mask", given.global_attention_mask, "global_attention_mask"),
            ("cross", given.context, "context"),
        ):
            if what is not None and self.can.reason(promise) is not None:
                raise Unsupported(
                    f"{type(self).__name__} takes no {name}: {self.can.reason(promise)}"
                )
        if given.context is None and self.can.cross:
            raise ValueError("a layer of it looks at another sequence: give it as context, (b m d)")
        if given.context is None and given.context_mask is not None:
            raise ValueError("context_mask without a context")
        check_mask(given.mask, (x.shape[0], x.shape[1]), "mask")
        check_mask(given.global_attention_mask, (x.shape[0], x.shape[1]), "global_attention_mask")
        return zero_padding_tokens(x, given.mask)


class Block(Layer):
    """Mix the tokens, look at the context, feed forward: each a sub-layer with its own residual.

    mixer     any mixer
    ffn       None: there is no feed-forward sub-layer
    cross     a mixer that asks the context; None: the block looks at no other sequence
    residual  makes what stands around a sub-layer, from the width
    dropout   of what each sub-layer adds
    """

    def __init__(
        self,
        mixer: Mixer,
        ffn: FeedForward | None = None,
        *,
        cross: Mixer | None = None,
        residual: Callable[[int], Residual] = PreNorm,
        dropout: float = 0.0,
    ) -> None:
        unsupported = mixer.can.unsupported | {"cross": NO_CONTEXT, "maps": NO_MAP}
        if cross is not None:
            del unsupported["cross"]
        super().__init__(
            mixer.dim,
            can=Can(supports_global_mask=True, **unsupported),
            causal=mixer.causal,
            length=mixer.length,
        )
        for part, name in ((ffn, "ffn"), (cross, "cross")):
            if part is not None and part.dim != mixer.dim:
                raise ValueError(f"{name} is {part.dim} wide, and the mixer {mixer.dim}")
        if cross is not None:
            check_cross_attention(cross)
        self.mixer, self.cross, self.ffn = mixer, cross, ffn
        self.mixer_residual = residual(self.dim)
        self.cross_residual = None if cross is None else residual(self.dim)
        self.ffn_residual = None if ffn is None else residual(self.dim)
        self.dropout = nn.Dropout(dropout)

    def initial_state(self) -> State:
        """The state of the mixer before the first chunk."""
        return self.mixer.initial_state()

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        y, state = run_mixer(self.mixer, self.mixer_residual.before(x, given.mask), given, state)
        return self.join(x, y, given), state

    def join(self, x: Tensor, y: Tensor, given: LayerInputs) -> Tensor:
        """What the block makes of the stream x (b n d) once its mixer has made y (b n d) of what stands before it."""
        x = self.mixer_residual.after(x, self.dropout(y), given.mask)
        if self.cross is not None and self.cross_residual is not None:
            y = self.cross(
                self.cross_residual.before(x, given.mask), given.context, mask=given.context_mask
            )
            x = self.cross_residual.after(x, self.dropout(y), given.mask)
        if self.ffn is not None and self.ffn_residual is not None:
            y = self.ffn(self.ffn_residual.before(x, given.mask), given.mask)
            x = self.ffn_residual.after(x, self.dropout(y), given.mask)
        return x


def check_cross_attention(cross: Mixer) -> None:
    """The mixer must be able to ask another sequence."""
    if cross.causal or not cross.can.cross:
        why = "it was built causal" if cross.causal else cross.can.reason("cross")
        raise Unsupported(f"{cross.name} cannot look at the context: {why}")


def run_mixer(mixer: Mixer, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
    """What a mixer makes of the whole sequence, or of the next chunk where there is a state."""
    if state is not None:
        return mixer.stream(x, state)
    return mixer(x, mask=given.mask, global_attention_mask=given.global_attention_mask), None
