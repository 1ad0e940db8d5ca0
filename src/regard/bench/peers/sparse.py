"""Adapters of peers with sparse attention, by position or by content."""

from __future__ import annotations

from functools import partial

import torch

from regard.backends.flex import block_mask
from regard.bench.cell import BenchCall, BenchCell, heads_call, layer_call
from regard.bench.contenders import build_mixer
from regard.bench.flex import NO_BACKWARD, compiled_flex_attention
from regard.bench.peers.registry import (
    FLEX_MODULE,
    HUGGING_FACE,
    LEAKS,
    NO_MASK,
    NOT_CAUSAL,
    PADDED_WINDOW,
    OutputProjection,
    import_from,
    peer,
)
from regard.errors import Unsupported
from regard.models import ModuleSpec
from regard.show.build import pattern_of


@peer(
    "local-attention LocalMHA",
    "local_attention",
    "local",
    arguments=lambda n: {"window": 128},
    note=PADDED_WINDOW,
)
def _local(cell: BenchCell) -> BenchCall:
    make = import_from("local_attention", "LocalMHA")
    sizes = {"dim": cell.dim, "heads": cell.heads, "dim_head": cell.head_dim, "causal": cell.causal}
    return layer_call(
        make(**sizes, window_size=128, exact_windowsize=True, use_rotary_pos_emb=False), cell
    )


@peer(
    "local-attention LocalAttention",
    "local_attention",
    "local",
    scope="kernel",
    arguments=lambda n: {"window": 128},
    note=PADDED_WINDOW,
)
def _local_heads(cell: BenchCell) -> BenchCall:
    make = import_from("local_attention", "LocalAttention")
    inner = make(
        window_size=128,
        causal=cell.causal,
        exact_windowsize=True,
        use_rotary_pos_emb=False,
        autopad=True,
    )
    return heads_call(inner, cell, *[cell.shape] * 3)


def _flex(cell: BenchCell, spec: ModuleSpec) -> BenchCall:
    pattern = pattern_of(build_mixer(spec, cell))
    assert pattern is not None
    blocks, flex = block_mask(pattern, cell.length, cell.length), compiled_flex_attention()
    return heads_call(lambda q, k, v: flex(q, k, v, block_mask=blocks), cell, *[cell.shape] * 3)


@peer(
    "FlexAttention window",
    FLEX_MODULE,
    "local",
    scope="kernel",
    arguments=lambda n: {"window": 128},
    training=NO_BACKWARD,
)
def _flex_window(cell: BenchCell) -> BenchCall:
    return _flex(cell, ModuleSpec(name="local", arguments={"window": 128}))


@peer("FlexAttention BigBird", FLEX_MODULE, "bigbird", scope="kernel", training=NO_BACKWARD)
def _flex_bigbird(cell: BenchCell) -> BenchCall:
    return _flex(cell, ModuleSpec(name="bigbird"))


@peer(
    "transformers Longformer",
    HUGGING_FACE.format("longformer"),
    "longformer",
    arguments=lambda n: {"window": 256},
    causal=NOT_CAUSAL,
    note="lengths must be multiples of 512",
)
def _longformer(cell: BenchCell) -> BenchCall:
    config = import_from("transformers", "LongformerConfig")(
        hidden_size=cell.dim,
        num_attention_heads=cell.heads,
        num_hidden_layers=1,
        attention_window=[512],
        attention_probs_dropout_prob=0.0,
    )
    if cell.length % 512:
        raise Unsupported(f"{cell.length:,} tokens are not a multiple of its window of 512")
    none = torch.zeros(cell.batch, cell.length)
    given = {"is_index_masked": none < 0, "is_index_global_attn": none > 0, "is_global_attn": False}
    inner = import_from(HUGGING_FACE.format("longformer"), "LongformerSelfAttention")(config, 0)
    return layer_call(
        OutputProjection(inner, cell.dim, lambda inner, x: inner(x, none, **given)[0]), cell
    )


@peer("transformers BigBird", HUGGING_FACE.format("big_bird"), "bigbird", causal=NOT_CAUSAL)
def _bigbird(cell: BenchCell) -> BenchCall:
    block = 64
    config = import_from("transformers", "BigBirdConfig")(
        hidden_size=cell.dim,
        num_attention_heads=cell.heads,
        block_size=block,
        num_random_blocks=3,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=cell.length,
    )
    least = 12 * block  # for shorter inputs its model uses dense attention
    if cell.length % block or cell.length < least:
        raise Unsupported(f"{cell.length:,} tokens: it takes multiples of {block} from {least} on")
    # a model builds its masks once for all layers, so they are not timed
    mask = torch.ones(cell.batch, cell.length)
    blocks = mask.view(cell.batch, -1, block)
    window = torch.cat((blocks[:, 1:-3], blocks[:, 2:-2], blocks[:, 3:-1]), 2)
    band = torch.einsum("blq,blk->blqk", blocks[:, 2:-2], window)[:, None]
    masks = (band, mask[:, None, :, None], mask[:, None, None, :], blocks, blocks)
    make = import_from(HUGGING_FACE.format("big_bird"), "BigBirdBlockSparseAttention")
    inner = make(config, seed=0)
    return layer_call(OutputProjection(inner, cell.dim, lambda inner, x: inner(x, *masks)[0]), cell)


@peer(
    "axial-attention",
    "axial_attention",
    "axial_passes",
    mask=NO_MASK,
    causal=NOT_CAUSAL,
    arguments=lambda n: {"width": max(1, round(n**0.5))},
)
def _axial(cell: BenchCell) -> BenchCall:
    side = max(1, round(cell.length**0.5))
    if cell.length % side:
        raise Unsupported(f"{cell.length:,} tokens do not fill whole rows of {side}")
    layer = import_from("axial_attention", "AxialAttention")(
        dim=cell.dim, heads=cell.heads, num_dimensions=2, sum_axial_out=False
    )
    return layer_call(layer, cell, lambda x: layer(x.unflatten(1, (-1, side))).flatten(1, 2))


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
    note="causal outputs depend on the hashes of later tokens",
    arguments=lambda n: {"buckets": max(2, n // 64), "chunk": 64, "rounds": 4},
)


@_hashed("reformer-pytorch", mask=LEAKS)
def _reformer(cell: BenchCell) -> BenchCall:
    make = import_from("reformer_pytorch", "LSHSelfAttention")
    return layer_call(make(cell.dim, heads=cell.heads, causal=cell.causal, **HASHED), cell)


@_hashed("reformer-pytorch LSHAttention", scope="kernel", mask=LEAKS)
def _reformer_heads(cell: BenchCell) -> BenchCall:
    inner = import_from("reformer_pytorch", "LSHAttention")(causal=cell.causal, **HASHED)
    return heads_call(
        lambda q, v: inner(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(v), cell, *[cell.shape] * 2
    )


ROUTING = "routing_transformer.routing_transformer"
_routed = partial(
    peer,
    module=ROUTING,
    recipe="routing",
    mask=LEAKS,
    note="later tokens influence the choice of clusters",
    arguments=lambda n: {"clusters": max(1, n // 128)},
)


@_routed("routing-transformer")
def _routing(cell: BenchCell) -> BenchCall:
    make = import_from(ROUTING, "SelfAttention")
    layer = make(
        cell.dim, 1, cell.length, cell.heads, 0, 128, causal=cell.causal, rel_pos_emb=False
    )
    layer.train()(torch.randn(1, cell.length, cell.dim))  # initializes the centroids
    return layer_call(layer, cell, lambda x: layer(x)[0])


@_routed("routing-transformer KmeansAttention", scope="kernel")
def _routing_heads(cell: BenchCell) -> BenchCall:
    clusters = max(1, cell.length // 128)
    inner = import_from(ROUTING, "KmeansAttention")(
        clusters, 128, cell.heads, cell.head_dim, causal=cell.causal
    )
    inner.train()(*torch.randn(3, *cell.shape))
    inner.train(cell.mode == "training")
    parameters = list(inner.parameters())
    shapes = [cell.shape] * 3
    return heads_call(lambda q, k, v: inner(q, k, v)[0], cell, *shapes, parameters=parameters)


@peer(
    "sinkhorn-transformer",
    "sinkhorn_transformer",
    "sinkhorn",
    mask=LEAKS,
    arguments=lambda n: {"block": 64},
    note="it does less work: the keys of sorted blocks also serve as values, and the causal form "
    "takes one block without sorting",
)
def _sinkhorn(cell: BenchCell) -> BenchCall:
    make = import_from("sinkhorn_transformer", "SinkhornSelfAttention")
    # by default it takes the best block without Sinkhorn normalization
    sorting = {"non_permutative": False, "sinkhorn_iter": 5}
    return layer_call(
        make(cell.dim, 64, cell.length, heads=cell.heads, causal=cell.causal, **sorting), cell
    )
