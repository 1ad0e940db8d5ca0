"""Luna: the packed sequence is passed on from layer to layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from regard.block import Block, Layer, LayerInputs, run_layer
from regard.mixer import State
from regard.mixers import Luna
from regard.residual import PreNorm, Residual
from regard.stack.sequential import combine_capabilities


class LunaStack(Layer):
    """Y_X, Y_P = Luna(X, P) from block to block (Ma et al. 2021, arXiv 2106.01540): the packed
    sequence of a layer, with a residual of its own, is P of the next Luna layer.

    Only the first Luna layer keeps its learned P; the stack removes those of the others. Blocks
    with other mixers run between them as in `SequentialStack`.

    Args:
        blocks: Blocks, at least one of them with a `Luna` mixer.
        residual: Builds the residual of the packed sequence from the width.
    """

    def __init__(
        self, blocks: Sequence[Block], *, residual: Callable[[int], Residual] = PreNorm
    ) -> None:
        can, causal, length = combine_capabilities(blocks)
        super().__init__(blocks[0].dim, can=can, causal=causal, length=length)
        packing = [block.mixer for block in blocks if isinstance(block.mixer, Luna)]
        if not packing:
            raise ValueError(
                "no layer has a packed sequence to pass on: use the mixer 'luna', not causal"
            )
        for mixer in packing[1:]:
            mixer.p = None
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]
        # The last packed sequence is not used, so only the norm before the last layer is needed.
        residuals = [residual(self.dim) for _ in packing]
        if not residuals[-1].needs_final_norm:
            residuals.pop()
        self.packed_residuals: Sequence[Residual] = nn.ModuleList(residuals)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """States of all blocks before the first chunk."""
        return tuple(block.initial_state() for block in self.blocks)

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        packed: Tensor | None = None
        residuals = iter(self.packed_residuals)
        for block in self.blocks:
            if not isinstance(block.mixer, Luna):
                x, _ = run_layer(block, x, inputs, None)
                continue
            if packed is None:
                assert block.mixer.p is not None
                packed = block.mixer.p.expand(x.shape[0], -1, -1)
            residual = next(residuals, None)
            query = packed if residual is None else residual.prepare(packed)
            y, update = block.mixer.update(
                block.mixer_residual.prepare(x, inputs.mask), query, mask=inputs.mask
            )
            if residual is not None:
                packed = residual.add(packed, block.dropout(update))
            x = block.finish(x, y, inputs)
        return x, state
