"""RealFormer's stack: the scores of each layer go on to the next."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from regard.block import Block, Layer, LayerInputs
from regard.errors import Unsupported
from regard.mixer import State
from regard.mixers import RealFormer
from regard.stack.sequential import combine_capabilities


class RealFormerStack(Layer):
    """S_l = Q Kᵀ / √e + S_{l−1} from block to block (He et al. 2021, arXiv 2012.11747); else as a plain stack.

    blocks  whose mixers are `RealFormer`, all with as many heads, and all causal or none; any residual, ffn and cross.
            Only the scores among the tokens are carried, not those with the context

    Scores are summed before the softmax and are not detached: the last layer has gradients for the keys of the first.  A
    stream needs no more than the caches, since the scores of a chunk go up through the layers within the call.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        can, causal, length = combine_capabilities(blocks)
        super().__init__(blocks[0].dim, can=can, causal=causal, length=length)
        mixers = [block.mixer for block in blocks]
        for mixer in mixers:
            if not isinstance(mixer, RealFormer):
                raise Unsupported(f"{mixer.name} hands on no scores: the mixers must be RealFormer")
        if (
            len(
                {
                    (mixer.heads.heads, mixer.causal)
                    for mixer in mixers
                    if isinstance(mixer, RealFormer)
                }
            )
            > 1
        ):
            raise ValueError(
                "scores fit only among layers with as many heads, all of them causal or none"
            )
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """The caches of all blocks before the first chunk."""
        return tuple(block.initial_state() for block in self.blocks)

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        scores: Tensor | None = None
        after = []
        for i, block in enumerate(self.blocks):
            assert isinstance(block.mixer, RealFormer)
            before = block.mixer_residual.before(x, given.mask)
            mine = None if state is None else state[i]
            y, scores, mine = block.mixer.chain(before, scores, mask=given.mask, state=mine)
            x = block.join(x, y, given)
            after.append(mine)
        return x, None if state is None else tuple(after)
