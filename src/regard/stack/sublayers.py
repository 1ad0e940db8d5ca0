"""Sub-layers without a residual, for reversible stacks, which add residuals themselves."""

from __future__ import annotations

from torch import Tensor, nn

from regard.block import (
    NO_ATTENTION_MAP,
    NO_CROSS_ATTENTION,
    Layer,
    LayerInputs,
    check_cross_attention,
    run_mixer,
)
from regard.ffn import FeedForward
from regard.mixer import Can, Mixer, State
from regard.norm import LayerNorm
from regard.residual import NormFactory


class MixerSublayer(Layer):
    """dropout(mixer(norm(x)))."""

    runs_joined_states = True

    def __init__(
        self, mixer: Mixer, *, norm: NormFactory = LayerNorm, dropout: float = 0.0
    ) -> None:
        unsupported = mixer.can.unsupported | {
            "cross": NO_CROSS_ATTENTION,
            "maps": NO_ATTENTION_MAP,
        }
        can = Can("global_attention_mask", **unsupported)
        super().__init__(mixer.dim, can=can, causal=mixer.causal, length=mixer.length)
        self.norm, self.mixer, self.dropout = norm(self.dim), mixer, nn.Dropout(dropout)

    def initial_state(self) -> State:
        """State of the mixer."""
        return self.mixer.initial_state()

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        y, state = run_mixer(self.mixer, self.norm(x, inputs.mask), inputs, state)
        return self.dropout(y), state


class CrossAttentionSublayer(Layer):
    """dropout(mixer(norm(x), context)). Causal if the mixer has the capability
    `independent_queries`."""

    def __init__(
        self, mixer: Mixer, *, norm: NormFactory = LayerNorm, dropout: float = 0.0
    ) -> None:
        check_cross_attention(mixer, causal=False)
        can = Can("global_attention_mask", maps=NO_ATTENTION_MAP)
        super().__init__(mixer.dim, can=can, causal=mixer.can.independent_queries)
        self.norm, self.mixer, self.dropout = norm(self.dim), mixer, nn.Dropout(dropout)

    def initial_state(self) -> State:
        """Empty: each chunk comes with the context."""
        return ()

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        y = self.norm(x, inputs.mask)
        y = self.mixer(y, inputs.context, mask=inputs.context_mask, query_mask=inputs.mask)
        return self.dropout(y), state


class FeedForwardSublayer(Layer):
    """dropout(ffn(norm(x)))."""

    def __init__(
        self, ffn: FeedForward, *, norm: NormFactory = LayerNorm, dropout: float = 0.0
    ) -> None:
        can = Can("global_attention_mask", cross=NO_CROSS_ATTENTION, maps=NO_ATTENTION_MAP)
        super().__init__(ffn.dim, can=can, causal=True)
        self.norm, self.ffn, self.dropout = norm(self.dim), ffn, nn.Dropout(dropout)

    def initial_state(self) -> State:
        """Empty: tokens are independent."""
        return ()

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        return self.dropout(self.ffn(self.norm(x, inputs.mask), inputs.mask)), state


def build_sublayers(
    mixer: Mixer,
    ffn: FeedForward | None = None,
    *,
    cross: Mixer | None = None,
    norm: NormFactory = LayerNorm,
    dropout: float = 0.0,
) -> list[Layer]:
    """Sub-layers of a block: mixer, cross-attention, feed-forward."""
    sublayers: list[Layer] = [MixerSublayer(mixer, norm=norm, dropout=dropout)]
    if cross is not None:
        check_cross_attention(cross, causal=mixer.causal)
        sublayers.append(CrossAttentionSublayer(cross, norm=norm, dropout=dropout))
    if ffn is not None:
        sublayers.append(FeedForwardSublayer(ffn, norm=norm, dropout=dropout))
    return sublayers
