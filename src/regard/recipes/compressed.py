"""Low-rank and compressed attention: fewer keys and values, or narrower queries and keys."""

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
from regard.mixer import Attention, Mixer, MultiHead
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
    heads: int,
    head_dim: int,
    *,
    length: int,
    rank: int | None = None,
    share: str | None = None,
    projection: Attention | Mixer | None = None,
) -> Attention:
    """Linformer: keys and values are projected along the sequence, from `length` to `rank`.

    Args:
        length: Maximum length.
        rank: Projected length. Default: 256, or `length` if that is less.
        share: "none": separate projections for each head. "heads" (default): the same for all
            heads. "kv": also the same for keys and values. "layers": also the same for all layers
            of a model that is built from a configuration.
        projection: Another linformer (layer or attention) whose projections to use, to share them
            over layers; a model with share="layers" sets it.
    """
    check_int(1, length=length)
    if projection is None:
        rank = min(256, length) if rank is None else rank
        compression = LengthProjection(length, rank, heads, share=share or "heads")
    else:
        found = [m for m in projection.modules() if isinstance(m, LengthProjection)]
        if len(found) != 1:
            name = type(projection).__name__
            raise TypeError(f"projection must be another linformer, not {name}")
        compression = found[0]
        given = {"length": length, "rank": rank, "share": share}
        if compression.share == "none":
            given["heads"] = heads
        shared = {"heads": compression.e.shape[0]} | {
            name: getattr(compression, name) for name in ("length", "rank", "share")
        }
        for name, value in given.items():
            if value not in (None, shared[name]):
                raise ValueError(
                    f"{name} must be {shared[name]!r}, as in the shared projection, not {value!r}"
                )
    return CompressedAttention(compression, SoftmaxAttention())


@recipe(
    "Guo et al. 2019",
    family="compressed",
    formula="softmax(Q Kᵀ / √r) V,  Q, K of r columns",
    example_kwargs={"rank": 2},
)
def low_rank(dim: int, heads: int, *, rank: int = 8, causal: bool = False) -> Mixer:
    """Low-rank attention: narrow queries and keys, so that the scores have a low rank; values keep
    their width.

    Args:
        rank: Width of queries and keys in each head.
    """
    mixer = MultiHead(dim, heads, SoftmaxAttention(), causal=causal)
    return narrow_queries_and_keys(mixer, rank)


@recipe(
    "Guo et al. 2019",
    family="compressed",
    formula="(softmax(Q Kᵀ / √r) + softmax over |i − j| ≤ w) V",
    example_kwargs={"rank": 2, "window": 3},
)
def low_rank_band(
    dim: int, heads: int, *, rank: int = 8, window: int = 8, causal: bool = False
) -> Mixer:
    """Low-rank attention to all tokens plus attention to a sliding window.

    Args:
        rank: Width of queries and keys of the low-rank part, in each head.
        window: Tokens on each side (±window) of the sliding window.
    """
    return LowRankBand(dim, heads, rank=rank, window=window, causal=causal)


@recipe(
    "Xiong et al. 2021",
    arxiv="2102.03902",
    family="compressed",
    formula="softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V",
    example_kwargs={"landmarks": 6},
)
def nystrom(
    heads: int,
    head_dim: int,
    *,
    landmarks: int = 64,
    iterations: int = 6,
    kernel: int | None = None,
) -> Attention:
    """Nyströmformer: Nyström approximation of softmax attention, with segment means as landmarks.

    Args:
        landmarks: Number of segments. Sequences of at most this length attend exactly.
        iterations: Iterations of the pseudo-inverse.
        kernel: Kernel size of a convolution over the values that is added, 33 in the paper.
            Default: none.
    """
    return NystromAttention(heads, landmarks, iterations=iterations, kernel=kernel)


@recipe(
    "Liu et al. 2018",
    arxiv="1801.10198",
    family="compressed",
    formula="softmax(Q conv(K)ᵀ / √e) conv(V), in turn with own blocks",
)
def memory_compressed(
    heads: int,
    head_dim: int,
    *,
    stride: int = 3,
    block: int = 256,
    layer: int = 1,
    causal: bool = False,
) -> Attention:
    """Memory-compressed attention: a strided convolution shortens keys and values, in every other
    layer.

    Args:
        stride: Tokens per compressed key, in odd layers.
        block: Block size, in even layers.
        layer: Layer number, which a model sets. Odd layers compress; in even layers each token
            attends to its own block.
    """
    check_int(0, layer=layer)
    check_int(1, stride=stride, block=block)
    if layer % 2 == 0:
        return SoftmaxAttention(Chunks(block))
    null = torch.zeros(2, heads, 1, head_dim) if causal else None
    return BlockCompressedAttention(ConvCompression(heads * head_dim, heads, stride), null=null)


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
    """Poolingformer: a sliding window, then a larger window of pooled keys and values over its
    output.

    Args:
        window: Tokens on each side (±window) of the first level.
        reach: Tokens on each side (±reach) of the second level.
        kernel: Tokens that are pooled into one key.
        stride: Distance between pooled keys.
    """
    return Poolingformer(
        dim, heads, window=window, reach=reach, kernel=kernel, stride=stride, causal=causal
    )
