"""Funnel Transformer: groups of layers at decreasing length, then back to the full length."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from regard.block import Block, Layer, LayerInputs
from regard.errors import Unsupported, check_int
from regard.mixer import Can
from regard.mixers.funnel import POOLS_FUTURE_TOKENS, pool_tokens, upsample_tokens
from regard.stack.memory_attention import layer_name
from regard.stack.sequential import combine_capabilities, run_layers

NO_GLOBAL_MASK = "tokens are pooled, but the global_attention_mask is per token"


class FunnelStack(Layer):
    """Funnel Transformer (Dai et al. 2020, arXiv 2006.03236).

    Between groups, the sequence is pooled to means of `stride` consecutive tokens, and the first
    layer of the shorter group attends to the longer sequence:

        x -> group 1 = h -> pool -> group 2 -> pool -> ... -> group G = s
        y = decoder(h + up(s))

    where `up` repeats each state of s for every token it stands for. `encode` returns s, for models
    that need one vector per sequence.

    Args:
        groups: Groups of layers. With `pool_q_only`, the first layer of every group but the first
            must be a block whose mixer supports cross-attention.
        decoder: Layers at full length after the sum; may be empty.
        separate_cls: Keep the first token apart when pooling.
        pool_q_only: Pool only the queries of the first layer of a group. False: pool its keys and
            values too, so that any layer can be used.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Layer]],
        decoder: Sequence[Layer] = (),
        *,
        stride: int = 2,
        separate_cls: bool = False,
        pool_q_only: bool = True,
    ) -> None:
        check_int(1, stride=stride)
        if len(groups) < 2 or not all(groups):
            raise ValueError(
                "a funnel needs at least two non-empty groups, "
                f"not sizes {[len(g) for g in groups]}"
            )
        can, _, length = combine_capabilities([layer for g in (*groups, decoder) for layer in g])
        unsupported = can.unsupported | {
            "causal": POOLS_FUTURE_TOKENS,
            "stream": POOLS_FUTURE_TOKENS,
            "global_attention_mask": NO_GLOBAL_MASK,
        }
        can = Can("global_attention_mask", **unsupported)
        super().__init__(groups[0][0].dim, can=can, causal=False, length=length)
        if pool_q_only:
            for group in groups[1:]:
                _require_cross_attention(group[0])
        self.stride, self.separate_cls, self.pool_q_only = stride, separate_cls, pool_q_only
        self.groups: Sequence[Sequence[Layer]] = nn.ModuleList(map(nn.ModuleList, groups))  # type: ignore[assignment]
        self.decoder: Sequence[Layer] = nn.ModuleList(decoder)  # type: ignore[assignment]

    def run(self, x: Tensor, inputs: LayerInputs, state: None) -> tuple[Tensor, None]:
        """See `Layer`."""
        if not x.shape[1]:
            return x, None
        first, _ = run_layers(self.groups[0], x, inputs, None)
        short, _ = self._run_shorter_groups(first, inputs)
        factor = self.stride ** (len(self.groups) - 1)
        x = first + upsample_tokens(short, x.shape[1], factor, cls=self.separate_cls)
        return run_layers(self.decoder, x, inputs, None)

    def encode(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens after the last group, (b, p, d), and their mask (b, p), None: all are real."""
        inputs = LayerInputs(mask, context, context_mask)
        x, _ = run_layers(self.groups[0], self.validate_inputs(x, inputs), inputs, None)
        return self._run_shorter_groups(x, inputs)

    def _run_shorter_groups(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        for group in self.groups[1:]:
            short, short_mask = pool_tokens(x, inputs.mask, self.stride, cls=self.separate_cls)
            short_inputs = inputs._replace(mask=short_mask)
            if self.pool_q_only:
                block = _require_cross_attention(group[0])
                prepare = block.mixer_residual.prepare
                q, kv = prepare(short, short_mask), prepare(x, inputs.mask)
                y = block.mixer(q, kv, mask=inputs.mask, query_mask=short_mask)
                short = block.finish(short, y, short_inputs)
                group = group[1:]
            x, _ = run_layers(group, short, short_inputs, None)
            inputs = short_inputs
        return x, inputs.mask

    def extra_repr(self) -> str:
        """Shown by print."""
        return (
            f"stride={self.stride}, separate_cls={self.separate_cls}, "
            f"pool_q_only={self.pool_q_only}"
        )


def _require_cross_attention(layer: Layer) -> Block:
    """A block whose mixer supports cross-attention; raises for any other layer."""
    hint = "use it elsewhere, or set pool_q_only=False"
    if not isinstance(layer, Block):
        raise Unsupported(
            f"the first layer of a group attends to the longer sequence and must be a Block, "
            f"not {layer_name(layer)}: {hint}"
        )
    mixer = layer.mixer
    if mixer.causal or not mixer.can.cross:
        reason = "it was built causal" if mixer.causal else mixer.can.reason("cross")
        raise Unsupported(f"{mixer.name} cannot attend to the longer sequence: {reason}; {hint}")
    return layer
