"""Reformer: alternating LSH and local layers in a reversible stack."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.hf.families.base import (
    EMBED,
    CheckpointFamily,
    Json,
    convert_activation,
    require,
    require_full_width_heads,
)
from regard.hf.weights import WeightMap, WeightRule, rule, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, ModuleSpec, TokenInput, module_spec


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a Reformer."""
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    require_full_width_heads(heads, config["attention_head_size"], dim)
    if not isinstance(config.get("num_buckets"), int):
        raise Unsupported(
            f"num_buckets={config.get('num_buckets')!r} is not supported: it must be one number."
        )
    require(config, lsh_num_chunks_before=1, lsh_num_chunks_after=0)
    require(config, local_num_chunks_before=1, local_num_chunks_after=0)
    causal = bool(config.get("is_decoder", False))
    grid = config.get("axial_pos_shape", ()) if config.get("axial_pos_embds", True) else ()
    activation = convert_activation(config.get("hidden_act", "relu"))
    return ModelConfig(
        kind="decoder" if causal else "encoder",
        input=TokenInput(vocab_size=config["vocab_size"]),
        head=head,
        dim=dim,
        heads=heads,
        layers=len(config["attn_layers"]),
        length=prod(grid) if grid else config["max_position_embeddings"],
        mixer=[convert_layer(kind, config, causal) for kind in config["attn_layers"]],
        stack=module_spec("reversible", concat=True),
        ffn=[module_spec("mlp", hidden=config["feed_forward_size"], activation=activation)],
        norm=module_spec("layer", eps=config.get("layer_norm_eps", 1e-12)),
        dropout=config.get("hidden_dropout_prob", 0.05),
    )


def convert_layer(kind: str, config: Json, causal: bool) -> ModuleSpec:
    """The mixer of a layer, "lsh" or "local"."""
    if kind == "local":
        chunk = config["local_attn_chunk_length"]
        if causal:
            return module_spec("image_local_1d", block=chunk, memory=chunk)
        return module_spec("block_local", block=chunk)
    if kind != "lsh":
        raise Unsupported(f"attn_layers contains {kind!r}; supported are 'lsh' and 'local'.")
    return module_spec(
        "reformer_hf",
        buckets=config["num_buckets"],
        chunk=config["lsh_attn_chunk_length"],
        rounds=config["num_hashes"],
    )


def weight_map(config: Json) -> WeightMap:
    """Weights of a Reformer.

    Layer i becomes half 2i, the mixer, and half 2i + 1, the feed-forward layer.
    """
    axes = len(config.get("axial_pos_shape", ()))
    tables = " ".join(f"embeddings.position_embeddings.weights.{axis}" for axis in range(axes))
    rules: list[WeightRule] = [
        rule("embeddings.word_embeddings.weight", f"{EMBED}.tokens.weight"),
        rule("embeddings.position_embeddings.embedding.weight", f"{EMBED}.position.table"),
        *([rule(tables, f"{EMBED}.position.table", expand_axial_positions)] if tables else []),
        *weight_bias_rules("encoder.layer_norm", "backbone.norm"),
        rule("lm_head.decoder.weight", "head.proj.weight"),
    ]
    for i in range(len(config["attn_layers"])):
        source = f"encoder.layers.{i}"
        mixer, ffn = (f"backbone.stack.sublayers.{half}" for half in (2 * i, 2 * i + 1))
        projections = (
            ("query_key", "q"),
            ("query", "q"),
            ("key", "k"),
            ("value", "v"),
        )  # those that the layer has
        rules += [
            *weight_bias_rules(f"{source}.attention.layer_norm", f"{mixer}.norm"),
            *(
                rule(
                    f"{source}.attention.self_attention.{name}.weight",
                    f"{mixer}.mixer.{own_name}.weight",
                )
                for name, own_name in projections
            ),
            rule(f"{source}.attention.output.dense.weight", f"{mixer}.mixer.out.weight"),
            rule("", f"{mixer}.mixer.inner.hashing.rotations", lambda: hash_rotations(config)),
            *weight_bias_rules(f"{source}.feed_forward.layer_norm", f"{ffn}.norm"),
            *weight_bias_rules(f"{source}.feed_forward.dense.dense", f"{ffn}.ffn.up"),
            *weight_bias_rules(f"{source}.feed_forward.output.dense", f"{ffn}.ffn.down"),
        ]
    # transformers stores a bias of the head but never adds it
    return WeightMap(
        tuple(rules), prefix="reformer.", ignored=("lm_head.bias", "lm_head.decoder.bias")
    )


def hash_rotations(config: Json) -> Tensor:
    """The rotations (h, rounds, e, buckets/2) that transformers draws from hash_seed."""
    seed = config.get("hash_seed")
    heads, head_dim = config["num_attention_heads"], config["attention_head_size"]
    shape = (heads, head_dim, config["num_hashes"], config["num_buckets"] // 2)
    generator = torch.Generator().manual_seed(0 if seed is None else seed)
    return torch.randn(shape, generator=generator).transpose(1, 2)


def expand_axial_positions(*axes: Tensor) -> Tensor:
    """Axial position embeddings (1 .. n_a .. 1, d_a) -> one table (n, d) for all positions."""
    sizes = [table.shape[axis] for axis, table in enumerate(axes)]
    return torch.cat([table.expand(*sizes, -1) for table in axes], -1).flatten(0, -2)


CHECKPOINTS = {"reformer": CheckpointFamily(convert_config, weight_map)}
