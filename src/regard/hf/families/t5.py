"""T5 and T5 1.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.hf.families.base import (
    AttentionAdapter,
    AttentionWeights,
    CheckpointFamily,
    Json,
    convert_activation,
    read_attention,
    require_full_width_heads,
)
from regard.hf.modules import SwappedAttention
from regard.hf.padding_masks import padding_mask
from regard.hf.weights import WeightMap, WeightRule, rule, transpose
from regard.models.config import EncoderConfig, HeadConfig, ModelConfig, TokenInput, module_spec
from regard.position.bias import T5Bias

FFN_LAYERS = {"encoder": "layer.1", "decoder": "layer.2"}  # the feed-forward layer of a block


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a T5."""
    dim, heads, layers = config["d_model"], config["num_heads"], config["num_layers"]
    require_full_width_heads(heads, config["d_kv"], dim)
    ffn = config.get("feed_forward_proj", "relu")
    activation = (
        "gelu_new" if ffn == "gated-gelu" else ffn.removeprefix("gated-")
    )  # T5's gated gelu is the tanh one
    return ModelConfig(
        kind="seq2seq",
        input=TokenInput(vocab_size=config["vocab_size"]),
        head=head,
        dim=dim,
        heads=heads,
        layers=config.get("num_decoder_layers") or layers,
        encoder=EncoderConfig(layers=layers, mixer=[module_spec("vanilla")]),
        ffn=[
            module_spec(
                "glu" if ffn.startswith("gated-") else "mlp",
                hidden=config["d_ff"],
                bias=False,
                activation=convert_activation(activation),
            )
        ],
        norm=module_spec("rms", eps=config.get("layer_norm_epsilon", 1e-6)),
        dropout=config.get("dropout_rate", 0.1),
        position=module_spec(
            "t5",
            buckets=config.get("relative_attention_num_buckets", 32),
            max_distance=config.get("relative_attention_max_distance", 128),
        ),
    )


def weight_map(config: Json) -> WeightMap:
    """Weights of a T5.

    Older files do not say whether the decoder's output is scaled: it is if logits are tied.
    """
    scaled = bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))
    return t5_weight_map(config["d_kv"], config["d_model"], scale_output=scaled)


def t5_weight_map(head_dim: int, dim: int, *, scale_output: bool) -> WeightMap:
    """Weights of a T5 with heads of this width.

    T5 does not scale its scores by 1/√e, so queries are multiplied by √e. With `scale_output` the
    decoder's output is multiplied by d^-½, which goes into the gain of its last norm. The first
    layer's table of relative positions is copied into all layers.
    """

    def scale_queries(weight: Tensor) -> Tensor:
        return weight * head_dim**0.5

    def scale_gain(gain: Tensor) -> Tensor:
        return gain * dim**-0.5 if scale_output else gain

    rules = [rule("shared.weight", "encoder.embed.tokens.weight")]
    for side, ffn in FFN_LAYERS.items():
        source, target = f"{side}.block.{{i}}", f"{side}.stack.layers.{{i}}"
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules += [
            *_attention_rules(f"{source}.layer.0.SelfAttention", f"{target}.mixer", scale_queries),
            rule(table, f"{target}.mixer.inner.prior.table", transpose),
            rule(f"{source}.layer.0.layer_norm.weight", f"{target}.mixer_residual.norm.weight"),
            rule(f"{source}.{ffn}.layer_norm.weight", f"{target}.ffn_residual.norm.weight"),
            rule(f"{source}.{ffn}.DenseReluDense.wi.weight", f"{target}.ffn.up.weight"),
            rule(f"{source}.{ffn}.DenseReluDense.wi_0.weight", f"{target}.ffn.gate.weight"),
            rule(f"{source}.{ffn}.DenseReluDense.wi_1.weight", f"{target}.ffn.up.weight"),
            rule(f"{source}.{ffn}.DenseReluDense.wo.weight", f"{target}.ffn.down.weight"),
        ]
    source, target = "decoder.block.{i}.layer.1", "decoder.stack.layers.{i}"
    rules += [
        *_attention_rules(f"{source}.EncDecAttention", f"{target}.cross", scale_queries),
        rule(f"{source}.layer_norm.weight", f"{target}.cross_residual.norm.weight"),
        rule("encoder.final_layer_norm.weight", "encoder.norm.weight"),
        rule("decoder.final_layer_norm.weight", "decoder.norm.weight", scale_gain),
        rule("lm_head.weight", "head.proj.weight"),
    ]
    return WeightMap(
        tuple(rules), ignored=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    )


def _attention_rules(
    source: str, target: str, scale_queries: Callable[[Tensor], Tensor]
) -> list[WeightRule]:
    """The four projections."""
    return [
        rule(f"{source}.q.weight", f"{target}.q.weight", scale_queries),
        rule(f"{source}.k.weight", f"{target}.k.weight"),
        rule(f"{source}.v.weight", f"{target}.v.weight"),
        rule(f"{source}.o.weight", f"{target}.out.weight"),
    ]


CHECKPOINTS = {"t5": CheckpointFamily(convert_config, weight_map)}


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """Scores are not scaled; all layers add the relative position bias of the first."""
    table = first.relative_attention_bias.weight
    buckets, max_distance = (
        first.relative_attention_num_buckets,
        first.relative_attention_max_distance,
    )
    prior = T5Bias(module.n_heads, buckets=buckets, max_distance=max_distance).to(table)
    prior.table.data.copy_(table.detach().T)
    return read_attention(module, "q k v o", module.n_heads, length=None, scale=1.0, prior=prior)


def attention_forward(
    self: SwappedAttention,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Any = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """Return the output, and the position bias for layers that were not swapped."""
    n, old = hidden_states.shape[1], self.old
    y = self.run(hidden_states, padding_mask(mask, n, causal=False))
    if self.partial and position_bias is None and old.has_relative_attention_bias:
        position_bias = old.compute_bias(n, n, device=y.device)  # type: ignore[operator]
    return y, position_bias, None


ADAPTERS = {
    "T5Attention": AttentionAdapter(
        attention_weights, attention_forward, applies=lambda module: not module.is_decoder
    )
}
