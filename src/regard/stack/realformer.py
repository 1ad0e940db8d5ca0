"""RealFormer: attention scores are passed on from layer to layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from regard.block import Block, Layer, LayerInputs
from regard.errors import Unsupported
from regard.mixer import State
from regard.mixers import RealFormer
from regard.stack.sequential import combine_capabilities


class RealFormerStack(Layer):
    """S_l = Q Kᵀ / √e + S_{l−1} from block to block (He et al. 2021, arXiv 2012.11747).

    Scores are summed before the softmax and not detached: the last layer has gradients for the keys
    of the first. Streaming needs no state beyond the KV caches.

    Args:
        blocks: Blocks with `RealFormer` mixers, all with the same number of heads and all causal or
            none. Scores of cross-attention are not passed on.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        can, causal, length = combine_capabilities(blocks)
        super().__init__(blocks[0].dim, can=can, causal=causal, length=length)
        kinds = set()
        for block in blocks:
            mixer = block.mixer
            if not isinstance(mixer, RealFormer):
                raise Unsupported(
                    f"{mixer.name} cannot pass on attention scores: use the mixer 'realformer'"
                )
            kinds.add((mixer.heads.heads, mixer.causal))
        if len(kinds) > 1:
            raise ValueError(
                "passing on scores needs the same number of heads in all layers, "
                "and all of them causal or none"
            )
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """KV caches of all blocks before the first chunk."""
        return tuple(block.initial_state() for block in self.blocks)

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        scores: Tensor | None = None
        states = []
        for i, block in enumerate(self.blocks):
            assert isinstance(block.mixer, RealFormer)
            y, scores, block_state = block.mixer.chain(
                block.mixer_residual.prepare(x, inputs.mask),
                scores,
                mask=inputs.mask,
                state=None if state is None else state[i],
            )
            x = block.finish(x, y, inputs)
            states.append(block_state)
        return x, None if state is None else tuple(states)
