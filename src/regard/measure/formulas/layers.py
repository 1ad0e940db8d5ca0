"""Layers of torch, blocks, and what projects to heads."""

from __future__ import annotations

from math import prod

from torch import nn

from regard.block import Block
from regard.heads import Shared
from regard.measure.work import Call, Work, formula, kept, product, together, work
from regard.mixer import MultiHead
from regard.mixers.etc import ByKind, Same
from regard.residual import ReZero


@formula(nn.Linear)
def _linear(module: nn.Linear, call: Call) -> Work:
    """x W: O(n d d').  The weight is no activation, so that only x is kept."""
    rows, d = call.rows, module.in_features
    return product(1, rows, d, module.out_features, saved=rows * d)


@formula(nn.Embedding)
def _embedding(module: nn.Embedding, call: Call) -> Work:
    """A table is looked up: no product.  The numbers of the tokens are kept, of 8 bytes each."""
    return kept(2 * call.rows)


@formula(nn.Identity, nn.Dropout)
def _nothing(module: nn.Module, call: Call) -> Work:
    return Work()


@formula(nn.ReLU, nn.Tanh, nn.Sigmoid)
def _from_output(module: nn.Module, call: Call) -> Work:
    """Its result is kept by whoever reads it."""
    return Work()


@formula(nn.Sequential)
def _sequential(module: nn.Sequential, call: Call) -> Work:
    """One after the other.  An activation keeps what the layer before it gave."""
    total, width = Work(), 0
    for part in module:
        total = total + (kept(call.rows * width) if isinstance(part, nn.GELU | nn.SiLU) else work(part, call))
        width = part.out_features if isinstance(part, nn.Linear) else width
    return total


@formula(nn.LayerNorm, nn.RMSNorm)
def _torch_norm(module: nn.LayerNorm, call: Call) -> Work:
    return kept(call.rows * (prod(module.normalized_shape) + 2))


@formula(Block)
def _block(module: Block, call: Call) -> Work:
    """Mixer, cross-attention and feed-forward layer, each with what stands around it; m counts the context of `cross` alone."""
    own = call.of(call.n)
    parts = {
        "mixer": module.mixer, "ffn": module.ffn, "around_mixer": module.around_mixer, "around_cross": module.around_cross,
        "around_ffn": module.around_ffn,
    }  # fmt: skip
    look = {} if module.cross is None else {"cross": work(module.cross, call)}
    scaled = sum(isinstance(part, ReZero) for part in module.children())  # each keeps what it multiplies, (b n d)
    total = together(**{name: work(part, own) for name, part in parts.items() if part is not None}, **look)
    return total + kept(scaled * call.rows * module.dim)


# ---------------------------------------------------------------------------------------------- what projects to heads
@formula(Shared)
def _shared(module: Shared, call: Call) -> Work:
    """One projection for all heads; what mixes it is elementwise."""
    mixed = 0 if module.mix is None else call.rows * module.weight.out_features
    return work(module.weight, call) + kept(mixed)


@formula(ByKind)
def _by_kind(module: ByKind, call: Call) -> Work:
    first = min(module.globals, call.n)
    return work(module.first, call.of(first)) + work(module.rest, call.of(call.n - first))


@formula(Same)
def _same(module: Same, call: Call) -> Work:
    return work(module.other[0], call)


def out_width(module: nn.Module, d: int) -> int:
    """How wide a projection makes its tokens."""
    if isinstance(module, Shared):
        return module.heads * module.weight.out_features
    return module.out_features if isinstance(module, nn.Linear) else d


def heads_call(module: MultiHead, call: Call) -> Call:
    """The call that the attention inside sees."""
    groups = module.kv_heads
    e, f = out_width(module.q, module.dim) // module.heads, out_width(module.v, module.dim) // groups
    return Call(call.b, call.n, call.m, module.heads, e, f, groups, module.causal)


@formula(MultiHead)
def _multi_head(module: MultiHead, call: Call) -> Work:
    """Projections O(n d²), and the attention.  Kept: x once for all projections, and the heads side by side."""
    keys = [] if module.inner.keyless else [module.k]
    ask = work(module.q, call)
    if module.inner.keyless and call.m != call.n:
        ask = ask + work(module.q, call.of(call.m))
    read = sum((work(part, call.of(call.m)) for part in (*keys, module.v)), Work())
    inside = work(module.inner, heads_call(module, call))
    out = work(module.out, call)
    turned = 0 if module.turn is None else call.b * (call.n + call.m) * out_width(module.q, module.dim)
    return together(project=(ask + read + out).keeping(_shared_tokens(module, call) + turned), attend=inside)


def _shared_tokens(module: MultiHead, call: Call) -> int:
    """x once, whoever reads it; what is not projected is x itself, which the attention inside has counted again."""
    reads = [(module.q, call.n), (module.v, call.m)] + ([] if module.inner.keyless else [(module.k, call.m)])
    again = sum(tokens for part, tokens in reads if isinstance(part, nn.Identity))
    tokens = call.n if call.m == call.n else call.n + call.m
    return (
        call.b * module.dim * (tokens - again) + call.rows * out_width(module.v, module.dim) // module.kv_heads * module.heads
    )
