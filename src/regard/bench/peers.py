"""Other people's code for the same mechanisms, to be measured beside ours: the same shapes and, where it can be had, the
same work.

Adapters stand in the package, and not in benchmarks/, so that `regard bench --peers` runs wherever Regard is installed.
Every peer is imported only when it is measured; one that is missing is a row that says how to get it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from regard.attend.flex import block_mask
from regard.bench.cell import Cell, Contender, Needs, Ours, Run, mixer_of, of_heads, of_layer
from regard.errors import Unsupported, nearest
from regard.ffn import ProductKeys
from regard.models import Part
from regard.show.build import pattern_of

Build = Callable[[Cell], Run]
FLEX = "torch.nn.attention.flex_attention"
HUGGING_FACE = "transformers.models.{0}.modeling_{0}"
STREAMS = "it has no state from which a stream could go on"
LEAKS = "padded tokens are not left out in full"
FILLED = "unless causal, what fills up the last window is attended to"
NO_MASK = "it takes no padding mask"
NOT_CAUSAL = "it has no causal form"


@dataclass(frozen=True)
class Peer:
    """One of them.

    build    its run in a cell
    module   what is imported, of the package `package` on PyPI
    recipe   ours for the same mechanism, with arguments that make the work the same at a length
    cannot   {"causal": why, "training": why, "mask": why}: what it cannot do; "note" says what it does otherwise
    """

    name: str
    build: Build
    module: str
    package: str
    level: str
    recipe: str
    ours: Callable[[int], Mapping[str, Any]]
    cannot: Mapping[str, str]

    def refusal(self, cell: Cell) -> str | None:
        """Why it has no place in a cell; None: it has one."""
        if cell.level != self.level:
            return f"it is measured at the level {self.level}"
        if cell.way == "decode":
            return STREAMS
        wanted = [word for word, is_so in (("causal", cell.causal), ("training", cell.way == "training")) if is_so]
        return next((self.cannot[word] for word in wanted if word in self.cannot), None)


PEERS: dict[str, Peer] = {}


def peer(
    name: str, module: str, recipe: str, *, level: str = "layer",
    ours: Callable[[int], Mapping[str, Any]] = lambda n: {}, **cannot: str,
) -> Callable[[Build], Build]:  # fmt: skip
    """Register the decorated function; see `Peer`."""

    def register(build: Build) -> Build:
        PEERS[name] = Peer(name, build, module, name.split()[0], level, recipe, ours, cannot)
        return build

    return register


@dataclass(frozen=True)
class Theirs(Contender):
    """A peer, by its name."""

    label: str
    foreign: bool = True

    @property
    def levels(self) -> tuple[str, ...]:  # type: ignore[override]
        """The one that its adapter is for."""
        return (PEERS[self.label].level,)

    @property
    def module(self) -> str:  # type: ignore[override]
        """What its adapter imports."""
        return PEERS[self.label].module

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Whether its first call makes code."""
        return self.module == FLEX

    def build(self, cell: Cell) -> Run:
        """See `Contender`."""
        found = PEERS[self.label]
        if find_spec(found.module.split(".")[0]) is None:
            raise ImportError(f"it is not installed: pip install {found.package}")
        refusal = found.refusal(cell)
        if refusal is not None:
            raise Unsupported(refusal)
        return found.build(cell)


@dataclass(frozen=True)
class Matched(Contender):
    """Our recipe, with the sizes that make its work that of a peer."""

    label: str
    like: str

    def ours(self, cell: Cell) -> Contender:
        """At the length of the cell."""
        return Ours(Part(name=self.label, arguments=dict(PEERS[self.like].ours(cell.length))))

    def build(self, cell: Cell) -> Run:
        """See `Contender`."""
        return self.ours(cell).build(cell)

    def needs(self, cell: Cell) -> Needs | None:
        """See `Contender`."""
        return self.ours(cell).needs(cell)


class OurProductKeys(Contender):
    """The one that is no mixer: a feed-forward layer that reads a memory."""

    label = "product_keys"

    def build(self, cell: Cell) -> Run:
        """See `Contender`."""
        if cell.way == "decode":
            raise Unsupported("it works token by token, and has no state")
        return of_layer(ProductKeys(cell.dim, 128, heads=4, top=32, width=256, normalise=False), cell)


def groups(names: Sequence[str] = ()) -> list[list[Contender]]:
    """Ours and its peers, for each of these recipes and each level; for all unless named."""
    known = list(dict.fromkeys(each.recipe for each in PEERS.values()))
    for name in names:
        if name not in known:
            raise ValueError(f"there is no peer for {name!r}: {nearest(name, known)}")
    found: dict[tuple[str, str], list[Contender]] = {}
    for each in PEERS.values():
        if not names or each.recipe in names:
            mine = OurProductKeys() if each.recipe == "product_keys" else Matched(each.recipe, each.name)
            found.setdefault((each.recipe, each.level), [mine]).append(Theirs(each.name))
    return list(found.values())


def _part(name: str, attribute: str) -> Any:
    return getattr(import_module(name), attribute)


class _Out(nn.Module):
    """A layer that ends before its last projection, and that projection: ours has it too."""

    def __init__(self, inner: nn.Module, dim: int, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.out, self.call = inner, nn.Linear(dim, dim, bias=False), call

    def forward(self, x: Tensor) -> Tensor:
        """x (b n d) -> (b n d)."""
        return self.out(self.call(self.inner, x))


# ---------------------------------------------------------------------------------------------- sparse by position
@peer("local-attention LocalMHA", "local_attention", "local", ours=lambda n: {"window": 128}, note=FILLED)
def _local(cell: Cell) -> Run:
    make = _part("local_attention", "LocalMHA")
    sizes = {"dim": cell.dim, "heads": cell.heads, "dim_head": cell.width, "causal": cell.causal}
    return of_layer(make(**sizes, window_size=128, exact_windowsize=True, use_rotary_pos_emb=False), cell)


@peer("local-attention LocalAttention", "local_attention", "local", level="kernel", ours=lambda n: {"window": 128}, note=FILLED)
def _local_heads(cell: Cell) -> Run:
    make = _part("local_attention", "LocalAttention")
    inner = make(window_size=128, causal=cell.causal, exact_windowsize=True, use_rotary_pos_emb=False, autopad=True)
    return of_heads(inner, cell, *[(cell.batch, cell.heads, cell.length, cell.width)] * 3)


@lru_cache(1)
def _compiled() -> Callable[..., Tensor]:
    flex = _part(FLEX, "flex_attention")
    made: Callable[..., Tensor] = torch.compile(flex, dynamic=False)
    return made


def _flex(cell: Cell, part: Part) -> Run:
    pattern = pattern_of(mixer_of(part, cell))
    assert pattern is not None
    blocks = block_mask(pattern, cell.length, cell.length)
    shapes = [(cell.batch, cell.heads, cell.length, cell.width)] * 3
    return of_heads(lambda q, k, v: _compiled()(q, k, v, block_mask=blocks), cell, *shapes)


NO_BACKWARD = "FlexAttention has no backward pass on the CPU"


@peer("FlexAttention window", FLEX, "local", level="kernel", ours=lambda n: {"window": 128}, training=NO_BACKWARD)
def _flex_window(cell: Cell) -> Run:
    return _flex(cell, Part(name="local", arguments={"window": 128}))


@peer("FlexAttention BigBird", FLEX, "bigbird", level="kernel", training=NO_BACKWARD)
def _flex_bigbird(cell: Cell) -> Run:
    return _flex(cell, Part(name="bigbird"))


@peer(
    "transformers Longformer", HUGGING_FACE.format("longformer"), "longformer", ours=lambda n: {"window": 256},
    causal=NOT_CAUSAL, note="lengths must be multiples of 512",
)  # fmt: skip
def _longformer(cell: Cell) -> Run:
    config = _part("transformers", "LongformerConfig")(
        hidden_size=cell.dim, num_attention_heads=cell.heads, num_hidden_layers=1, attention_window=[512],
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    if cell.length % 512:
        raise Unsupported(f"{cell.length:,} tokens are no multiple of its window of 512")
    none = torch.zeros(cell.batch, cell.length)
    given = {"is_index_masked": none < 0, "is_index_global_attn": none > 0, "is_global_attn": False}
    inner = _part(HUGGING_FACE.format("longformer"), "LongformerSelfAttention")(config, 0)
    return of_layer(_Out(inner, cell.dim, lambda inner, x: inner(x, none, **given)[0]), cell)


@peer("transformers BigBird", HUGGING_FACE.format("big_bird"), "bigbird", causal=NOT_CAUSAL)
def _bigbird(cell: Cell) -> Run:
    block = 64
    config = _part("transformers", "BigBirdConfig")(
        hidden_size=cell.dim, num_attention_heads=cell.heads, block_size=block, num_random_blocks=3,
        attention_probs_dropout_prob=0.0, max_position_embeddings=cell.length,
    )  # fmt: skip
    if cell.length % block or cell.length < 12 * block:  # with fewer, its model turns to dense attention
        raise Unsupported(f"{cell.length:,} tokens: it takes multiples of {block}, from {12 * block} on")
    real = torch.ones(cell.batch, cell.length)
    cut = real.view(cell.batch, -1, block)
    near = torch.cat((cut[:, 1:-3], cut[:, 2:-2], cut[:, 3:-1]), 2)
    band = torch.einsum("blq,blk->blqk", cut[:, 2:-2], near)[:, None]  # made once for all layers, so not timed
    inner = _part(HUGGING_FACE.format("big_bird"), "BigBirdBlockSparseAttention")(config, seed=0)
    masks = (band, real[:, None, :, None], real[:, None, None, :], cut, cut)
    return of_layer(_Out(inner, cell.dim, lambda inner, x: inner(x, *masks)[0]), cell)


@peer(
    "axial-attention", "axial_attention", "axial", mask=NO_MASK, causal=NOT_CAUSAL,
    ours=lambda n: {"width": max(1, round(n**0.5)), "form": "two"},
)  # fmt: skip
def _axial(cell: Cell) -> Run:
    side = max(1, round(cell.length**0.5))
    if cell.length % side:
        raise Unsupported(f"{cell.length:,} tokens are no whole rows of {side}")
    layer = _part("axial_attention", "AxialAttention")(
        dim=cell.dim, heads=cell.heads, num_dimensions=2, sum_axial_out=False
    )  # fmt: skip
    return of_layer(layer, cell, lambda x: layer(x.unflatten(1, (-1, side))).flatten(1, 2))


# ---------------------------------------------------------------------------------------------- sparse by content
@peer(
    "reformer-pytorch", "reformer_pytorch", "reformer", mask=LEAKS, note="hashes of later tokens show",
    ours=lambda n: {"buckets": max(2, n // 64), "chunk": 64, "rounds": 4},
)  # fmt: skip
def _reformer(cell: Cell) -> Run:
    layer = _part("reformer_pytorch", "LSHSelfAttention")(
        cell.dim, heads=cell.heads, bucket_size=64, n_hashes=4, causal=cell.causal, attend_across_buckets=False,
        allow_duplicate_attention=False,
    )  # fmt: skip
    return of_layer(layer, cell)


@peer(
    "routing-transformer", "routing_transformer.routing_transformer", "routing", mask=LEAKS,
    note="clusters are chosen by later tokens too",
    ours=lambda n: {"clusters": max(1, n // 128)},
)  # fmt: skip
def _routing(cell: Cell) -> Run:
    layer = _part("routing_transformer.routing_transformer", "SelfAttention")(
        cell.dim, 1, cell.length, cell.heads, 0, 128, causal=cell.causal, rel_pos_emb=False
    )
    layer.train()(torch.randn(1, cell.length, cell.dim))  # centroids begin with the first batch
    return of_layer(layer, cell, lambda x: layer(x)[0])


@peer("sinkhorn-transformer", "sinkhorn_transformer", "sinkhorn", mask=LEAKS, ours=lambda n: {"block": 64})
def _sinkhorn(cell: Cell) -> Run:
    make = _part("sinkhorn_transformer", "SinkhornSelfAttention")
    return of_layer(make(cell.dim, 64, cell.length, heads=cell.heads, causal=cell.causal), cell)


# ---------------------------------------------------------------------------------------------- linearised
@peer(
    "performer-pytorch", "performer_pytorch", "performer", mask=LEAKS, note="the greatest of later keys shows",
    ours=lambda n: {"features": 256},
)  # fmt: skip
def _performer(cell: Cell) -> Run:
    layer = _part("performer_pytorch", "SelfAttention")(
        cell.dim, causal=cell.causal, heads=cell.heads, dim_head=cell.width, nb_features=256
    )
    return of_layer(layer, cell)


@peer("linear-attention-transformer", "linear_attention_transformer.linear_attention_transformer", "efficient")
def _efficient(cell: Cell) -> Run:
    make = _part("linear_attention_transformer.linear_attention_transformer", "SelfAttention")
    return of_layer(make(cell.dim, heads=cell.heads, causal=cell.causal), cell)


FAST = "fast_transformers"


def _fast(cell: Cell, *, kind: str, **given: Any) -> Run:
    """Heads stand behind tokens there, (b n h e)."""
    masking = import_module(f"{FAST}.masking")
    inner = _part(f"{FAST}.builders", "AttentionBuilder").from_kwargs(
        query_dimensions=cell.width, attention_dropout=0.0, **given
    ).get(kind)  # fmt: skip
    n = cell.length
    seen = masking.TriangularCausalMask(n) if kind == "causal-linear" else masking.FullMask(n)
    real = masking.LengthMask(torch.full((cell.batch,), n))
    if cell.level == "layer":
        layer = _part(f"{FAST}.attention.attention_layer", "AttentionLayer")(inner, cell.dim, cell.heads)
        return of_layer(layer, cell, lambda x: layer(x, x, x, seen, real, real))
    return of_heads(lambda q, k, v: inner(q, k, v, seen, real, real), cell, *[(cell.batch, n, cell.heads, cell.width)] * 3)


def _linear(cell: Cell) -> Run:
    return _fast(cell, kind="causal-linear" if cell.causal else "linear")


for _level in ("layer", "kernel"):
    peer(f"pytorch-fast-transformers linear, {_level}", f"{FAST}.builders", "linear", level=_level)(_linear)


@peer(
    "pytorch-fast-transformers clustered", f"{FAST}.builders", "clustered", causal=NOT_CAUSAL,
    ours=lambda n: {"clusters": 100, "bits": 63, "iterations": 10},
)  # fmt: skip
def _clustered(cell: Cell) -> Run:
    return _fast(cell, kind="clustered", clusters=100, bits=63, iterations=10)


@peer(
    "pytorch-fast-transformers improved-clustered", f"{FAST}.builders", "clustered_improved", causal=NOT_CAUSAL,
    ours=lambda n: {"clusters": 100, "top": 32, "bits": 63, "iterations": 10},
)  # fmt: skip
def _improved(cell: Cell) -> Run:
    return _fast(cell, kind="improved-clustered", clusters=100, bits=63, iterations=10, topk=32)


# ---------------------------------------------------------------------------------------------- compressed
@peer("linformer", "linformer", "linformer", mask=NO_MASK, causal=NOT_CAUSAL, ours=lambda n: {"rank": min(256, n)})
def _linformer(cell: Cell) -> Run:
    make = _part("linformer", "LinformerSelfAttention")
    return of_layer(make(cell.dim, cell.length, k=min(256, cell.length), heads=cell.heads), cell)


@peer("nystrom-attention", "nystrom_attention", "nystrom", causal=NOT_CAUSAL, ours=lambda n: {"landmarks": 64})
def _nystrom(cell: Cell) -> Run:
    layer = _part("nystrom_attention", "NystromAttention")(
        cell.dim, dim_head=cell.width, heads=cell.heads, num_landmarks=64, pinv_iterations=6, residual=False
    )
    return of_layer(layer, cell)


@peer("memory-compressed-attention", "memory_compressed_attention", "memory_compressed", ours=lambda n: {"stride": 3})
def _memory_compressed(cell: Cell) -> Run:
    make = _part("memory_compressed_attention", "MemoryCompressedAttention")
    return of_layer(make(cell.dim, heads=cell.heads, causal=cell.causal, compression_factor=3), cell)


@peer(
    "transformers Informer", HUGGING_FACE.format("informer"), "prob_sparse", mask=NO_MASK,
    causal="later tokens choose which queries attend",
    ours=lambda n: {"factor": 5},
)  # fmt: skip
def _informer(cell: Cell) -> Run:
    make = _part(HUGGING_FACE.format("informer"), "InformerProbSparseAttention")
    layer = make(cell.dim, cell.heads, sampling_factor=5)
    return of_layer(layer, cell, lambda x: layer(x)[0])


# ---------------------------------------------------------------------------------------------- without attention, and memory
@peer("transformers FNet", HUGGING_FACE.format("fnet"), "fnet", mask=NO_MASK, causal=NOT_CAUSAL)
def _fnet(cell: Cell) -> Run:
    layer = _part(HUGGING_FACE.format("fnet"), "FNetBasicFourierTransform")(
        _part("transformers", "FNetConfig")(hidden_size=cell.dim)
    )
    return of_layer(layer, cell, lambda x: layer(x)[0])


@peer("mlp-mixer-pytorch", "mlp_mixer_pytorch.mlp_mixer_pytorch", "mlp_mixer", mask=NO_MASK, causal=NOT_CAUSAL)
def _mlp_mixer(cell: Cell) -> Run:
    make = _part("mlp_mixer_pytorch.mlp_mixer_pytorch", "FeedForward")
    hidden = mixer_of(Part(name="mlp_mixer"), cell, device="meta").up.out_features  # type: ignore[union-attr]
    return of_layer(make(cell.length, hidden, 0.0, partial(nn.Conv1d, kernel_size=1)), cell)


@peer("g-mlp-pytorch", "g_mlp_pytorch.g_mlp_pytorch", "gmlp", mask=NO_MASK)
def _gmlp(cell: Cell) -> Run:
    hidden = mixer_of(Part(name="gmlp"), cell, device="meta").up.out_features  # type: ignore[union-attr]
    make = _part("g_mlp_pytorch.g_mlp_pytorch", "gMLPBlock")
    return of_layer(make(dim=cell.dim, dim_ff=hidden, seq_len=cell.length, causal=cell.causal), cell)


@peer("product-key-memory", "product_key_memory", "product_keys")
def _product_keys(cell: Cell) -> Run:
    make = _part("product_key_memory", "PKM")
    return of_layer(make(cell.dim, heads=4, num_keys=128, topk=32, dim_head=128), cell)


@peer("x-transformers", "x_transformers", "vanilla")
def _x_transformers(cell: Cell) -> Run:
    make = _part("x_transformers", "Attention")
    layer = make(dim=cell.dim, heads=cell.heads, dim_head=cell.width, causal=cell.causal, flash=True)
    return of_layer(layer, cell)
