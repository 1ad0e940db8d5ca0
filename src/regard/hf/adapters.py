"""Adapters: where the projections of known attentions are, how they are called, and how masks reach them.

One entry a class, by its name, so that nothing is imported to know it.  Others are added by `ADAPTERS["MyAttention"] = ...`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.hf.modules import AttentionWeights, LinearWeights, SwappedAttention, linear_weights
from regard.hf.padding_masks import check_causal_mask, real_tokens
from regard.mixer import MultiHead
from regard.position.bias import T5Bias


class AttentionAdapter(NamedTuple):
    """How to swap a kind of attention.

    parts   the module, and the first of its kind in the model -> what it is made of
    call    as the old `forward`, with the `SwappedAttention` in place of self
    suits   whether a module of that class is meant: not where it asks another sequence
    rest    names of sub-modules that go on working
    passed  names of methods that the model calls on it, which still reach the old module
    """

    parts: Callable[[nn.Module, nn.Module], AttentionWeights]
    call: Callable[..., Any]
    suits: Callable[[nn.Module], bool] = lambda module: True
    rest: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()


def positions_of(module: Any) -> int | None:
    """How many the model has."""
    return getattr(module.config, "max_position_embeddings", None)


# ---------------------------------------------------------------------------------------------- BERT and its kin
def bert_parts(module: Any, first: Any) -> AttentionWeights:
    """Queries, keys and values; the last projection stands outside, with the norm."""
    q, k, v = map(linear_weights, (module.query, module.key, module.value))
    return AttentionWeights(
        q.weight.shape[1],
        module.num_attention_heads,
        q,
        k,
        v,
        causal=bool(getattr(module, "is_causal", False)),
        length=positions_of(module),
    )


def bert_call(
    self: SwappedAttention,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """-> the heads side by side; maps are gathered by `run`."""
    mask = real_tokens(attention_mask, hidden_states.shape[1], causal=self.mixer.causal)
    return self.run(hidden_states, mask, cache=own_cache(past_key_values)), None


def own_cache(cache: Any) -> Any:
    """That of self-attention, where there are two."""
    return getattr(cache, "self_attention_cache", cache)


def distilbert_parts(module: Any, first: Any) -> AttentionWeights:
    """All four inside."""
    q, k, v, out = map(linear_weights, (module.q_lin, module.k_lin, module.v_lin, module.out_lin))
    return AttentionWeights(module.dim, module.n_heads, q, k, v, out, length=positions_of(module))


def vit_parts(module: Any, first: Any) -> AttentionWeights:
    """All four inside; patches are never left out."""
    q, k, v, out = map(linear_weights, (module.q_proj, module.k_proj, module.v_proj, module.o_proj))
    image, patch = both(module.config.image_size), both(module.config.patch_size)
    length = (image[0] // patch[0]) * (image[1] // patch[1]) + 1  # and the token for the class
    return AttentionWeights(
        q.weight.shape[1], module.num_attention_heads, q, k, v, out, length=length, pads=False
    )


def both(size: Any) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


# ---------------------------------------------------------------------------------------------- GPT-2
def gpt2_parts(module: Any, first: Any) -> AttentionWeights:
    """Queries, keys and values in one, (in out) as all its matrices."""
    thirds = zip(module.c_attn.weight.T.chunk(3), module.c_attn.bias.chunk(3), strict=True)
    q, k, v = (LinearWeights(weight, bias) for weight, bias in thirds)
    out = LinearWeights(module.c_proj.weight.T, module.c_proj.bias)
    return AttentionWeights(
        module.embed_dim,
        module.num_heads,
        q,
        k,
        v,
        out,
        causal=True,
        length=positions_of(module),
        scale=module.scaling,
    )


def gpt2_call(
    self: SwappedAttention,
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """-> what is added to the stream, with its dropout; maps are gathered by `run`."""
    mask = real_tokens(attention_mask, hidden_states.shape[1], causal=True)
    y = self.run(hidden_states, mask, cache=own_cache(past_key_values))
    return F.dropout(y, self.old.resid_dropout.p, self.training), None  # type: ignore[union-attr, arg-type]


# ---------------------------------------------------------------------------------------------- T5
def t5_parts(module: Any, first: Any) -> AttentionWeights:
    """Scores are not scaled, and a number for each distance is added; the first layer has the table of all."""
    q, k, v, out = map(linear_weights, (module.q, module.k, module.v, module.o))
    table = first.relative_attention_bias.weight
    prior = T5Bias(
        module.n_heads,
        buckets=first.relative_attention_num_buckets,
        max_distance=first.relative_attention_max_distance,
    ).to(table)
    prior.table.data.copy_(table.detach().T)
    return AttentionWeights(module.d_model, module.n_heads, q, k, v, out, scale=1.0, prior=prior)


def t5_call(
    self: SwappedAttention,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Any = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """-> what is added to the stream, and the numbers of distances for layers that were left as they were."""
    n, old = hidden_states.shape[1], self.old
    y = self.run(hidden_states, real_tokens(mask, n, causal=False))
    if self.partial and position_bias is None and old.has_relative_attention_bias:
        position_bias = old.compute_bias(n, n, device=y.device)  # type: ignore[operator]
    return y, position_bias, None


# ---------------------------------------------------------------------------------------------- with own sparse attention
def longformer_parts(module: Any, first: Any) -> AttentionWeights:
    """As BERT, and a second set for marked tokens."""
    q, k, v = map(linear_weights, (module.query, module.key, module.value))
    a, b, c = map(linear_weights, (module.query_global, module.key_global, module.value_global))
    return AttentionWeights(
        module.embed_dim, module.num_heads, q, k, v, length=positions_of(module), marked=(a, b, c)
    )


def longformer_call(
    self: SwappedAttention,
    hidden_states: Tensor,
    attention_mask: Any = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """Tokens with global attention are marked, for mixers that know such."""
    if output_attentions:
        raise Unsupported(
            "Longformer's maps are as wide as its own window, so that a swapped layer has none of that form"
        )
    mask = None if is_index_masked is None or not bool(is_index_masked.any()) else ~is_index_masked
    return (
        self.run(
            hidden_states,
            mask,
            global_attention_mask=is_index_global_attn if is_global_attn else None,
        ),
    )


def bigbird_parts(module: Any, first: Any) -> AttentionWeights:
    """What BERT has, one level deeper: BigBird changes its inner module by itself where texts are short."""
    inner = module.self
    q, k, v = map(linear_weights, (inner.query, inner.key, inner.value))
    causal, length = bool(module.config.is_decoder), positions_of(module)
    return AttentionWeights(
        q.weight.shape[1], inner.num_attention_heads, q, k, v, causal=causal, length=length
    )


def bigbird_call(
    self: SwappedAttention,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *rest: Any,
    to_mask: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Its two kinds bring two masks; the norm behind is part of the module."""
    given = attention_mask if to_mask is None else to_mask > 0
    mask = real_tokens(given, hidden_states.shape[1], causal=self.mixer.causal)
    y = self.run(hidden_states, mask, cache=own_cache(past_key_values))
    return self.rest["output"](y, hidden_states), None


# ---------------------------------------------------------------------------------------------- torch
def torch_parts(module: Any, first: Any) -> AttentionWeights:
    """nn.MultiheadAttention: three projections in one, where they are as wide."""
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise Unsupported(
            "its keys and values have a width of their own, or a token is added to them: no mixer does that"
        )
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        LinearWeights(w, b) for w, b in zip(module.in_proj_weight.chunk(3), biases, strict=True)
    )
    return AttentionWeights(
        module.embed_dim, module.num_heads, q, k, v, linear_weights(module.out_proj), causal=None
    )


def torch_call(
    self: SwappedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """-> the tokens, in the order of dimensions that they came in, and the map (b n m), or (b h n m), where it is asked for."""
    if key is not value:
        raise Unsupported("keys and values come from two sequences: a mixer asks one")
    x, context = ready(query, self), None if key is query else ready(key, self)
    check_causal_mask(attn_mask, x.shape[1], causal=self.mixer.causal, told=is_causal)
    mask = None if key_padding_mask is None else padding(key_padding_mask).view(x.shape[0], -1)
    y = self.run(x, mask, context=context)
    maps = (
        self.mixer.attention_map(x, context, mask=mask)
        if need_weights and self.mixer.can.maps
        else None
    )
    maps = maps.mean(1) if maps is not None and average_attn_weights else maps
    if query.dim() == 2:
        return y.squeeze(0), None if maps is None else maps.squeeze(0)
    return y if self.batch_first else y.transpose(0, 1), maps


def ready(x: Tensor, self: SwappedAttention) -> Tensor:
    """Tokens as (b n d)."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if self.batch_first else x.transpose(0, 1)


def padding(mask: Tensor) -> Tensor:
    """Theirs is True, or -inf, where a token is left out."""
    return mask == 0 if mask.is_floating_point() else ~mask


# ---------------------------------------------------------------------------------------------- Regard
def own_parts(module: Any, first: Any) -> AttentionWeights:
    """A MultiHead of ours."""
    if not isinstance(module, MultiHead) or not all(
        isinstance(getattr(module, n, None), nn.Linear) for n in ("q", "k", "v", "out")
    ):
        raise Unsupported(
            f"{module.name} has no queries, keys, values and last projection to take over: only a MultiHead has"
        )
    q, k, v, out = map(linear_weights, (module.q, module.k, module.v, module.out))
    inner: Any = module.inner
    return AttentionWeights(
        module.dim,
        module.heads,
        q,
        k,
        v,
        out,
        causal=module.causal,
        length=module.length,
        scale=getattr(inner, "scale", None),
        kv_heads=module.kv_heads,
        prior=getattr(inner, "prior", None),
        rotary=module.rotary,
        pads=module.can.mask,
    )


def known(module: nn.Module) -> AttentionAdapter | None:
    """How to swap a module, by its class or one that it inherits from."""
    for kind in type(module).__mro__:
        name = kind.__name__
        if name in ADAPTERS and (
            name not in BUILT_IN or kind.__module__.partition(".")[0] in HOMES
        ):
            return ADAPTERS[name]
    return None


BERT = AttentionAdapter(bert_parts, bert_call)
ADAPTERS: dict[str, AttentionAdapter] = {
    **{
        f"{name}SelfAttention": BERT
        for name in (
            "Bert",
            "Roberta",
            "XLMRoberta",
            "XLMRobertaXL",
            "RobertaPreLayerNorm",
            "Camembert",
            "Electra",
            "Ernie",
            "BertGeneration",
            "Data2VecText",
        )
    },
    "DistilBertSelfAttention": AttentionAdapter(distilbert_parts, bert_call),
    "ViTAttention": AttentionAdapter(vit_parts, bert_call),
    "GPT2Attention": AttentionAdapter(
        gpt2_parts, gpt2_call, lambda module: not module.is_cross_attention
    ),
    "T5Attention": AttentionAdapter(t5_parts, t5_call, lambda module: not module.is_decoder),
    "LongformerSelfAttention": AttentionAdapter(longformer_parts, longformer_call),
    "BigBirdAttention": AttentionAdapter(
        bigbird_parts, bigbird_call, rest=("output",), passed=("set_attention_type",)
    ),
    "MultiheadAttention": AttentionAdapter(torch_parts, torch_call),
}
BUILT_IN = frozenset(ADAPTERS)
HOMES = (
    "transformers",
    "torch",
)  # whose classes are meant by these names: others may be called alike
OWN = AttentionAdapter(own_parts, lambda self: None)  # ours are called as mixers are
