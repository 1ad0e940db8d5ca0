"""Adapters of peers with linear or compressed attention, without attention, or with a memory."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from regard.bench.cell import BenchCall, BenchCell, heads_call, layer_call
from regard.bench.contenders import build_mixer
from regard.bench.peers.registry import HUGGING_FACE, LEAKS, NO_MASK, NOT_CAUSAL, import_from, peer
from regard.models import ModuleSpec


@peer(
    "performer-pytorch",
    "performer_pytorch",
    "performer",
    mask=LEAKS,
    note="causal outputs depend on the largest of the later keys",
    arguments=lambda n: {"features": 256},
)
def _performer(cell: BenchCell) -> BenchCall:
    layer = import_from("performer_pytorch", "SelfAttention")(
        cell.dim, causal=cell.causal, heads=cell.heads, dim_head=cell.head_dim, nb_features=256
    )
    return layer_call(layer, cell)


@peer(
    "performer-pytorch FastAttention",
    "performer_pytorch",
    "performer",
    scope="kernel",
    mask=NO_MASK,
    note="causal outputs depend on the largest of the later keys",
    arguments=lambda n: {"features": 256},
)
def _performer_heads(cell: BenchCell) -> BenchCall:
    inner = import_from("performer_pytorch", "FastAttention")(
        cell.head_dim, nb_features=256, causal=cell.causal
    )
    return heads_call(inner, cell, *[cell.shape] * 3)


EFFICIENT = "linear_attention_transformer.linear_attention_transformer"


@peer("linear-attention-transformer", EFFICIENT, "efficient")
def _efficient(cell: BenchCell) -> BenchCall:
    return layer_call(
        import_from(EFFICIENT, "SelfAttention")(cell.dim, heads=cell.heads, causal=cell.causal),
        cell,
    )


@peer("linear-attention-transformer linear_attn", EFFICIENT, "efficient", scope="kernel")
def _efficient_heads(cell: BenchCell) -> BenchCall:
    return heads_call(
        import_from(EFFICIENT, "causal_linear_attn" if cell.causal else "linear_attn"),
        cell,
        *[cell.shape] * 3,
    )


FAST = "fast_transformers"


def _fast(cell: BenchCell, *, kind: str, **options: Any) -> BenchCall:
    """Build an attention of pytorch-fast-transformers, which takes tensors (b, n, h, e)."""
    masking = import_module(f"{FAST}.masking")
    inner = (
        import_from(f"{FAST}.builders", "AttentionBuilder")
        .from_kwargs(query_dimensions=cell.head_dim, attention_dropout=0.0, **options)
        .get(kind)
    )
    n = cell.length
    visible = masking.TriangularCausalMask(n) if kind == "causal-linear" else masking.FullMask(n)
    lengths = masking.LengthMask(torch.full((cell.batch,), n))
    if cell.scope == "layer":
        layer = import_from(f"{FAST}.attention.attention_layer", "AttentionLayer")(
            inner, cell.dim, cell.heads
        )
        return layer_call(layer, cell, lambda x: layer(x, x, x, visible, lengths, lengths))
    b, h, n, e = cell.shape
    return heads_call(
        lambda q, k, v: inner(q, k, v, visible, lengths, lengths), cell, *[(b, n, h, e)] * 3
    )


def _fast_linear(cell: BenchCell) -> BenchCall:
    return _fast(cell, kind="causal-linear" if cell.causal else "linear")


CLUSTERS: dict[str, Any] = {"clusters": 100, "bits": 63, "iterations": 10}
for _scope in ("layer", "kernel"):
    _add = partial(peer, module=f"{FAST}.builders", scope=_scope)
    _add(f"pytorch-fast-transformers linear, {_scope}", recipe="linear")(_fast_linear)
    _add(
        f"pytorch-fast-transformers clustered, {_scope}",
        recipe="clustered",
        causal=NOT_CAUSAL,
        arguments=lambda n: CLUSTERS,
    )(partial(_fast, kind="clustered", **CLUSTERS))
    _add(
        f"pytorch-fast-transformers improved-clustered, {_scope}",
        recipe="clustered_improved",
        causal=NOT_CAUSAL,
        arguments=lambda n: {**CLUSTERS, "top": 32},
    )(partial(_fast, kind="improved-clustered", **CLUSTERS, topk=32))


@peer(
    "linformer LinformerSelfAttention",
    "linformer",
    "linformer",
    mask=NO_MASK,
    causal=NOT_CAUSAL,
    arguments=lambda n: {"rank": min(256, n)},
)
def _linformer(cell: BenchCell) -> BenchCall:
    make = import_from("linformer", "LinformerSelfAttention")
    return layer_call(make(cell.dim, cell.length, k=min(256, cell.length), heads=cell.heads), cell)


@peer(
    "nystrom-attention",
    "nystrom_attention",
    "nystrom",
    causal=NOT_CAUSAL,
    arguments=lambda n: {"landmarks": 64},
)
def _nystrom(cell: BenchCell) -> BenchCall:
    layer = import_from("nystrom_attention", "NystromAttention")(
        cell.dim,
        dim_head=cell.head_dim,
        heads=cell.heads,
        num_landmarks=64,
        pinv_iterations=6,
        residual=False,
    )
    return layer_call(layer, cell)


@peer(
    "memory-compressed-attention",
    "memory_compressed_attention",
    "memory_compressed",
    arguments=lambda n: {"stride": 3},
)
def _memory_compressed(cell: BenchCell) -> BenchCall:
    make = import_from("memory_compressed_attention", "MemoryCompressedAttention")
    return layer_call(
        make(cell.dim, heads=cell.heads, causal=cell.causal, compression_factor=3), cell
    )


@peer(
    "transformers Informer",
    HUGGING_FACE.format("informer"),
    "prob_sparse",
    mask=NO_MASK,
    causal="later tokens influence which queries attend",
    note="the sparsity of queries is measured on all keys instead of a sample",
    arguments=lambda n: {"factor": 5},
)
def _informer(cell: BenchCell) -> BenchCall:
    make = import_from(HUGGING_FACE.format("informer"), "InformerProbSparseAttention")
    layer = make(cell.dim, cell.heads, sampling_factor=5)
    return layer_call(layer, cell, lambda x: layer(x)[0])


@peer("transformers FNet", HUGGING_FACE.format("fnet"), "fnet", mask=NO_MASK, causal=NOT_CAUSAL)
def _fnet(cell: BenchCell) -> BenchCall:
    layer = import_from(HUGGING_FACE.format("fnet"), "FNetBasicFourierTransform")(
        import_from("transformers", "FNetConfig")(hidden_size=cell.dim)
    )
    return layer_call(layer, cell, lambda x: layer(x)[0])


@peer(
    "mlp-mixer-pytorch",
    "mlp_mixer_pytorch.mlp_mixer_pytorch",
    "mlp_mixer",
    mask=NO_MASK,
    causal=NOT_CAUSAL,
)
def _mlp_mixer(cell: BenchCell) -> BenchCall:
    make = import_from("mlp_mixer_pytorch.mlp_mixer_pytorch", "FeedForward")
    hidden = build_mixer(ModuleSpec(name="mlp_mixer"), cell, device="meta").up.out_features  # type: ignore[union-attr]
    return layer_call(make(cell.length, hidden, 0.0, partial(nn.Conv1d, kernel_size=1)), cell)


@peer("g-mlp-pytorch", "g_mlp_pytorch.g_mlp_pytorch", "gmlp", mask=NO_MASK)
def _gmlp(cell: BenchCell) -> BenchCall:
    hidden = build_mixer(ModuleSpec(name="gmlp"), cell, device="meta").up.out_features  # type: ignore[union-attr]
    make = import_from("g_mlp_pytorch.g_mlp_pytorch", "gMLPBlock")
    return layer_call(
        make(dim=cell.dim, dim_ff=hidden, seq_len=cell.length, causal=cell.causal), cell
    )


@peer(
    "product-key-memory",
    "product_key_memory",
    "product_keys",
    note="queries are normalized per token, ours per batch",
)
def _product_keys(cell: BenchCell) -> BenchCall:
    make = import_from("product_key_memory", "PKM")
    return layer_call(make(cell.dim, heads=4, num_keys=128, topk=32, dim_head=128), cell)


@peer("x-transformers", "x_transformers", "vanilla")
def _x_transformers(cell: BenchCell) -> BenchCall:
    make = import_from("x_transformers", "Attention")
    layer = make(
        dim=cell.dim, heads=cell.heads, dim_head=cell.head_dim, causal=cell.causal, flash=True
    )
    return layer_call(layer, cell)
