"""BERT and those built like it: RoBERTa, Longformer, BigBird, FNet, Nyströmformer.  They differ in what mixes, in where
positions begin, and in the names of their heads."""

from __future__ import annotations

from regard.errors import Unsupported
from regard.hf.families.base import LAYER, Json, activation, require
from regard.hf.weights import (
    Change,
    WeightMap,
    WeightRule,
    keep_tensor,
    linear_rules,
    norm_rules,
    rule,
)
from regard.models.config import HeadConfig, ModelConfig, ModuleSpec, TokenInput, module_spec

DROPPED = ("embeddings.position_ids", "embeddings.token_type_ids")


def encoder_rows(
    *mixing: WeightRule, first: Change = keep_tensor, around: str = "attention.output"
) -> tuple[WeightRule, ...]:
    """Embeddings and layers; `mixing` are the rows of the mixer.

    first    their table of positions -> ours
    around   where the norm around the mixer stands
    """
    return (
        rule("embeddings.word_embeddings.weight", "trunk.embed.tokens.weight"),
        rule("embeddings.position_embeddings.weight", "trunk.embed.position.table", first),
        rule("embeddings.token_type_embeddings.weight", "trunk.embed.types.weight"),
        *norm_rules("embeddings.LayerNorm", "trunk.embed.norm"),
        *mixing,
        *norm_rules(f"encoder.layer.{{i}}.{around}.LayerNorm", f"{LAYER}.around_mixer.norm"),
        *linear_rules("encoder.layer.{i}.intermediate.dense", f"{LAYER}.ffn.up"),
        *linear_rules("encoder.layer.{i}.output.dense", f"{LAYER}.ffn.down"),
        *norm_rules("encoder.layer.{i}.output.LayerNorm", f"{LAYER}.around_ffn.norm"),
    )


def attention_rows(ours: str = f"{LAYER}.mixer") -> tuple[WeightRule, ...]:
    """The four projections of each layer."""
    return (
        *linear_rules("encoder.layer.{i}.attention.self.query", f"{ours}.q"),
        *linear_rules("encoder.layer.{i}.attention.self.key", f"{ours}.k"),
        *linear_rules("encoder.layer.{i}.attention.self.value", f"{ours}.v"),
        *linear_rules("encoder.layer.{i}.attention.output.dense", f"{ours}.out"),
    )


def cls_heads(pooler: str = "pooler.dense", last: str = "classifier") -> tuple[WeightRule, ...]:
    """Heads as BERT names them."""
    return (
        *linear_rules("cls.predictions.transform.dense", "head.transform"),
        *norm_rules("cls.predictions.transform.LayerNorm", "head.norm"),
        rule("cls.predictions.decoder.weight", "head.words.words.weight"),
        rule("cls.predictions.bias", "head.words.words.bias"),
        *linear_rules(pooler, "head.hidden"),
        *linear_rules(last, "head.last"),
    )


LM_HEADS = (  # as RoBERTa names them
    *linear_rules("lm_head.dense", "head.transform"),
    *norm_rules("lm_head.layer_norm", "head.norm"),
    rule("lm_head.decoder.weight", "head.words.words.weight"),
    rule("lm_head.bias", "head.words.words.bias"),
    *linear_rules("classifier.dense", "head.hidden"),
    *linear_rules("classifier.out_proj", "head.last"),
    *linear_rules("classifier", "head.last"),  # of each token
)
CLS_DROPPED = (*DROPPED, "cls.predictions.decoder.bias")
LM_DROPPED = (*DROPPED, "lm_head.decoder.bias")


def encoder_config(
    their: Json, head: HeadConfig | None, mixer: ModuleSpec | list[ModuleSpec], **changes: object
) -> ModelConfig:
    """The configuration that they all have, with this mixer; `changes` are keys of ours."""
    known = {
        "kind": "encoder",
        "head": head,
        "input": TokenInput(
            vocab_size=their["vocab_size"], types=their.get("type_vocab_size", 2), norm=True
        ),
        "dim": their["hidden_size"],
        "heads": their["num_attention_heads"],
        "layers": their["num_hidden_layers"],
        "length": their["max_position_embeddings"],
        "mixer": mixer if isinstance(mixer, list) else [mixer],
        "residual": module_spec("post"),
        "ffn": module_spec(
            "mlp",
            hidden=their["intermediate_size"],
            activation=activation(their.get("hidden_act", "gelu")),
        ),
        "norm": module_spec("layer", eps=their.get("layer_norm_eps", 1e-12)),
        "dropout": their.get("hidden_dropout_prob", 0.1),
    }
    return ModelConfig(**{**known, **changes})


def from_place(start: int) -> Change:
    """A table whose first places are never used: (start + n d) -> (n d)."""
    return lambda table: table[start:]


# ---------------------------------------------------------------------------------------------- BERT, RoBERTa
BERT = WeightMap(
    prefix="bert.",
    rows=(*encoder_rows(*attention_rows()), *cls_heads()),
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
    dropped=CLS_DROPPED,
)


def bert_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours."""
    require(their, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    return encoder_config(their, head, module_spec("vanilla", bias=True))


def first_place(their: Json) -> int:
    """RoBERTa's positions begin behind that of padding."""
    return int(their.get("pad_token_id", 1)) + 1


def roberta_map(their: Json) -> WeightMap:
    """For RoBERTa, XLM-RoBERTa and CamemBERT."""
    rows = encoder_rows(*attention_rows(), first=from_place(first_place(their)))
    return WeightMap(prefix="roberta.", rows=(*rows, *LM_HEADS), dropped=LM_DROPPED)


def roberta_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours."""
    require(their, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    length = their["max_position_embeddings"] - first_place(their)
    return encoder_config(their, head, module_spec("vanilla", bias=True), length=length)


# ---------------------------------------------------------------------------------------------- Longformer
def longformer_map(their: Json) -> WeightMap:
    """Both sets of projections: of the window, and of the marked tokens."""
    marked = (
        *linear_rules(
            "encoder.layer.{i}.attention.self.query_global", f"{LAYER}.mixer.global_heads.q"
        ),
        *linear_rules(
            "encoder.layer.{i}.attention.self.key_global", f"{LAYER}.mixer.global_heads.k"
        ),
        *linear_rules(
            "encoder.layer.{i}.attention.self.value_global", f"{LAYER}.mixer.global_heads.v"
        ),
    )
    rows = encoder_rows(
        *attention_rows(f"{LAYER}.mixer.local"), *marked, first=from_place(first_place(their))
    )
    return WeightMap(prefix="longformer.", rows=(*rows, *LM_HEADS), dropped=LM_DROPPED)


def longformer_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours; their window counts both sides."""
    require(their, position_embedding_type="absolute")
    given, layers = their["attention_window"], their["num_hidden_layers"]
    windows = [given] * layers if isinstance(given, int) else list(given)
    if len(windows) != layers or any(window % 2 for window in windows):
        raise Unsupported(
            f"attention_window must be an even number, or one for each of {layers} layers, not {given!r}"
        )
    mixers = [module_spec("longformer", window=window // 2, bias=True) for window in windows]
    length = their["max_position_embeddings"] - first_place(their)
    return encoder_config(
        their, head, mixers[:1] if len(set(windows)) == 1 else mixers, length=length
    )


# ---------------------------------------------------------------------------------------------- BigBird
BIGBIRD = WeightMap(
    prefix="bert.",
    rows=(
        *encoder_rows(*attention_rows()),
        *cls_heads("pooler"),
        *linear_rules("classifier.dense", "head.hidden"),
        *linear_rules("classifier.out_proj", "head.last"),
    ),
    dropped=CLS_DROPPED,
)


def bigbird_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours, as they evaluate: no random blocks, and the first block so many times more."""
    require(
        their,
        position_embedding_type="absolute",
        is_decoder=False,
        add_cross_attention=False,
        use_bias=True,
    )
    if their.get("attention_type", "block_sparse") == "original_full":
        mixer = module_spec("vanilla", bias=True)
    else:
        mixer = module_spec(
            "bigbird_hf",
            block=their.get("block_size", 64),
            first_block_repeats=their.get("num_random_blocks", 3),
        )
    tokens = TokenInput(
        vocab_size=their["vocab_size"],
        types=their.get("type_vocab_size", 2),
        norm=True,
        scale=bool(their.get("rescale_embeddings", False)),
    )
    return encoder_config(their, head, mixer, input=tokens)


# ---------------------------------------------------------------------------------------------- FNet
FNET = WeightMap(
    prefix="fnet.",
    rows=(
        *encoder_rows(around="fourier.output"),
        *linear_rules("embeddings.projection", "trunk.embed.project"),
        *cls_heads(),
    ),
    dropped=CLS_DROPPED,
)


def fnet_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours."""
    require(their, use_tpu_fourier_optimizations=False)
    tokens = TokenInput(
        vocab_size=their["vocab_size"],
        types=their.get("type_vocab_size", 4),
        norm=True,
        width=their["hidden_size"],
    )
    return encoder_config(
        {"num_attention_heads": 1, **their}, head, module_spec("fnet"), input=tokens
    )


# ---------------------------------------------------------------------------------------------- Nyströmformer
NYSTROM = WeightMap(
    prefix="nystromformer.",
    rows=(
        *encoder_rows(*attention_rows(), first=from_place(2)),
        rule("encoder.layer.{i}.attention.self.conv.weight", f"{LAYER}.mixer.inner.conv.weight"),
        *cls_heads("classifier.dense", "classifier.out_proj"),
        *linear_rules("classifier", "head.last"),
    ),
    dropped=CLS_DROPPED,
)


def nystrom_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours."""
    mixer = module_spec(
        "nystrom", landmarks=their["num_landmarks"], kernel=their.get("conv_kernel_size"), bias=True
    )
    if their["num_landmarks"] == their.get("segment_means_seq_len"):
        raise Unsupported(
            "num_landmarks is segment_means_seq_len, so that their attention is dense: ours is so for short inputs"
        )
    return encoder_config(their, head, mixer)
