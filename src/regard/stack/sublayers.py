"""Sub-layers without a residual, as layers: what a reversible stack adds up itself."""

from __future__ import annotations

from torch import Tensor, nn

from regard.block import NO_CONTEXT, NO_MAP, Layer, LayerInputs, check_cross_attention, run_mixer
from regard.ffn import FeedForward
from regard.mixer import Can, Mixer, State
from regard.norm import LayerNorm
from regard.residual import NormFactory


class MixerSublayer(Layer):
    """dropout(mixer(norm(x)))."""

    def __init__(
        self, mixer: Mixer, *, norm: NormFactory = LayerNorm, dropout: float = 0.0
    ) -> None:
        can = Can(
            supports_global_mask=True,
            **mixer.can.unsupported | {"cross": NO_CONTEXT, "maps": NO_MAP},
        )
        super().__init__(mixer.dim, can=can, causal=mixer.causal, length=mixer.length)
        self.norm, self.mixer, self.dropout = norm(self.dim), mixer, nn.Dropout(dropout)

    def initial_state(self) -> State:
        """The state of the mixer."""
        return self.mixer.initial_state()

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        y, state = run_mixer(self.mixer, self.norm(x, given.mask), given, state)
        return self.dropout(y), state


class CrossAttentionSublayer(Layer):
    """dropout(mixer(norm(x), context))."""

    def __init__(
        self, mixer: Mixer, *, norm: NormFactory = LayerNorm, dropout: float = 0.0
    ) -> None:
        check_cross_attention(mixer)
        super().__init__(mixer.dim, can=Can(supports_global_mask=True, maps=NO_MAP), causal=True)
        self.norm, self.mixer, self.dropout = norm(self.dim), mixer, nn.Dropout(dropout)

    def initial_state(self) -> State:
        """None is kept: the context is given with each chunk."""
        return ()

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        y = self.mixer(self.norm(x, given.mask), given.context, mask=given.context_mask)
        return self.dropout(y), state


class FeedForwardSublayer(Layer):
    """dropout(ffn(norm(x)))."""

    def __init__(
        self, ffn: FeedForward, *, norm: NormFactory = LayerNorm, dropout: float = 0.0
    ) -> None:
        super().__init__(
            ffn.dim, can=Can(supports_global_mask=True, cross=NO_CONTEXT, maps=NO_MAP), causal=True
        )
        self.norm, self.ffn, self.dropout = norm(self.dim), ffn, nn.Dropout(dropout)

    def initial_state(self) -> State:
        """None is kept: each token is by itself."""
        return ()

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        return self.dropout(self.ffn(self.norm(x, given.mask), given.mask)), state


def build_sublayers(
    mixer: Mixer,
    ffn: FeedForward | None = None,
    *,
    cross: Mixer | None = None,
    norm: NormFactory = LayerNorm,
    dropout: float = 0.0,
) -> list[Layer]:
    """The sub-layers of what would be one block: mix, look at the context, feed forward."""
    found: list[Layer] = [MixerSublayer(mixer, norm=norm, dropout=dropout)]
    if cross is not None:
        found.append(CrossAttentionSublayer(cross, norm=norm, dropout=dropout))
    if ffn is not None:
        found.append(FeedForwardSublayer(ffn, norm=norm, dropout=dropout))
    return found
