"""Adapters: sparse by position, and sparse by content."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from regard.backends.flex import block_mask
from regard.bench.cell import BenchCall, BenchCell, heads_call, layer_call
from regard.bench.contenders import build_mixer
from regard.bench.peers.registry import (
    FILLED,
    FLEX,
    HUGGING_FACE,
    LEAKS,
    NO_MASK,
    NOT_CAUSAL,
    OutputProjection,
    part_of,
    peer,
)
from regard.errors import Unsupported
from regard.models import ModuleSpec
from regard.show.build import pattern_of


# ---------------------------------------------------------------------------------------------- sparse by position
@peer(
    "local-attention LocalMHA",
    "local_attention",
    "local",
    ours=lambda n: {"window": 128},
    note=FILLED,
)
def _local(cell: BenchCell) -> BenchCall:
    make = part_of("local_attention", "LocalMHA")
    sizes = {"dim": cell.dim, "heads": cell.heads, "dim_head": cell.width, "causal": cell.causal}
    return layer_call(
        make(**sizes, window_size=128, exact_windowsize=True, use_rotary_pos_emb=False), cell
    )


@peer(
    "local-attention LocalAttention",
    "local_attention",
    "local",
    level="kernel",
    ours=lambda n: {"window": 128},
    note=FILLED,
)
def _local_heads(cell: BenchCell) -> BenchCall:
    make = part_of("local_attention", "LocalAttention")
    inner = make(
        window_size=128,
        causal=cell.causal,
        exact_windowsize=True,
        use_rotary_pos_emb=False,
        autopad=True,
    )
    return heads_call(inner, cell, *[cell.shape] * 3)


@lru_cache(1)
def _compiled() -> Callable[..., Tensor]:
    flex = part_of(FLEX, "flex_attention")
    made: Callable[..., Tensor] = torch.compile(flex, dynamic=False)
    return made


def _flex(cell: BenchCell, part: ModuleSpec) -> BenchCall:
    pattern = pattern_of(build_mixer(part, cell))
    assert pattern is not None
    blocks = block_mask(pattern, cell.length, cell.length)
    return heads_call(
        lambda q, k, v: _compiled()(q, k, v, block_mask=blocks), cell, *[cell.shape] * 3
    )


NO_BACKWARD = "FlexAttention has no backward pass on the CPU"


@peer(
    "FlexAttention window",
    FLEX,
    "local",
    level="kernel",
    ours=lambda n: {"window": 128},
    training=NO_BACKWARD,
)
def _flex_window(cell: BenchCell) -> BenchCall:
    return _flex(cell, ModuleSpec(name="local", arguments={"window": 128}))


@peer("FlexAttention BigBird", FLEX, "bigbird", level="kernel", training=NO_BACKWARD)
def _flex_bigbird(cell: BenchCell) -> BenchCall:
    return _flex(cell, ModuleSpec(name="bigbird"))


@peer(
    "transformers Longformer",
    HUGGING_FACE.format("longformer"),
    "longformer",
    ours=lambda n: {"window": 256},
    causal=NOT_CAUSAL,
    note="lengths must be multiples of 512",
)
def _longformer(cell: BenchCell) -> BenchCall:
    config = part_of("transformers", "LongformerConfig")(
        hidden_size=cell.dim,
        num_attention_heads=cell.heads,
        num_hidden_layers=1,
        attention_window=[512],
        attention_probs_dropout_prob=0.0,
    )
    if cell.length % 512:
        raise Unsupported(f"{cell.length:,} tokens are no multiple of its window of 512")
    none = torch.zeros(cell.batch, cell.length)
    given = {"is_index_masked": none < 0, "is_index_global_attn": none > 0, "is_global_attn": False}
    inner = part_of(HUGGING_FACE.format("longformer"), "LongformerSelfAttention")(config, 0)
    return layer_call(
        OutputProjection(inner, cell.dim, lambda inner, x: inner(x, none, **given)[0]), cell
    )


@peer("transformers BigBird", HUGGING_FACE.format("big_bird"), "bigbird", causal=NOT_CAUSAL)
def _bigbird(cell: BenchCell) -> BenchCall:
    block = 64
    config = part_of("transformers", "BigBirdConfig")(
        hidden_size=cell.dim,
        num_attention_heads=cell.heads,
        block_size=block,
        num_random_blocks=3,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=cell.length,
    )
    if (
        cell.length % block or cell.length < 12 * block
    ):  # with fewer, its model turns to dense attention
        raise Unsupported(
            f"{cell.length:,} tokens: it takes multiples of {block}, from {12 * block} on"
        )
    real = torch.ones(cell.batch, cell.length)
    cut = real.view(cell.batch, -1, block)
    near = torch.cat((cut[:, 1:-3], cut[:, 2:-2], cut[:, 3:-1]), 2)
    band = torch.einsum("blq,blk->blqk", cut[:, 2:-2], near)[
        :, None
    ]  # made once for all layers, so not timed
    inner = part_of(HUGGING_FACE.format("big_bird"), "BigBirdBlockSparseAttention")(config, seed=0)
    masks = (band, real[:, None, :, None], real[:, None, None, :], cut, cut)
    return layer_call(OutputProjection(inner, cell.dim, lambda inner, x: inner(x, *masks)[0]), cell)


@peer(
    "axial-attention",
    "axial_attention",
    "axial",
    mask=NO_MASK,
    causal=NOT_CAUSAL,
    ours=lambda n: {"width": max(1, round(n**0.5)), "form": "two"},
)
def _axial(cell: BenchCell) -> BenchCall:
    side = max(1, round(cell.length**0.5))
    if cell.length % side:
        raise Unsupported(f"{cell.length:,} tokens are no whole rows of {side}")
    layer = part_of("axial_attention", "AxialAttention")(
        dim=cell.dim, heads=cell.heads, num_dimensions=2, sum_axial_out=False
    )
    return layer_call(layer, cell, lambda x: layer(x.unflatten(1, (-1, side))).flatten(1, 2))


# ---------------------------------------------------------------------------------------------- sparse by content
HASHED = {
    "bucket_size": 64,
    "n_hashes": 4,
    "attend_across_buckets": False,
    "allow_duplicate_attention": False,
}
_hashed = partial(
    peer,
    module="reformer_pytorch",
    recipe="reformer",
    note="hashes of later tokens show",
    ours=lambda n: {"buckets": max(2, n // 64), "chunk": 64, "rounds": 4},
)


@_hashed("reformer-pytorch", mask=LEAKS)
def _reformer(cell: BenchCell) -> BenchCall:
    make = part_of("reformer_pytorch", "LSHSelfAttention")
    return layer_call(make(cell.dim, heads=cell.heads, causal=cell.causal, **HASHED), cell)


@_hashed("reformer-pytorch LSHAttention", level="kernel", mask=LEAKS)
def _reformer_heads(cell: BenchCell) -> BenchCall:
    inner = part_of("reformer_pytorch", "LSHAttention")(causal=cell.causal, **HASHED)
    return heads_call(
        lambda q, v: inner(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(v), cell, *[cell.shape] * 2
    )


ROUTING = "routing_transformer.routing_transformer"
_routed = partial(
    peer,
    module=ROUTING,
    recipe="routing",
    mask=LEAKS,
    note="clusters are chosen by later tokens too",
    ours=lambda n: {"clusters": max(1, n // 128)},
)


@_routed("routing-transformer")
def _routing(cell: BenchCell) -> BenchCall:
    make = part_of(ROUTING, "SelfAttention")
    layer = make(
        cell.dim, 1, cell.length, cell.heads, 0, 128, causal=cell.causal, rel_pos_emb=False
    )
    layer.train()(torch.randn(1, cell.length, cell.dim))  # centroids begin with the first batch
    return layer_call(layer, cell, lambda x: layer(x)[0])


@_routed("routing-transformer KmeansAttention", level="kernel")
def _routing_heads(cell: BenchCell) -> BenchCall:
    clusters = max(1, cell.length // 128)
    inner = part_of(ROUTING, "KmeansAttention")(
        clusters, 128, cell.heads, cell.width, causal=cell.causal
    )
    inner.train()(*torch.randn(3, *cell.shape))
    inner.train(cell.way == "training")
    return heads_call(
        lambda q, k, v: inner(q, k, v)[0], cell, *[cell.shape] * 3, more=list(inner.parameters())
    )


@peer(
    "sinkhorn-transformer",
    "sinkhorn_transformer",
    "sinkhorn",
    mask=LEAKS,
    ours=lambda n: {"block": 64},
    note="it does less: sorted blocks give their keys for values; causal, one block is taken, and none are sorted",
)
def _sinkhorn(cell: BenchCell) -> BenchCall:
    make = part_of("sinkhorn_transformer", "SinkhornSelfAttention")
    sorting = {
        "non_permutative": False,
        "sinkhorn_iter": 5,
    }  # else it takes the best block, without Sinkhorn's sums
    return layer_call(
        make(cell.dim, 64, cell.length, heads=cell.heads, causal=cell.causal, **sorting), cell
    )
