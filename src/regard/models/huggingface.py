"""BERT (MiniLM too), GPT-2, ViT and T5 as Hugging Face stores them: their configuration and weights become ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import Unsupported, nearest
from regard.models.build import build
from regard.models.config import Config, Head, Patches, Side, Tokens, part
from regard.models.model import Model
from regard.models.save import CONFIG, WEIGHTS, opened, small_text
from regard.models.weights import Row, WeightMap, adopt, dense, norm, row, thirds, turned

Json = Mapping[str, Any]
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu",
}  # fmt: skip
LAYER = "trunk.stack.layers.{i}"


# ---------------------------------------------------------------------------------------------- BERT
BERT = WeightMap(
    prefix="bert.",
    rows=(
        row("embeddings.word_embeddings.weight", "trunk.embed.tokens.weight"),
        row("embeddings.position_embeddings.weight", "trunk.embed.position.table"),
        row("embeddings.token_type_embeddings.weight", "trunk.embed.types.weight"),
        *norm("embeddings.LayerNorm", "trunk.embed.norm"),
        *dense("encoder.layer.{i}.attention.self.query", f"{LAYER}.mixer.q"),
        *dense("encoder.layer.{i}.attention.self.key", f"{LAYER}.mixer.k"),
        *dense("encoder.layer.{i}.attention.self.value", f"{LAYER}.mixer.v"),
        *dense("encoder.layer.{i}.attention.output.dense", f"{LAYER}.mixer.out"),
        *norm("encoder.layer.{i}.attention.output.LayerNorm", f"{LAYER}.around_mixer.norm"),
        *dense("encoder.layer.{i}.intermediate.dense", f"{LAYER}.ffn.up"),
        *dense("encoder.layer.{i}.output.dense", f"{LAYER}.ffn.down"),
        *norm("encoder.layer.{i}.output.LayerNorm", f"{LAYER}.around_ffn.norm"),
        *dense("cls.predictions.transform.dense", "head.transform"),
        *norm("cls.predictions.transform.LayerNorm", "head.norm"),
        row("cls.predictions.decoder.weight", "head.words.words.weight"),
        row("cls.predictions.bias", "head.words.words.bias"),
        *dense("pooler.dense", "head.hidden"),
        *dense("classifier", "head.last"),
    ),
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
    dropped=("embeddings.position_ids", "cls.predictions.decoder.bias"),
)


def bert_config(their: Json, head: Head | None) -> Config:
    """Their config.json as ours."""
    require(their, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    return Config(
        kind="encoder", input=Tokens(vocab=their["vocab_size"], types=their.get("type_vocab_size", 2), norm=True), head=head,
        dim=their["hidden_size"], heads=their["num_attention_heads"], layers=their["num_hidden_layers"],
        length=their["max_position_embeddings"], mixer=[part("vanilla", bias=True)], residual=part("post"),
        ffn=part("mlp", hidden=their["intermediate_size"], activation=activation(their.get("hidden_act", "gelu"))),
        norm=part("layer", eps=their.get("layer_norm_eps", 1e-12)), dropout=their.get("hidden_dropout_prob", 0.1),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- GPT-2
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
        ffn=part(
            "mlp", hidden=their.get("n_inner") or 4 * dim, activation=activation(their.get("activation_function", "gelu_new"))
        ),
        norm=part("layer", eps=their.get("layer_norm_epsilon", 1e-5)), dropout=their.get("resid_pdrop", 0.1),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- ViT
def first_of_table(cls: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Their class token has a position, ours has none: the two are one vector."""
    return cls[0, 0] + table[0, 0], table[0, 1:]


VIT = WeightMap(
    prefix="vit.",
    rows=(
        row(
            "embeddings.cls_token embeddings.position_embeddings", "trunk.embed.cls trunk.embed.position.table", first_of_table
        ),
        *dense("embeddings.patch_embeddings.projection", "trunk.embed.project"),
        *dense("layers.{i}.attention.q_proj", f"{LAYER}.mixer.q"),
        *dense("layers.{i}.attention.k_proj", f"{LAYER}.mixer.k"),
        *dense("layers.{i}.attention.v_proj", f"{LAYER}.mixer.v"),
        *dense("layers.{i}.attention.o_proj", f"{LAYER}.mixer.out"),
        *norm("layers.{i}.layernorm_before", f"{LAYER}.around_mixer.norm"),
        *norm("layers.{i}.layernorm_after", f"{LAYER}.around_ffn.norm"),
        *dense("layers.{i}.mlp.fc1", f"{LAYER}.ffn.up"),
        *dense("layers.{i}.mlp.fc2", f"{LAYER}.ffn.down"),
        *norm("layernorm", "trunk.norm"),
        *dense("classifier", "head.last"),
    ),
    renamed=(  # files from before transformers 5
        ("encoder.layer.", "layers."), (".attention.attention.query.", ".attention.q_proj."),
        (".attention.attention.key.", ".attention.k_proj."), (".attention.attention.value.", ".attention.v_proj."),
        (".attention.output.dense.", ".attention.o_proj."), (".intermediate.dense.", ".mlp.fc1."),
        (".output.dense.", ".mlp.fc2."),
    ),
)  # fmt: skip


def vit_config(their: Json, head: Head | None) -> Config:
    """Their config.json as ours."""
    require(their, qkv_bias=True)
    size = their["image_size"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return Config(
        kind="encoder", head=head, dim=their["hidden_size"], heads=their["num_attention_heads"],
        input=Patches(height=height, width=width, patch=their["patch_size"], channels=their.get("num_channels", 3)),
        layers=their["num_hidden_layers"], mixer=[part("vanilla", bias=True)],
        ffn=part("mlp", hidden=their["intermediate_size"], activation=activation(their.get("hidden_act", "gelu"))),
        norm=part("layer", eps=their.get("layer_norm_eps", 1e-12)), dropout=their.get("hidden_dropout_prob", 0.0),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- T5
def t5_map(width: int, dim: int, *, scaled: bool) -> WeightMap:
    """The names of T5, for heads of this width and tokens of this one.

    T5 does not scale its scores, and ours are over √e: so queries are √e times as large.  Where it is `scaled`, as all but T5
    1.1 are, it takes d^-½ of the last tokens, which goes into the gain of the last norm.  The table of distances, which the
    first layer keeps for all, is copied into each.
    """

    def louder(weight: Tensor) -> Tensor:
        return weight * width**0.5

    def softer(gain: Tensor) -> Tensor:
        return gain * dim**-0.5 if scaled else gain

    sides = [*t5_side("encoder", "layer.1", louder), *t5_side("decoder", "layer.2", louder)]
    ours = "decoder.stack.layers.{i}"
    return WeightMap(
        rows=(
            row("shared.weight", "encoder.embed.tokens.weight"),
            *sides,
            *t5_attention("decoder.block.{i}.layer.1.EncDecAttention", f"{ours}.cross", louder),
            row("decoder.block.{i}.layer.1.layer_norm.weight", f"{ours}.around_cross.norm.gain"),
            row("encoder.final_layer_norm.weight", "encoder.norm.gain"),
            row("decoder.final_layer_norm.weight", "decoder.norm.gain", softer),
            row("lm_head.weight", "head.words.weight"),
        ),
        dropped=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    )


def t5_side(side: str, feed: str, louder: Callable[[Tensor], Tensor]) -> list[Row]:
    """What encoder and decoder have in common; `feed` is the place of the feed-forward layer."""
    theirs, ours = f"{side}.block.{{i}}", f"{side}.stack.layers.{{i}}"
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        *t5_attention(f"{theirs}.layer.0.SelfAttention", f"{ours}.mixer", louder),
        row(bias, f"{ours}.mixer.inner.prior.table", turned),
        row(f"{theirs}.layer.0.layer_norm.weight", f"{ours}.around_mixer.norm.gain"),
        row(f"{theirs}.{feed}.layer_norm.weight", f"{ours}.around_ffn.norm.gain"),
        row(f"{theirs}.{feed}.DenseReluDense.wi.weight", f"{ours}.ffn.up.weight"),
        row(f"{theirs}.{feed}.DenseReluDense.wi_0.weight", f"{ours}.ffn.gate.weight"),
        row(f"{theirs}.{feed}.DenseReluDense.wi_1.weight", f"{ours}.ffn.up.weight"),
        row(f"{theirs}.{feed}.DenseReluDense.wo.weight", f"{ours}.ffn.down.weight"),
    ]


def t5_attention(theirs: str, ours: str, louder: Callable[[Tensor], Tensor]) -> list[Row]:
    """The four projections."""
    return [
        row(f"{theirs}.q.weight", f"{ours}.q.weight", louder),
        *(row(f"{theirs}.{a}.weight", f"{ours}.{b}.weight") for a, b in (("k", "k"), ("v", "v"), ("o", "out"))),
    ]


def t5_config(their: Json, head: Head | None) -> Config:
    """Their config.json as ours."""
    dim, heads, layers = their["d_model"], their["num_heads"], their["num_layers"]
    if dim != heads * their["d_kv"]:
        raise Unsupported(f"{heads} heads of {their['d_kv']} are not as wide as a token, {dim}: ours share its width")
    kind = their.get("feed_forward_proj", "relu")
    bend = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")  # theirs says gelu, and means this one
    gated = kind.startswith("gated-")
    ffn = part("glu" if gated else "mlp", hidden=their["d_ff"], bias=False, activation=activation(bend))
    buckets, furthest = their.get("relative_attention_num_buckets", 32), their.get("relative_attention_max_distance", 128)
    return Config(
        kind="seq2seq", input=Tokens(vocab=their["vocab_size"]), head=head, dim=dim, heads=heads,
        layers=their.get("num_decoder_layers") or layers, encoder=Side(layers=layers, mixer=[part("vanilla")]), ffn=ffn,
        norm=part("rms", eps=their.get("layer_norm_epsilon", 1e-6)), dropout=their.get("dropout_rate", 0.1),
        position=part("t5", buckets=buckets, furthest=furthest),
    )  # fmt: skip


def t5_scales(their: Json) -> bool:
    """Whether the last tokens are scaled: newer files say so, older ones by whether the logits are tied."""
    return bool(their.get("scale_decoder_outputs", their.get("tie_word_embeddings", True)))


# ---------------------------------------------------------------------------------------------- all
FAMILIES: dict[str, tuple[Callable[[Json, Head | None], Config], Callable[[Json], WeightMap]]] = {
    "bert": (bert_config, lambda their: BERT),
    "gpt2": (gpt2_config, lambda their: GPT2),
    "vit": (vit_config, lambda their: VIT),
    "t5": (t5_config, lambda their: t5_map(their["d_kv"], their["d_model"], scaled=t5_scales(their))),
}


def translate(their: Json, head: Head | None = None) -> tuple[Config, WeightMap]:
    """The contents of their config.json -> our configuration with this head, and the map of the weights."""
    kind = str(their.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"no map for models of type {kind!r}: {nearest(kind, FAMILIES)}")
    config, names = FAMILIES[kind]
    try:
        return config(their, head), names(their)
    except KeyError as missing:
        raise ValueError(f"their configuration of a {kind} model does not say {missing}") from None


def from_huggingface(folder: str | Path, head: Head | None = None, *, leave: Iterable[str] = ()) -> Model:
    """The model in a folder with their config.json and model.safetensors, ready to evaluate.

    head    what comes out; None: the tokens (b n d)
    leave   patterns of their names that may stay unused, such as "pooler.*"
    """
    try:
        their = json.loads(small_text(Path(folder) / CONFIG))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{Path(folder) / CONFIG} is no JSON: {error}") from None
    if not isinstance(their, dict):
        raise ValueError(f"{Path(folder) / CONFIG} is no JSON object")
    config, names = translate(their, head)
    model = build(config)
    with opened(Path(folder) / WEIGHTS) as file:
        adopt(model, {name: file.get_tensor(name) for name in file.keys()}, names, leave=leave)  # noqa: SIM118
    return model.eval()


def require(their: Json, **values: object) -> None:
    """What we have no form for must be as it usually is."""
    for name, value in values.items():
        if their.get(name, value) != value:
            raise Unsupported(f"their {name} is {their[name]!r}, and there is a form for {value!r} only")


def activation(theirs: str) -> str:
    """Their name of an activation -> ours."""
    if theirs not in ACTIVATIONS:
        raise Unsupported(f"no activation for their {theirs!r}: {nearest(theirs, ACTIVATIONS)}")
    return ACTIVATIONS[theirs]
