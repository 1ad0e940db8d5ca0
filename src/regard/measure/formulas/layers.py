"""Layers of torch, blocks, and what projects to heads."""

from __future__ import annotations

from math import prod

from torch import nn

from regard.block import Block
from regard.head_mixing import SharedProjection
from regard.measure.work import CallShape, ModuleCost, formula, kept, module_cost, product, together
from regard.mixer import MultiHead
from regard.mixers.etc import GlobalLocalLinear, SharedModule
from regard.residual import ReZero


@formula(nn.Linear)
def _linear(module: nn.Linear, call: CallShape) -> ModuleCost:
    """x W: O(n d d').  The weight is no activation, so that only x is kept."""
    rows, d = call.rows, module.in_features
    return product(1, rows, d, module.out_features, saved=rows * d)


@formula(nn.Embedding)
def _embedding(module: nn.Embedding, call: CallShape) -> ModuleCost:
    """A table is looked up: no product.  The numbers of the tokens are kept, of 8 bytes each."""
    return kept(2 * call.rows)


@formula(nn.Identity, nn.Dropout)
def _nothing(module: nn.Module, call: CallShape) -> ModuleCost:
    return ModuleCost()


@formula(nn.ReLU, nn.Tanh, nn.Sigmoid)
def _from_output(module: nn.Module, call: CallShape) -> ModuleCost:
    """Its result is kept by whoever reads it."""
    return ModuleCost()


@formula(nn.Sequential)
def _sequential(module: nn.Sequential, call: CallShape) -> ModuleCost:
    """One after the other.  An activation keeps what the layer before it gave."""
    total, width = ModuleCost(), 0
    for part in module:
        total = total + (
            kept(call.rows * width)
            if isinstance(part, nn.GELU | nn.SiLU)
            else module_cost(part, call)
        )
        width = part.out_features if isinstance(part, nn.Linear) else width
    return total


@formula(nn.LayerNorm, nn.RMSNorm)
def _torch_norm(module: nn.LayerNorm, call: CallShape) -> ModuleCost:
    return kept(call.rows * (prod(module.normalized_shape) + 2))


@formula(Block)
def _block(module: Block, call: CallShape) -> ModuleCost:
    """Mixer, cross-attention and feed-forward layer, each with what stands around it; m counts the context of `cross` alone."""
    own = call.of(call.n)
    parts = {
        "mixer": module.mixer,
        "ffn": module.ffn,
        "around_mixer": module.mixer_residual,
        "around_cross": module.cross_residual,
        "around_ffn": module.ffn_residual,
    }
    look = {} if module.cross is None else {"cross": module_cost(module.cross, call)}
    scaled = sum(
        isinstance(part, ReZero) for part in module.children()
    )  # each keeps what it multiplies, (b n d)
    total = together(
        **{name: module_cost(part, own) for name, part in parts.items() if part is not None}, **look
    )
    return total + kept(scaled * call.rows * module.dim)


# ---------------------------------------------------------------------------------------------- what projects to heads
@formula(SharedProjection)
def _shared(module: SharedProjection, call: CallShape) -> ModuleCost:
    """One projection for all heads; what mixes it is elementwise."""
    mixed = 0 if module.mix is None else call.rows * module.weight.out_features
    return module_cost(module.weight, call) + kept(mixed)


@formula(GlobalLocalLinear)
def _by_kind(module: GlobalLocalLinear, call: CallShape) -> ModuleCost:
    first = min(module.globals, call.n)
    return module_cost(module.first, call.of(first)) + module_cost(
        module.rest, call.of(call.n - first)
    )


@formula(SharedModule)
def _same(module: SharedModule, call: CallShape) -> ModuleCost:
    return module_cost(module.other[0], call)


def out_width(module: nn.Module, d: int) -> int:
    """How wide a projection makes its tokens."""
    if isinstance(module, SharedProjection):
        return module.heads * module.weight.out_features
    return module.out_features if isinstance(module, nn.Linear) else d


def heads_call(module: MultiHead, call: CallShape) -> CallShape:
    """The call that the attention inside sees."""
    groups = module.kv_heads
    e, f = (
        out_width(module.q, module.dim) // module.heads,
        out_width(module.v, module.dim) // groups,
    )
    return CallShape(call.b, call.n, call.m, module.heads, e, f, groups, module.causal)


@formula(MultiHead)
def _multi_head(module: MultiHead, call: CallShape) -> ModuleCost:
    """Projections O(n d²), and the attention.  Kept: x once for all projections, and the heads side by side."""
    keys = [] if module.inner.shared_qk else [module.k]
    ask = module_cost(module.q, call)
    if module.inner.shared_qk and call.m != call.n:
        ask = ask + module_cost(module.q, call.of(call.m))
    read = sum((module_cost(part, call.of(call.m)) for part in (*keys, module.v)), ModuleCost())
    inside = module_cost(module.inner, heads_call(module, call))
    out = module_cost(module.out, call)
    turned = (
        0 if module.rotary is None else call.b * (call.n + call.m) * out_width(module.q, module.dim)
    )
    return together(
        project=(ask + read + out).keeping(_shared_tokens(module, call) + turned), attend=inside
    )


def _shared_tokens(module: MultiHead, call: CallShape) -> int:
    """x once, whoever reads it; what is not projected is x itself, which the attention inside has counted again."""
    reads = [(module.q, call.n), (module.v, call.m)] + (
        [] if module.inner.shared_qk else [(module.k, call.m)]
    )
    again = sum(tokens for part, tokens in reads if isinstance(part, nn.Identity))
    tokens = call.n if call.m == call.n else call.n + call.m
    return (
        call.b * module.dim * (tokens - again)
        + call.rows * out_width(module.v, module.dim) // module.kv_heads * module.heads
    )
