"""Low rank and compressed: fewer keys and values than tokens, or narrower ones."""

from __future__ import annotations

import torch

from regard.attentions import (
    BlockCompressedAttention,
    CompressedAttention,
    NystromAttention,
    SoftmaxAttention,
)
from regard.compression import ConvCompression, LengthProjection
from regard.errors import check_int
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import LowRankBand, Poolingformer, narrow_queries_and_keys
from regard.pattern import Chunks
from regard.registry import recipe


@recipe(
    "Wang et al. 2020",
    arxiv="2006.04768",
    family="compressed",
    formula="softmax(Q (E K)ᵀ / √e) F V",
    example_kwargs={"length": 32, "rank": 5},
)
def linformer(
    dim: int,
    heads: int,
    *,
    length: int,
    rank: int | None = None,
    share: str | None = None,
    projection: Mixer | None = None,
    causal: bool = False,
) -> Mixer:
    """Keys and values projected along the sequence, from `length` to `rank` of them.

    rank         256 unless given, or `length` where that is less
    share        "none": projections for each head; "heads" (unless given): for all heads alike; "kv": one for keys and values
    projection   another linformer, whose projections this one uses too: sharing over layers
    """
    check_int(1, length=length)
    if projection is None:
        compression = LengthProjection(
            length, min(256, length) if rank is None else rank, heads, share=share or "heads"
        )
    else:
        compression = _projection_of(projection)
        asked = {
            "length": length,
            "rank": rank,
            "share": share,
            "heads": heads if compression.share == "none" else None,
        }
        _check_same(compression, asked)
    return MultiHead(
        dim, heads, CompressedAttention(compression, SoftmaxAttention()), causal=causal
    )


def _projection_of(mixer: Mixer) -> LengthProjection:
    inner = mixer.inner if isinstance(mixer, MultiHead) else None
    if not isinstance(inner, CompressedAttention) or not isinstance(
        inner.compression, LengthProjection
    ):
        raise TypeError(f"projection must be another linformer, not {type(mixer).__name__}")
    return inner.compression


def _check_same(compression: LengthProjection, asked: dict[str, int | str | None]) -> None:
    """What is shared cannot be chosen again."""
    has = {
        "length": compression.length,
        "rank": compression.rank,
        "share": compression.share,
        "heads": compression.e.shape[0],
    }
    for name, value in asked.items():
        if value not in (None, has[name]):
            raise ValueError(
                f"{name} must be {has[name]!r}, as in the projection that is shared, not {value!r}"
            )


@recipe(
    "Guo et al. 2019",
    family="compressed",
    formula="softmax(Q Kᵀ / √r) V,  Q, K of r columns",
    example_kwargs={"rank": 2},
)
def low_rank(dim: int, heads: int, *, rank: int = 8, causal: bool = False) -> Mixer:
    """Queries and keys of a small width in each head, so that the scores have a low rank; values keep their width."""
    return narrow_queries_and_keys(MultiHead(dim, heads, SoftmaxAttention(), causal=causal), rank)


@recipe(
    "Guo et al. 2019",
    family="compressed",
    formula="(softmax(Q Kᵀ / √r) + softmax over |i − j| ≤ w) V",
    example_kwargs={"rank": 2, "window": 3},
)
def low_rank_band(
    dim: int, heads: int, *, rank: int = 8, window: int = 8, causal: bool = False
) -> Mixer:
    """Low-rank attention to everything, plus band attention to `window` tokens at either side."""
    return LowRankBand(dim, heads, rank=rank, window=window, causal=causal)


@recipe(
    "Xiong et al. 2021",
    arxiv="2102.03902",
    family="compressed",
    formula="softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V",
    example_kwargs={"landmarks": 6},
)
def nystrom(
    dim: int,
    heads: int,
    *,
    landmarks: int = 64,
    iterations: int = 6,
    kernel: int | None = None,
    bias: bool = False,
    causal: bool = False,
) -> Mixer:
    """Nyströmformer: the means of segments stand between queries and keys.

    landmarks    how many segments; no more tokens than that attend exactly
    iterations   of the pseudo-inverse
    kernel       width of a convolution over the values that is added, 33 in the paper; None: none
    bias         whether the projections have one
    """
    attention = NystromAttention(heads, landmarks, iterations=iterations, kernel=kernel)
    return MultiHead(dim, heads, attention, bias=bias, causal=causal)


@recipe(
    "Liu et al. 2018",
    arxiv="1801.10198",
    family="compressed",
    formula="softmax(Q conv(K)ᵀ / √e) conv(V), in turn with own blocks",
)
def memory_compressed(
    dim: int,
    heads: int,
    *,
    stride: int | None = None,
    block: int | None = None,
    layer: int = 1,
    causal: bool = False,
) -> Mixer:
    """A convolution makes one key and one value of `stride` tokens; layers with blocks of `block` tokens alternate with it.

    layer    odd: compressed; even: each token sees its own block only
    stride   of odd layers, 3 unless given
    block    of even layers, 256 unless given
    """
    check_heads(dim, heads)
    check_int(0, layer=layer)
    if layer % 2 == 0:
        if stride is not None:
            raise ValueError(
                f"stride is for odd layers, which compress; layer {layer} sees blocks: give block"
            )
        block = 256 if block is None else block
        check_int(1, block=block)
        return MultiHead(dim, heads, SoftmaxAttention(Chunks(block)), causal=causal)
    if block is not None:
        raise ValueError(
            f"block is for even layers, which see blocks; layer {layer} compresses: give stride"
        )
    stride = 3 if stride is None else stride
    check_int(1, stride=stride)
    null = torch.zeros(2, heads, 1, dim // heads) if causal else None
    return MultiHead(
        dim,
        heads,
        BlockCompressedAttention(ConvCompression(dim, heads, stride), null=null),
        causal=causal,
    )


@recipe(
    "Zhang et al. 2021",
    arxiv="2105.04371",
    family="compressed",
    formula="y + softmax(Q̂ pool(K̂)ᵀ / √e) pool(V̂),  y from a window",
    example_kwargs={"window": 2, "reach": 8, "kernel": 3, "stride": 2},
)
def pooling(
    dim: int,
    heads: int,
    *,
    window: int = 128,
    reach: int = 512,
    kernel: int = 5,
    stride: int = 4,
    causal: bool = False,
) -> Mixer:
    """Poolingformer: a window, and over its result a larger one, of pooled keys and values.

    window   tokens to either side, of the first level; `reach` those of the second
    kernel   tokens that are pooled to one, every `stride` tokens
    """
    return Poolingformer(
        dim, heads, window=window, reach=reach, kernel=kernel, stride=stride, causal=causal
    )
