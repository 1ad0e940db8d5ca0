"""BERT, and what RoBERTa, Longformer, BigBird, FNet and Nyströmformer share with it."""

from __future__ import annotations

from typing import Any

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
    convert_activation,
    read_attention,
    require,
    self_attention_cache,
)
from regard.hf.modules import SwappedAttention
from regard.hf.padding_masks import padding_mask
from regard.hf.weights import (
    Transform,
    WeightMap,
    WeightRule,
    keep_tensor,
    rule,
    weight_bias_rules,
)
from regard.models.config import HeadConfig, ModelConfig, ModuleSpec, TokenInput, module_spec

IGNORED = ("embeddings.position_ids", "embeddings.token_type_ids")
CLS_IGNORED = (*IGNORED, "cls.predictions.decoder.bias")


# -------------------------------------------------------------------------------------- checkpoints
def encoder_rules(
    *mixer_rules: WeightRule,
    position: Transform = keep_tensor,
    mixer_norm: str = "attention.output",
) -> tuple[WeightRule, ...]:
    """Embeddings and layers of a BERT-like encoder.

    Args:
        mixer_rules: Rules for the weights of the mixer.
        position: Transform of the table of position embeddings.
        mixer_norm: Module with the norm behind the mixer.
    """
    return (
        rule("embeddings.word_embeddings.weight", f"{EMBED}.tokens.weight"),
        rule("embeddings.position_embeddings.weight", f"{EMBED}.position.table", position),
        rule("embeddings.token_type_embeddings.weight", f"{EMBED}.token_types.weight"),
        *weight_bias_rules("embeddings.LayerNorm", f"{EMBED}.norm"),
        *mixer_rules,
        *weight_bias_rules(f"encoder.layer.{{i}}.{mixer_norm}.LayerNorm", MIXER_NORM),
        *weight_bias_rules("encoder.layer.{i}.intermediate.dense", f"{LAYER}.ffn.up"),
        *weight_bias_rules("encoder.layer.{i}.output.dense", f"{LAYER}.ffn.down"),
        *weight_bias_rules("encoder.layer.{i}.output.LayerNorm", FFN_NORM),
    )


def attention_rules(target: str = f"{LAYER}.mixer") -> tuple[WeightRule, ...]:
    """The four projections of each layer."""
    source = "encoder.layer.{i}.attention"
    return (
        *weight_bias_rules(f"{source}.self.query", f"{target}.q"),
        *weight_bias_rules(f"{source}.self.key", f"{target}.k"),
        *weight_bias_rules(f"{source}.self.value", f"{target}.v"),
        *weight_bias_rules(f"{source}.output.dense", f"{target}.out"),
    )


def head_rules(
    pooler: str = "pooler.dense", classifier: str = "classifier"
) -> tuple[WeightRule, ...]:
    """Heads with the names of BERT."""
    return (
        *weight_bias_rules("cls.predictions.transform.dense", "head.transform"),
        *weight_bias_rules("cls.predictions.transform.LayerNorm", "head.norm"),
        rule("cls.predictions.decoder.weight", "head.lm_head.proj.weight"),
        rule("cls.predictions.bias", "head.lm_head.proj.bias"),
        *weight_bias_rules(pooler, "head.hidden"),
        *weight_bias_rules(classifier, "head.out"),
    )


def encoder_config(
    config: Json, head: HeadConfig | None, mixer: ModuleSpec | list[ModuleSpec], **changes: object
) -> ModelConfig:
    """The configuration of a BERT-like encoder with this mixer; `changes` replace keys of it."""
    settings = {
        "kind": "encoder",
        "head": head,
        "input": TokenInput(
            vocab_size=config["vocab_size"],
            type_vocab_size=config.get("type_vocab_size", 2),
            norm=True,
        ),
        "dim": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "layers": config["num_hidden_layers"],
        "length": config["max_position_embeddings"],
        "mixer": mixer if isinstance(mixer, list) else [mixer],
        "residual": module_spec("post"),
        "ffn": module_spec(
            "mlp",
            hidden=config["intermediate_size"],
            activation=convert_activation(config.get("hidden_act", "gelu")),
        ),
        "norm": module_spec("layer", eps=config.get("layer_norm_eps", 1e-12)),
        "dropout": config.get("hidden_dropout_prob", 0.1),
    }
    return ModelConfig(**{**settings, **changes})


def require_plain_encoder(config: Json) -> None:
    """Raise `Unsupported` for decoders and relative positions."""
    require(config, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a BERT."""
    require_plain_encoder(config)
    return encoder_config(config, head, module_spec("vanilla", bias=True))


WEIGHTS = WeightMap(
    prefix="bert.",
    rules=(*encoder_rules(*attention_rules()), *head_rules()),
    renames=((".gamma", ".weight"), (".beta", ".bias")),
    ignored=CLS_IGNORED,
)
CHECKPOINTS = {"bert": CheckpointFamily(convert_config, lambda config: WEIGHTS)}


# ---------------------------------------------------------------------------------------- attention
def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """Queries, keys and values; the output projection is outside, next to the norm."""
    causal = bool(getattr(module, "is_causal", False))
    return read_attention(module, "query key value", module.num_attention_heads, causal=causal)


def attention_forward(
    self: SwappedAttention,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the heads side by side; `SwappedAttention.run` collects attention maps."""
    mask = padding_mask(attention_mask, hidden_states.shape[1], causal=self.mixer.causal)
    return self.run(hidden_states, mask, cache=self_attention_cache(past_key_values)), None


ADAPTER = AttentionAdapter(attention_weights, attention_forward)
ADAPTERS = {
    f"{name}SelfAttention": ADAPTER
    for name in (
        "Bert",
        "BertGeneration",
        "Camembert",
        "Data2VecText",
        "Electra",
        "Ernie",
        "Roberta",
        "RobertaPreLayerNorm",
        "XLMRoberta",
        "XLMRobertaXL",
    )
}
