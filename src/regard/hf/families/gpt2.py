"""GPT-2."""

from __future__ import annotations

from regard.hf.families.base import LAYER, Json, activation, require
from regard.hf.weights import WeightMap, linear_rules, norm_rules, rule, split_qkv, transpose
from regard.models.config import HeadConfig, ModelConfig, TokenInput, module_spec

GPT2 = WeightMap(
    prefix="transformer.",
    rows=(
        rule("wte.weight", "trunk.embed.tokens.weight"),
        rule("wpe.weight", "trunk.embed.position.table"),
        *norm_rules("h.{i}.ln_1", f"{LAYER}.around_mixer.norm"),
        *linear_rules(
            "h.{i}.attn.c_attn", f"{LAYER}.mixer.q {LAYER}.mixer.k {LAYER}.mixer.v", split_qkv
        ),
        *linear_rules("h.{i}.attn.c_proj", f"{LAYER}.mixer.out", transpose),
        *norm_rules("h.{i}.ln_2", f"{LAYER}.around_ffn.norm"),
        *linear_rules("h.{i}.mlp.c_fc", f"{LAYER}.ffn.up", transpose),
        *linear_rules("h.{i}.mlp.c_proj", f"{LAYER}.ffn.down", transpose),
        *norm_rules("ln_f", "trunk.norm"),
        rule("lm_head.weight", "head.words.weight"),
    ),
    dropped=("h.*.attn.bias", "h.*.attn.masked_bias"),
)


def gpt2_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours."""
    require(
        their,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    dim = their["n_embd"]
    return ModelConfig(
        kind="decoder",
        input=TokenInput(vocab_size=their["vocab_size"]),
        head=head,
        dim=dim,
        heads=their["n_head"],
        layers=their["n_layer"],
        length=their["n_positions"],
        mixer=[module_spec("vanilla", bias=True)],
        ffn=[
            module_spec(
                "mlp",
                hidden=their.get("n_inner") or 4 * dim,
                activation=activation(their.get("activation_function", "gelu_new")),
            )
        ],
        norm=module_spec("layer", eps=their.get("layer_norm_epsilon", 1e-5)),
        dropout=their.get("resid_pdrop", 0.1),
    )
