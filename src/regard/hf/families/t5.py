"""T5, and Switch Transformers, which are T5 with experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.hf.families.base import Json, activation, require
from regard.hf.weights import WeightMap, WeightRule, rule, transpose
from regard.models.config import EncoderConfig, HeadConfig, ModelConfig, TokenInput, module_spec


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
            rule("shared.weight", "encoder.embed.tokens.weight"),
            *sides,
            *t5_attention("decoder.block.{i}.layer.1.EncDecAttention", f"{ours}.cross", louder),
            rule("decoder.block.{i}.layer.1.layer_norm.weight", f"{ours}.around_cross.norm.gain"),
            rule("encoder.final_layer_norm.weight", "encoder.norm.gain"),
            rule("decoder.final_layer_norm.weight", "decoder.norm.gain", softer),
            rule("lm_head.weight", "head.words.weight"),
        ),
        dropped=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    )


def t5_names(their: Json) -> WeightMap:
    """See `t5_map`."""
    return t5_map(their["d_kv"], their["d_model"], scaled=t5_scales(their))


def t5_side(side: str, feed: str, louder: Callable[[Tensor], Tensor]) -> list[WeightRule]:
    """What encoder and decoder have in common; `feed` is the place of the feed-forward layer."""
    theirs, ours = f"{side}.block.{{i}}", f"{side}.stack.layers.{{i}}"
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        *t5_attention(f"{theirs}.layer.0.SelfAttention", f"{ours}.mixer", louder),
        rule(bias, f"{ours}.mixer.inner.prior.table", transpose),
        rule(f"{theirs}.layer.0.layer_norm.weight", f"{ours}.around_mixer.norm.gain"),
        rule(f"{theirs}.{feed}.layer_norm.weight", f"{ours}.around_ffn.norm.gain"),
        rule(f"{theirs}.{feed}.DenseReluDense.wi.weight", f"{ours}.ffn.up.weight"),
        rule(f"{theirs}.{feed}.DenseReluDense.wi_0.weight", f"{ours}.ffn.gate.weight"),
        rule(f"{theirs}.{feed}.DenseReluDense.wi_1.weight", f"{ours}.ffn.up.weight"),
        rule(f"{theirs}.{feed}.DenseReluDense.wo.weight", f"{ours}.ffn.down.weight"),
    ]


def t5_attention(theirs: str, ours: str, louder: Callable[[Tensor], Tensor]) -> list[WeightRule]:
    """The four projections."""
    return [
        rule(f"{theirs}.q.weight", f"{ours}.q.weight", louder),
        *(
            rule(f"{theirs}.{a}.weight", f"{ours}.{b}.weight")
            for a, b in (("k", "k"), ("v", "v"), ("o", "out"))
        ),
    ]


def t5_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours."""
    dim, heads, layers = their["d_model"], their["num_heads"], their["num_layers"]
    if dim != heads * their["d_kv"]:
        raise Unsupported(
            f"{heads} heads of {their['d_kv']} are not as wide as a token, {dim}: ours share its width"
        )
    kind = their.get("feed_forward_proj", "relu")
    bend = (
        "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    )  # theirs says gelu, and means this one
    gated = kind.startswith("gated-")
    ffn = module_spec(
        "glu" if gated else "mlp", hidden=their["d_ff"], bias=False, activation=activation(bend)
    )
    buckets, max_distance = (
        their.get("relative_attention_num_buckets", 32),
        their.get("relative_attention_max_distance", 128),
    )
    return ModelConfig(
        kind="seq2seq",
        input=TokenInput(vocab_size=their["vocab_size"]),
        head=head,
        dim=dim,
        heads=heads,
        layers=their.get("num_decoder_layers") or layers,
        encoder=EncoderConfig(layers=layers, mixer=[module_spec("vanilla")]),
        ffn=[ffn],
        norm=module_spec("rms", eps=their.get("layer_norm_epsilon", 1e-6)),
        dropout=their.get("dropout_rate", 0.1),
        position=module_spec("t5", buckets=buckets, max_distance=max_distance),
    )


def t5_scales(their: Json) -> bool:
    """Whether the last tokens are scaled: newer files say so, older ones by whether the logits are tied."""
    return bool(their.get("scale_decoder_outputs", their.get("tie_word_embeddings", True)))


# ---------------------------------------------------------------------------------------------- Switch
def switch_map(their: Json) -> WeightMap:
    """T5's names, and those of the experts, whose weights are stacked in ours."""
    base = t5_map(
        their["d_kv"], their["d_model"], scaled=bool(their.get("tie_word_embeddings", True))
    )
    sides = (("encoder", "layer.1"), ("decoder", "layer.2"))
    experts = [
        each for side, feed in sides for each in switch_rows(side, feed, their["num_experts"])
    ]
    return WeightMap(rows=(*base.rows, *experts), dropped=base.dropped)


def switch_rows(side: str, feed: str, experts: int) -> list[WeightRule]:
    """The feed-forward layers of one side, with experts and without."""
    theirs, ours = f"{side}.block.{{i}}.{feed}.mlp", f"{side}.stack.layers.{{i}}.ffn"
    names = (("wi", "up"), ("wo", "down"))
    every = {
        a: tuple(f"{theirs}.experts.expert_{j}.{a}.weight" for j in range(experts))
        for a, _ in names
    }
    return [
        *(rule(f"{theirs}.{a}.weight", f"{ours}.{b}.weight") for a, b in names),
        *(WeightRule(every[a], (f"{ours}.bank.expert.{b}.weight",), stacked) for a, b in names),
        rule(f"{theirs}.router.classifier.weight", f"{ours}.router.weight"),
        WeightRule(
            (), (f"{ours}.router.drawn",), lambda: torch.zeros((), dtype=torch.long)
        ),  # it has drawn nothing yet
    ]


def stacked(*tensors: Tensor) -> Tensor:
    """One behind the other."""
    return torch.stack(tensors)


def switch_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours: every so many layers one has experts."""
    require(their, router_bias=False, is_gated_act=False)
    plain = t5_config({**their, "feed_forward_proj": their.get("dense_act_fn", "relu")}, head)
    step, other = their["encoder_sparse_step"], their["decoder_sparse_step"]
    if step != other or step < 1:
        raise Unsupported(
            f"experts stand in every {step}th layer of the encoder and every {other}th of the decoder: ours alike"
        )
    feed = plain.ffn[0]
    assert feed is not None
    arguments = {k: v for k, v in feed.arguments.items() if k != "bias"}
    sparse = module_spec(
        "switch",
        experts=their["num_experts"],
        jitter=their.get("router_jitter_noise", 0.01),
        **arguments,
    )
    return plain.replace(ffn=[sparse if step == 1 or i == 1 else feed for i in range(step)])
