"""Naive loops, one for each recipe, written from the papers.  Nothing here may import the library that they check.

Each is called as

    oracle(p, x, heads=..., causal=..., memory=None, mask=None, marks=None, **arguments) -> (b n d)

with p the parameters by name, as plain tensors, and the arguments that the recipe was given.  Left-out tokens (mask False)
are skipped as keys; what stands in their own rows of the output means nothing.
"""

from oracles.compressed import linformer
from oracles.free import fnet, mlp_mixer
from oracles.linear import linear
from oracles.sparse import (
    axial,
    bigbird,
    block_local,
    dilated,
    global_tokens,
    image_local_2d,
    local,
    longformer,
    per_head,
    random_blocks,
    sparse_fixed,
    sparse_strided,
)
from oracles.vanilla import parameter_free, vanilla

ORACLES = {
    f.__name__: f
    for f in (
        parameter_free, vanilla, global_tokens, local, dilated, random_blocks, block_local, sparse_strided, sparse_fixed,
        longformer, bigbird, image_local_2d, axial, per_head, linear, linformer, fnet, mlp_mixer,
    )
}  # fmt: skip
