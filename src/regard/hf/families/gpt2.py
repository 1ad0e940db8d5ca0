"""GPT-2."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from regard.hf.families.base import (
    EMBED,
    FFN_NORM,
    LAYER,
    MIXER_NORM,
    AttentionAdapter,
    AttentionWeights,
    CheckpointFamily,
    Json,
    LinearWeights,
    convert_activation,
    require,
    self_attention_cache,
)
from regard.hf.modules import SwappedAttention
from regard.hf.padding_masks import padding_mask
from regard.hf.weights import WeightMap, rule, split_qkv, transpose, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, TokenInput, module_spec


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a GPT-2."""
    require(
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    dim = config["n_embd"]
    activation = convert_activation(config.get("activation_function", "gelu_new"))
    return ModelConfig(
        kind="decoder",
        input=TokenInput(vocab_size=config["vocab_size"]),
        head=head,
        dim=dim,
        heads=config["n_head"],
        layers=config["n_layer"],
        length=config["n_positions"],
        mixer=[module_spec("vanilla", bias=True)],
        ffn=[module_spec("mlp", hidden=config.get("n_inner") or 4 * dim, activation=activation)],
        norm=module_spec("layer", eps=config.get("layer_norm_epsilon", 1e-5)),
        dropout=config.get("resid_pdrop", 0.1),
    )


WEIGHTS = WeightMap(
    prefix="transformer.",
    rules=(
        rule("wte.weight", f"{EMBED}.tokens.weight"),
        rule("wpe.weight", f"{EMBED}.position.table"),
        *weight_bias_rules("h.{i}.ln_1", MIXER_NORM),
        *weight_bias_rules(
            "h.{i}.attn.c_attn", f"{LAYER}.mixer.q {LAYER}.mixer.k {LAYER}.mixer.v", split_qkv
        ),
        *weight_bias_rules("h.{i}.attn.c_proj", f"{LAYER}.mixer.out", transpose),
        *weight_bias_rules("h.{i}.ln_2", FFN_NORM),
        *weight_bias_rules("h.{i}.mlp.c_fc", f"{LAYER}.ffn.up", transpose),
        *weight_bias_rules("h.{i}.mlp.c_proj", f"{LAYER}.ffn.down", transpose),
        *weight_bias_rules("ln_f", "backbone.norm"),
        rule("lm_head.weight", "head.proj.weight"),
    ),
    ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),
)
CHECKPOINTS = {"gpt2": CheckpointFamily(convert_config, lambda config: WEIGHTS)}


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """Fused queries, keys and values; matrices are stored as (in, out)."""
    fused = zip(module.c_attn.weight.T.chunk(3), module.c_attn.bias.chunk(3), strict=True)
    q, k, v = (LinearWeights(weight, bias) for weight, bias in fused)
    return AttentionWeights(
        module.embed_dim,
        module.num_heads,
        q,
        k,
        v,
        LinearWeights(module.c_proj.weight.T, module.c_proj.bias),
        causal=True,
        length=module.config.max_position_embeddings,
        scale=module.scaling,
    )


def attention_forward(
    self: SwappedAttention,
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output with its dropout; `SwappedAttention.run` collects attention maps."""
    mask = padding_mask(attention_mask, hidden_states.shape[1], causal=True)
    y = self.run(hidden_states, mask, cache=self_attention_cache(past_key_values))
    return F.dropout(y, self.old.resid_dropout.p, self.training), None  # type: ignore[union-attr, arg-type]


ADAPTERS = {
    "GPT2Attention": AttentionAdapter(
        attention_weights, attention_forward, applies=lambda module: not module.is_cross_attention
    )
}
