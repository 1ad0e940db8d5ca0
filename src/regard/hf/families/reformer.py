"""Reformer: hashed and local layers by turns, reversible, with both streams side by side at the end."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.hf.families.base import Json, activation, require
from regard.hf.weights import WeightMap, WeightRule, linear_rules, norm_rules, rule
from regard.models.config import HeadConfig, ModelConfig, ModuleSpec, TokenInput, module_spec

HALF = "trunk.stack.halves"


def reformer_map(their: Json) -> WeightMap:
    """Layer i is the halves 2 i, which mixes, and 2 i + 1, which feeds forward."""
    rows: list[WeightRule] = [
        rule("embeddings.word_embeddings.weight", "trunk.embed.tokens.weight"),
        rule("embeddings.position_embeddings.embedding.weight", "trunk.embed.position.table"),
        WeightRule(
            tuple(
                f"embeddings.position_embeddings.weights.{axis}"
                for axis in range(len(their.get("axial_pos_shape", ())))
            ),
            ("trunk.embed.position.table",),
            axial,
        ),
        *norm_rules("encoder.layer_norm", "trunk.norm"),
        rule("lm_head.decoder.weight", "head.words.weight"),
    ]
    for i in range(len(their["attn_layers"])):
        rows += layer_rows(f"encoder.layers.{i}", f"{HALF}.{2 * i}", f"{HALF}.{2 * i + 1}", their)
    return WeightMap(
        prefix="reformer.", rows=tuple(rows), dropped=("lm_head.bias", "lm_head.decoder.bias")
    )  # which theirs never adds


def layer_rows(theirs: str, mixing: str, feeding: str, their: Json) -> list[WeightRule]:
    """One layer; of the projections, those that it has."""
    attend = f"{theirs}.attention.self_attention"
    names = (("query_key", "q"), ("query", "q"), ("key", "k"), ("value", "v"))
    return [
        *norm_rules(f"{theirs}.attention.layer_norm", f"{mixing}.norm"),
        *(rule(f"{attend}.{a}.weight", f"{mixing}.mixer.{b}.weight") for a, b in names),
        rule(f"{theirs}.attention.output.dense.weight", f"{mixing}.mixer.out.weight"),
        WeightRule((), (f"{mixing}.mixer.inner.hashing.rotations",), lambda: rotations(their)),
        *norm_rules(f"{theirs}.feed_forward.layer_norm", f"{feeding}.norm"),
        *linear_rules(f"{theirs}.feed_forward.dense.dense", f"{feeding}.ffn.up"),
        *linear_rules(f"{theirs}.feed_forward.output.dense", f"{feeding}.ffn.down"),
    ]


def rotations(their: Json) -> Tensor:
    """What their hash_seed draws at every call, (h rounds e buckets/2); without one they draw anew, and ours stay."""
    seed = their.get("hash_seed")
    shape = (
        their["num_attention_heads"],
        their["attention_head_size"],
        their["num_hashes"],
        their["num_buckets"] // 2,
    )
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(0 if seed is None else seed)
    ).transpose(1, 2)


def axial(*axes: Tensor) -> Tensor:
    """Their tables for the axes of a grid, (1 .. n_a .. 1 d_a) -> one table for all places, (n d)."""
    sizes = [table.shape[axis] for axis, table in enumerate(axes)]
    return torch.cat([table.expand(*sizes, -1) for table in axes], -1).flatten(0, -2)


def reformer_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours."""
    dim, heads = their["hidden_size"], their["num_attention_heads"]
    if heads * their["attention_head_size"] != dim:
        raise Unsupported(
            f"{heads} heads of {their['attention_head_size']} are not as wide as a token, {dim}: ours share it"
        )
    if not isinstance(their.get("num_buckets"), int):
        raise Unsupported(
            f"num_buckets is {their.get('num_buckets')!r}: give a number of buckets, their products have no form here"
        )
    require(
        their,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        local_num_chunks_before=1,
        local_num_chunks_after=0,
    )
    causal = bool(their.get("is_decoder", False))
    grid = their.get("axial_pos_shape", ()) if their.get("axial_pos_embds", True) else ()
    return ModelConfig(
        kind="decoder" if causal else "encoder",
        input=TokenInput(vocab_size=their["vocab_size"]),
        head=head,
        dim=dim,
        heads=heads,
        layers=len(their["attn_layers"]),
        length=prod(grid) if grid else their["max_position_embeddings"],
        mixer=[mixing(kind, their, causal) for kind in their["attn_layers"]],
        stack=module_spec("reversible", beside=True),
        ffn=[
            module_spec(
                "mlp",
                hidden=their["feed_forward_size"],
                activation=activation(their.get("hidden_act", "relu")),
            )
        ],
        norm=module_spec("layer", eps=their.get("layer_norm_eps", 1e-12)),
        dropout=their.get("hidden_dropout_prob", 0.05),
    )


def mixing(kind: str, their: Json, causal: bool) -> ModuleSpec:
    """A layer of theirs: "lsh" or "local"."""
    if kind == "local":
        chunk = their["local_attn_chunk_length"]
        return (
            module_spec("image_local_1d", block=chunk, memory=chunk)
            if causal
            else module_spec("block_local", block=chunk)
        )
    if kind != "lsh":
        raise Unsupported(f"attn_layers names {kind!r}, and there are 'lsh' and 'local'")
    return module_spec(
        "reformer_hf",
        buckets=their["num_buckets"],
        chunk=their["lsh_attn_chunk_length"],
        rounds=their["num_hashes"],
    )
