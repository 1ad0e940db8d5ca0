"""Adapters: linearised, compressed, without attention, and a memory."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from regard.bench.cell import Cell, Run, of_heads, of_layer
from regard.bench.contenders import mixer_of
from regard.bench.peers.registry import HUGGING_FACE, LEAKS, NO_MASK, NOT_CAUSAL, part_of, peer
from regard.models import Part


# ---------------------------------------------------------------------------------------------- linearised
@peer(
    "performer-pytorch", "performer_pytorch", "performer", mask=LEAKS, note="the greatest of later keys shows",
    ours=lambda n: {"features": 256},
)  # fmt: skip
def _performer(cell: Cell) -> Run:
    layer = part_of("performer_pytorch", "SelfAttention")(
        cell.dim, causal=cell.causal, heads=cell.heads, dim_head=cell.width, nb_features=256
    )
    return of_layer(layer, cell)


@peer(
    "performer-pytorch FastAttention", "performer_pytorch", "performer", level="kernel", mask=NO_MASK,
    note="the greatest of later keys shows", ours=lambda n: {"features": 256},
)  # fmt: skip
def _performer_heads(cell: Cell) -> Run:
    inner = part_of("performer_pytorch", "FastAttention")(cell.width, nb_features=256, causal=cell.causal)
    return of_heads(inner, cell, *[cell.shape] * 3)


EFFICIENT = "linear_attention_transformer.linear_attention_transformer"


@peer("linear-attention-transformer", EFFICIENT, "efficient")
def _efficient(cell: Cell) -> Run:
    return of_layer(part_of(EFFICIENT, "SelfAttention")(cell.dim, heads=cell.heads, causal=cell.causal), cell)


@peer("linear-attention-transformer linear_attn", EFFICIENT, "efficient", level="kernel")
def _efficient_heads(cell: Cell) -> Run:
    return of_heads(part_of(EFFICIENT, "causal_linear_attn" if cell.causal else "linear_attn"), cell, *[cell.shape] * 3)


FAST = "fast_transformers"


def _fast(cell: Cell, *, kind: str, **given: Any) -> Run:
    """Heads stand behind tokens there, (b n h e)."""
    masking = import_module(f"{FAST}.masking")
    inner = part_of(f"{FAST}.builders", "AttentionBuilder").from_kwargs(
        query_dimensions=cell.width, attention_dropout=0.0, **given
    ).get(kind)  # fmt: skip
    n = cell.length
    seen = masking.TriangularCausalMask(n) if kind == "causal-linear" else masking.FullMask(n)
    real = masking.LengthMask(torch.full((cell.batch,), n))
    if cell.level == "layer":
        layer = part_of(f"{FAST}.attention.attention_layer", "AttentionLayer")(inner, cell.dim, cell.heads)
        return of_layer(layer, cell, lambda x: layer(x, x, x, seen, real, real))
    b, h, n, e = cell.shape
    return of_heads(lambda q, k, v: inner(q, k, v, seen, real, real), cell, *[(b, n, h, e)] * 3)


def _linear(cell: Cell) -> Run:
    return _fast(cell, kind="causal-linear" if cell.causal else "linear")


def _clustered(cell: Cell) -> Run:
    return _fast(cell, kind="clustered", clusters=100, bits=63, iterations=10)


def _improved(cell: Cell) -> Run:
    return _fast(cell, kind="improved-clustered", clusters=100, bits=63, iterations=10, topk=32)


CLUSTERS = {"clusters": 100, "bits": 63, "iterations": 10}
for _level in ("layer", "kernel"):
    _add = partial(peer, module=f"{FAST}.builders", level=_level)
    _add(f"pytorch-fast-transformers linear, {_level}", recipe="linear")(_linear)
    _add(
        f"pytorch-fast-transformers clustered, {_level}", recipe="clustered", causal=NOT_CAUSAL, ours=lambda n: CLUSTERS
    )(_clustered)  # fmt: skip
    _add(
        f"pytorch-fast-transformers improved-clustered, {_level}", recipe="clustered_improved", causal=NOT_CAUSAL,
        ours=lambda n: {**CLUSTERS, "top": 32},
    )(_improved)  # fmt: skip


# ---------------------------------------------------------------------------------------------- compressed
@peer(
    "linformer LinformerSelfAttention", "linformer", "linformer", mask=NO_MASK, causal=NOT_CAUSAL,
    ours=lambda n: {"rank": min(256, n)},
)  # fmt: skip
def _linformer(cell: Cell) -> Run:
    make = part_of("linformer", "LinformerSelfAttention")
    return of_layer(make(cell.dim, cell.length, k=min(256, cell.length), heads=cell.heads), cell)


@peer("nystrom-attention", "nystrom_attention", "nystrom", causal=NOT_CAUSAL, ours=lambda n: {"landmarks": 64})
def _nystrom(cell: Cell) -> Run:
    layer = part_of("nystrom_attention", "NystromAttention")(
        cell.dim, dim_head=cell.width, heads=cell.heads, num_landmarks=64, pinv_iterations=6, residual=False
    )
    return of_layer(layer, cell)


@peer("memory-compressed-attention", "memory_compressed_attention", "memory_compressed", ours=lambda n: {"stride": 3})
def _memory_compressed(cell: Cell) -> Run:
    make = part_of("memory_compressed_attention", "MemoryCompressedAttention")
    return of_layer(make(cell.dim, heads=cell.heads, causal=cell.causal, compression_factor=3), cell)


@peer(
    "transformers Informer", HUGGING_FACE.format("informer"), "prob_sparse", mask=NO_MASK,
    causal="later tokens choose which queries attend", note="queries are measured on as many keys as there are, not on a few",
    ours=lambda n: {"factor": 5},
)  # fmt: skip
def _informer(cell: Cell) -> Run:
    make = part_of(HUGGING_FACE.format("informer"), "InformerProbSparseAttention")
    layer = make(cell.dim, cell.heads, sampling_factor=5)
    return of_layer(layer, cell, lambda x: layer(x)[0])


# ---------------------------------------------------------------------------------------------- without attention, and memory
@peer("transformers FNet", HUGGING_FACE.format("fnet"), "fnet", mask=NO_MASK, causal=NOT_CAUSAL)
def _fnet(cell: Cell) -> Run:
    layer = part_of(HUGGING_FACE.format("fnet"), "FNetBasicFourierTransform")(
        part_of("transformers", "FNetConfig")(hidden_size=cell.dim)
    )
    return of_layer(layer, cell, lambda x: layer(x)[0])


@peer("mlp-mixer-pytorch", "mlp_mixer_pytorch.mlp_mixer_pytorch", "mlp_mixer", mask=NO_MASK, causal=NOT_CAUSAL)
def _mlp_mixer(cell: Cell) -> Run:
    make = part_of("mlp_mixer_pytorch.mlp_mixer_pytorch", "FeedForward")
    hidden = mixer_of(Part(name="mlp_mixer"), cell, device="meta").up.out_features  # type: ignore[union-attr]
    return of_layer(make(cell.length, hidden, 0.0, partial(nn.Conv1d, kernel_size=1)), cell)


@peer("g-mlp-pytorch", "g_mlp_pytorch.g_mlp_pytorch", "gmlp", mask=NO_MASK)
def _gmlp(cell: Cell) -> Run:
    hidden = mixer_of(Part(name="gmlp"), cell, device="meta").up.out_features  # type: ignore[union-attr]
    make = part_of("g_mlp_pytorch.g_mlp_pytorch", "gMLPBlock")
    return of_layer(make(dim=cell.dim, dim_ff=hidden, seq_len=cell.length, causal=cell.causal), cell)


@peer("product-key-memory", "product_key_memory", "product_keys", note="queries are normalised by token, ours by batch")
def _product_keys(cell: Cell) -> Run:
    make = part_of("product_key_memory", "PKM")
    return of_layer(make(cell.dim, heads=4, num_keys=128, topk=32, dim_head=128), cell)


@peer("x-transformers", "x_transformers", "vanilla")
def _x_transformers(cell: Cell) -> Run:
    make = part_of("x_transformers", "Attention")
    layer = make(dim=cell.dim, heads=cell.heads, dim_head=cell.width, causal=cell.causal, flash=True)
    return of_layer(layer, cell)
