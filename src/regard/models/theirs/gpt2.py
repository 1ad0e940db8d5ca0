"""GPT-2."""

from __future__ import annotations

from regard.models.config import Config, Head, Tokens, part
from regard.models.theirs.common import LAYER, Json, activation, require
from regard.models.weights import WeightMap, dense, norm, row, thirds, turned

GPT2 = WeightMap(
    prefix="transformer.",
    rows=(
        row("wte.weight", "trunk.embed.tokens.weight"),
        row("wpe.weight", "trunk.embed.position.table"),
        *norm("h.{i}.ln_1", f"{LAYER}.around_mixer.norm"),
        *dense("h.{i}.attn.c_attn", f"{LAYER}.mixer.q {LAYER}.mixer.k {LAYER}.mixer.v", thirds),
        *dense("h.{i}.attn.c_proj", f"{LAYER}.mixer.out", turned),
        *norm("h.{i}.ln_2", f"{LAYER}.around_ffn.norm"),
        *dense("h.{i}.mlp.c_fc", f"{LAYER}.ffn.up", turned),
        *dense("h.{i}.mlp.c_proj", f"{LAYER}.ffn.down", turned),
        *norm("ln_f", "trunk.norm"),
        row("lm_head.weight", "head.words.weight"),
    ),
    dropped=("h.*.attn.bias", "h.*.attn.masked_bias"),
)


def gpt2_config(their: Json, head: Head | None) -> Config:
    """Their config.json as ours."""
    require(their, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    dim = their["n_embd"]
    return Config(
        kind="decoder", input=Tokens(vocab=their["vocab_size"]), head=head, dim=dim, heads=their["n_head"],
        layers=their["n_layer"], length=their["n_positions"], mixer=[part("vanilla", bias=True)],
        ffn=[
            part(
                "mlp", hidden=their.get("n_inner") or 4 * dim,
                activation=activation(their.get("activation_function", "gelu_new")),
            )
        ],
        norm=part("layer", eps=their.get("layer_norm_epsilon", 1e-5)), dropout=their.get("resid_pdrop", 0.1),
    )  # fmt: skip
