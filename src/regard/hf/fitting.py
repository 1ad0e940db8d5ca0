"""Build a mixer for the place of an attention layer.

It takes over the projections, and new weights start near softmax attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from regard import registry
from regard.attentions.adaptive_span import AdaptiveSpanAttention
from regard.attentions.nystrom import NystromAttention
from regard.compression import ConvCompression, LengthProjection
from regard.errors import Unsupported
from regard.hf.families.base import AttentionWeights, LinearWeights
from regard.mixer import Mixer, MultiHead, SharedQKAttention
from regard.mixers import Longformer, with_position
from regard.mixers.bp_transformer import BPTransformer
from regard.models.config import ModuleSpec

PROJECTIONS = ("q", "k", "v")


def fit_mixer(
    weights: AttentionWeights, spec: ModuleSpec, *, layer: int, seed: int = 0
) -> tuple[Mixer, tuple[str, ...]]:
    """Build the mixer of a spec for the layer that the weights are from, without output projection.

    Returns:
        The mixer, and which of "q", "k" and "v" it took over.
    """
    mixer = build_mixer(weights, spec, layer, seed)
    if weights.pads and not mixer.can.mask:
        raise Unsupported(
            f"{spec.name} does not support the padding of this model: {mixer.can.reason('mask')}"
        )
    kept = take_over_projections(mixer, weights)
    for module in mixer.modules():
        initialize = INITIALIZERS.get(type(module))
        if initialize is not None:
            with torch.no_grad():
                initialize(module, spec.arguments)
    for position in (weights.rotary, weights.prior):
        mixer = mixer if position is None else with_position(mixer, deepcopy(position))
    mixer.name = spec.name
    return mixer.to(weights.q.weight.device, weights.q.weight.dtype), kept


def build_mixer(weights: AttentionWeights, spec: ModuleSpec, layer: int, seed: int) -> Mixer:
    """Build the recipe with what the model determines.

    New weights depend on the seed and the layer only.
    """
    recipe = registry.get_recipe(spec.name)
    parameters, arguments = recipe.parameters, dict(spec.arguments)
    for name in ("dim", "heads", *(("head_dim", "bias", "qk_norm") if recipe.is_attention else ())):
        if name in arguments:
            raise ValueError(
                f"{name} is set by the model and cannot be an argument of {spec.name}."
            )
    if parameters["heads"].default is inspect.Parameter.empty:
        arguments["heads"] = weights.heads
    arguments.setdefault("causal", bool(weights.causal))
    if weights.causal is not None and arguments["causal"] != weights.causal:
        raise ValueError(f"causal is set by the model: it is {weights.causal} here.")
    if "length" in parameters and weights.length is not None:
        arguments.setdefault("length", weights.length)
    width = weights.q.weight.shape[0]  # of all heads together
    head_dim = width // weights.heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + layer)
        if not recipe.is_attention:
            if width != weights.dim:
                raise Unsupported(
                    f"{spec.name} is not an attention recipe, which {weights.heads} heads of width "
                    f"{head_dim} in a model of width {weights.dim} require."
                )
            mixer = registry.create(spec.name, dim=width, **arguments)
            if mixer.requires_stack:
                raise Unsupported(
                    f"{spec.name} needs the stack {mixer.stack_name!r}, and the layers of this "
                    "model pass nothing on but tokens."
                )
            return mixer
        model_kv_heads = weights.kv_heads or weights.heads
        kv_heads = arguments.pop("kv_heads", model_kv_heads)
        if model_kv_heads % kv_heads:
            raise ValueError(
                f"kv_heads of {spec.name} must divide the {model_kv_heads} key and value heads of "
                f"the model, not {kv_heads}."
            )
        attention = registry.create_attention(spec.name, head_dim=head_dim, **arguments)
    with torch.device("meta"):  # the projections of the model take the place of these
        return MultiHead(
            weights.dim,
            weights.heads,
            attention,
            head_dim=head_dim,
            kv_heads=weights.heads if isinstance(attention, SharedQKAttention) else kv_heads,
            causal=arguments["causal"],
        )


# -------------------------------------------------------------------------------------- projections
def take_over_projections(mixer: Mixer, weights: AttentionWeights) -> tuple[str, ...]:
    """Put the model's q, k and v into the mixer, and remove its output projection."""
    owners = [
        m
        for m in mixer.modules()
        if isinstance(getattr(m, "v", None), nn.Linear) and hasattr(m, "out")
    ]
    if sum(isinstance(owner.out, nn.Linear) for owner in owners) > 1:
        return ()  # several attentions in a row: none of them is the old one

    # Mixers scale scores by 1/√e: other scales go into the queries.
    q, head_dim = weights.q, weights.q.weight.shape[0] // weights.heads
    factor = 1.0 if weights.scale is None else weights.scale * head_dim**0.5
    if factor != 1.0:
        q = LinearWeights(q.weight * factor, None if q.bias is None else q.bias * factor)
    kept: set[str] = set()
    for owner in owners:
        q_k_v = (q, weights.k, weights.v)
        if weights.global_qkv and isinstance(mixer, Longformer) and owner is mixer.global_heads:
            q_k_v = weights.global_qkv
        new = dict(zip(PROJECTIONS, q_k_v, strict=True))
        took_queries = replace_projection(owner, "q", new["q"], weights)
        if took_queries:
            kept.add("q")
        if took_queries and replace_projection(
            owner, "k", new["k"], weights
        ):  # keys only with their queries
            kept.add("k")
        if replace_projection(owner, "v", new["v"], weights):
            kept.add("v")
        width = weights.q.weight.shape[0]
        if isinstance(owner.out, nn.Linear) and owner.out.in_features in (
            width,
            owner.out.out_features,
        ):
            owner.out = nn.Identity()
    return tuple(name for name in PROJECTIONS if name in kept)


def replace_projection(
    owner: nn.Module, name: str, new: LinearWeights, weights: AttentionWeights
) -> bool:
    """Replace a projection of a mixer by that of the model, and return whether the sizes allow it.

    If the mixer has fewer key and value heads, each becomes the mean of those that it replaces.
    """
    own = getattr(owner, name, None)
    if not isinstance(own, nn.Linear):
        return False
    head_dim = weights.q.weight.shape[0] // weights.heads
    kv_heads, own_heads = weights.kv_heads or weights.heads, own.out_features // head_dim
    if (
        name != "q"
        and isinstance(owner, MultiHead)
        and own.out_features in (weights.heads * head_dim, owner.kv_heads * head_dim)
    ):
        if own_heads > kv_heads and isinstance(owner.inner, SharedQKAttention):
            repeat = own_heads // kv_heads  # keys have all heads, so values must have them too
            rows = [
                None
                if t is None
                else t.unflatten(0, (kv_heads, -1)).repeat_interleave(repeat, 0).flatten(0, 1)
                for t in new
            ]
            new = LinearWeights(*rows)  # type: ignore[arg-type]
        elif own_heads > kv_heads:
            owner.kv_heads = kv_heads
        elif kv_heads % own_heads:
            return False
        elif own_heads < kv_heads:
            shape = (own_heads, kv_heads // own_heads, head_dim)
            means = [
                None if t is None else t.unflatten(0, shape).mean(1).flatten(0, 1) for t in new
            ]
            new = LinearWeights(*means)  # type: ignore[arg-type]
    elif own.out_features != new.weight.shape[0]:
        return False
    setattr(owner, name, new.to_linear())
    return True


# -------------------------------------------------------------------------------------- new weights
def average_segments(compression: Any, arguments: dict[str, Any]) -> None:
    """Linformer: each row of E and F averages a segment of the sequence.

    With rank = length this is exact attention.
    """
    rank, length = compression.rank, compression.length
    segment = torch.arange(length) * rank // length
    rows = torch.nn.functional.one_hot(segment, rank).T.to(compression.e)
    for table in (compression.e, compression.f):
        table.copy_(rows / rows.sum(1, keepdim=True))


def average_blocks(compression: Any, arguments: dict[str, Any]) -> None:
    """Memory-compressed attention: the convolutions average the tokens of a block."""
    for conv in (compression.k, compression.v):
        width = conv.weight.shape[1]
        mean = (torch.eye(width) / compression.stride)[:, :, None]
        conv.weight.copy_(mean.repeat(conv.groups, 1, compression.stride))
        if conv.bias is not None:
            conv.bias.zero_()


def widen_spans(attention: Any, arguments: dict[str, Any]) -> None:
    """Adaptive spans start at their maximum unless `start` is given."""
    if "start" not in arguments:
        attention.share.fill_(1.0)
        attention.initial_share = 1.0


def zero_convolution(attention: Any, arguments: dict[str, Any]) -> None:
    """Nyströmformer: the convolution adds nothing."""
    if attention.conv is not None:
        attention.conv.weight.zero_()


def zero_labels(mixer: Any, arguments: dict[str, Any]) -> None:
    """BP-Transformer: the position labels of spans are zero."""
    mixer.labels.zero_()


INITIALIZERS: dict[type[nn.Module], Callable[[Any, dict[str, Any]], None]] = {
    LengthProjection: average_segments,
    ConvCompression: average_blocks,
    AdaptiveSpanAttention: widen_spans,
    NystromAttention: zero_convolution,
    BPTransformer: zero_labels,
}
