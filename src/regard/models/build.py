"""A configuration becomes a model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from regard import registry
from regard.block import Block, Layer
from regard.errors import Unsupported
from regard.ffn import FeedForward
from regard.mixer import Mixer
from regard.models import config as c, heads
from regard.models.components import (
    FFNS,
    NORMS,
    activation_of,
    add_relative_position,
    bind_module,
    build_module,
    build_position,
    init_residual_weights,
    residual_factory,
)
from regard.models.embeddings import InputEmbedding, PatchEmbedding, TokenEmbedding, VectorEmbedding
from regard.models.model import Backbone, Decoder, DualEncoder, Encoder, Model, Seq2Seq
from regard.models.stacks import STACKS, StackBuilder
from regard.norm import Norm
from regard.residual import DeepNormScales, Residual, deepnorm_scales, deepnorm_seq2seq_scales
from regard.stack import build_sublayers

TOLD = ("dim", "causal")  # what the model tells its mixers, and their arguments may not


def build(config: c.ModelConfig) -> Model:
    """The model of a configuration, with fresh weights from torch's generator; what does not fit raises, with the reason."""
    config = config.replace()  # checked again: pydantic's own `model_copy` does not
    model = KINDS[config.kind](config)
    model.config = config
    return model


def build_encoder(config: c.ModelConfig) -> Encoder:
    """See `Encoder`."""
    backbone = Backbone(
        embed_of(config, config.input), *layers_of(config, own_side(config), "encoder")
    )
    return Encoder(backbone, head_of(config, backbone))


def build_pair(config: c.ModelConfig) -> DualEncoder:
    """See `Pair`."""
    backbone = Backbone(
        embed_of(config, config.input), *layers_of(config, own_side(config), "encoder")
    )
    head = head_of(config, backbone)
    if head is None:
        raise ValueError("a model of kind 'pair' has the head 'match'")
    return DualEncoder(backbone, head)


def build_decoder(config: c.ModelConfig) -> Decoder:
    """See `Decoder`."""
    backbone = Backbone(
        embed_of(config, config.input), *layers_of(config, own_side(config), "decoder")
    )
    return Decoder(backbone, head_of(config, backbone))


def build_seq2seq(config: c.ModelConfig) -> Seq2Seq:
    """See `Seq2Seq`.  Both sides share one embedding, unless a target is given."""
    source = embed_of(config, config.input)
    target = source if config.target is None else embed_of(config, config.target)
    encoder = Backbone(source, *layers_of(config, config.encoder or own_side(config), "encoder"))
    decoder = Backbone(
        target,
        *layers_of(
            config, own_side(config), "decoder", cross=config.cross or c.module_spec("vanilla")
        ),
    )
    return Seq2Seq(encoder, decoder, head_of(config, decoder))


KINDS: dict[str, Callable[[c.ModelConfig], Model]] = {
    "encoder": build_encoder,
    "decoder": build_decoder,
    "seq2seq": build_seq2seq,
    "pair": build_pair,
}


# ---------------------------------------------------------------------------------------------- layers
def own_side(config: c.ModelConfig) -> c.EncoderConfig:
    """The layers of a model that has one side, or of its decoder."""
    return c.EncoderConfig(layers=config.layers, mixer=config.mixer, stack=config.stack)


def layers_of(
    config: c.ModelConfig, side: c.EncoderConfig, name: str, cross: c.ModuleSpec | None = None
) -> tuple[Layer, Norm | None]:
    """The stack of one side, and the norm that it leaves to do: behind a bare sum, as a stack without residuals makes too."""
    scales, parts = scales_of(config, name), partial(sub_layers, config, side, name, cross)
    residual = residual_factory(config.residual, side.layers, scales, norm_of(config))

    def block(number: int) -> Block:
        mixer, ffn, look = parts(number)
        with told_where(number, name):
            return Block(mixer, ffn, cross=look, residual=residual, dropout=config.dropout)

    def half_steps(number: int) -> list[Layer]:
        if config.residual != c.ModuleSpec(name="pre"):
            raise ValueError(
                f"a {side.stack.name} stack adds up by itself, norms first: residual must stay 'pre'"
            )
        mixer, ffn, look = parts(number)
        with told_where(number, name):
            return build_sublayers(
                mixer, ffn, cross=look, norm=norm_of(config), dropout=config.dropout
            )

    turns = math.lcm(len(side.mixer), len(config.ffn))
    stack: Layer = bind_module(
        "stack",
        STACKS,
        side.stack,
        StackBuilder(side.layers, turns, block, half_steps, norm_of(config), config.heads),
    )()
    init_residual_weights(config.residual, stack, scales)
    residuals = [part for part in stack.modules() if isinstance(part, Residual)]
    bare = not residuals or any(part.needs_final_norm for part in residuals)
    return stack, norm_of(config)(stack.wide) if bare else None


def sub_layers(
    config: c.ModelConfig, side: c.EncoderConfig, name: str, cross: c.ModuleSpec | None, number: int
) -> tuple[Mixer, FeedForward | None, Mixer | None]:
    """What a layer is made of, the mixers taking turns: what mixes, what feeds forward, and what looks across."""
    with told_where(number, name):
        part = side.mixer[number % len(side.mixer)]
        mixer = mixer_of(config, part, causal=name == "decoder", length=longest(config, name))
        if cross is None:
            return mixer, ffn_of(config, number), None
        look = mixer_of(config, cross, causal=False, length=longest(config, "encoder"), here=False)
        return mixer, ffn_of(config, number), look


@contextmanager
def told_where(number: int, name: str) -> Iterator[None]:
    """What is refused inside is said with its place."""
    try:
        yield
    except Unsupported as refusal:
        raise Unsupported(f"layer {number} of the {name}: {refusal}") from None


def scales_of(config: c.ModelConfig, name: str) -> DeepNormScales:
    """What DeepNorm needs at this depth: an encoder and a decoder that looks at it have other numbers than one alone."""
    if config.kind != "seq2seq":
        return deepnorm_scales(config.layers)
    encoder, decoder = deepnorm_seq2seq_scales(
        (config.encoder or own_side(config)).layers, config.layers
    )
    return encoder if name == "encoder" else decoder


def mixer_of(
    config: c.ModelConfig,
    part: c.ModuleSpec,
    *,
    causal: bool,
    length: int | None,
    here: bool = True,
) -> Mixer:
    """The recipe, told what the model knows: the width, the heads and the length where it needs them, and whether it is causal.

    A recipe with a number of heads of its own, as those without heads have, keeps it unless its arguments say otherwise.
    `here` tells whether tokens look at their own sequence: only then are they so far from each other.
    """
    arguments = {name: frozen(value) for name, value in part.arguments.items()}
    told = sorted(set(TOLD) & set(arguments))
    if told:
        raise ValueError(
            f"{part.name}: {told[0]} is told by the model, so the arguments may not give it"
        )
    parameters = registry.get_recipe(part.name).parameters
    if parameters["heads"].default is inspect.Parameter.empty:
        arguments.setdefault("heads", config.heads)
    if "length" in parameters and length is not None:
        arguments.setdefault("length", length)
    if (
        "length" in parameters
        and parameters["length"].default is inspect.Parameter.empty
        and "length" not in arguments
    ):
        raise ValueError(
            f"{part.name} is built for a longest sequence: give the configuration a length"
        )
    mixer = registry.create(part.name, dim=config.dim, causal=causal, **arguments)
    return (
        add_relative_position(
            config.position, mixer, length=length, columns=columns_of(config, causal)
        )
        if here
        else mixer
    )


def columns_of(config: c.ModelConfig, causal: bool) -> int | None:
    """Of the grid that a side reads; None where it reads none, or a class token stands before it."""
    reads = config.kind != "seq2seq" or not causal
    return (
        config.input.grid[1]
        if reads and isinstance(config.input, c.PatchInput) and not config.input.cls
        else None
    )


def frozen(value: Any) -> Any:
    """Lists as tuples, as recipes take them: JSON has no tuples."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def norm_of(config: c.ModelConfig) -> Callable[[int], Norm]:
    """Width -> norm."""
    return partial(build_module, "norm", NORMS, config.norm)


def ffn_of(config: c.ModelConfig, number: int) -> FeedForward | None:
    """A fresh feed-forward layer for the layer of that number, or None."""
    part = config.ffn[number % len(config.ffn)]
    return None if part is None else build_module("ffn", FFNS, part, config.dim)


def longest(config: c.ModelConfig, side: str) -> int | None:
    """The longest sequence that a side reads: for images as many tokens as there are patches."""
    reads_images = isinstance(config.input, c.PatchInput) and (
        side == "encoder" or config.kind == "decoder"
    )
    return (
        config.input.length
        if reads_images and isinstance(config.input, c.PatchInput)
        else config.length
    )


# ---------------------------------------------------------------------------------------------- embeddings
def embed_of(
    config: c.ModelConfig, given: c.TokenInput | c.VectorInput | c.PatchInput
) -> InputEmbedding:
    """What makes tokens of the input."""
    if isinstance(given, c.PatchInput):
        rows, columns = given.grid
        place = build_position(
            config.position, dim=config.dim, length=rows * columns, rows=rows, columns=columns
        )
        return PatchEmbedding(
            given.grid,
            given.patch,
            config.dim,
            position=place,
            channels=given.channels,
            cls=given.cls,
            stem=given.stem,
            dropout=config.dropout,
        )
    inside = (
        given.width if isinstance(given, c.TokenInput) and given.width is not None else config.dim
    )
    place = build_position(
        config.position, dim=inside, length=config.length, rows=None, columns=None
    )
    if isinstance(given, c.VectorInput):
        return VectorEmbedding(given.width, config.dim, position=place, dropout=config.dropout)
    norm = norm_of(config)(inside) if given.norm else None
    return TokenEmbedding(
        given.vocab_size,
        inside,
        position=place,
        types=given.types,
        scale=given.scale,
        norm=norm,
        dropout=config.dropout,
        out=None if given.width is None else config.dim,
    )


# ---------------------------------------------------------------------------------------------- heads
def head_of(config: c.ModelConfig, backbone: Backbone) -> heads.ModelHead | None:
    """The head of a configuration, as wide as what the trunk gives; it may share the table of the embeddings."""
    if config.head is None:
        return None
    return HEADS[type(config.head)](
        config.model_copy(update={"dim": backbone.stack.wide}), config.head, backbone.embed
    )


def words_of(
    config: c.ModelConfig, embed: InputEmbedding, *, tie_weights: bool, bias: bool
) -> heads.LMHead:
    """Logits over the vocabulary."""
    tokens = config.tokens
    if tokens is None or not isinstance(embed, TokenEmbedding):
        raise ValueError("a head over a vocabulary needs a model that reads tokens")
    return heads.LMHead(
        config.dim, tokens.vocab_size, table=embed.tokens.weight if tie_weights else None, bias=bias
    )


def masked_head(
    config: c.ModelConfig, head: c.MaskedLMHeadConfig, embed: InputEmbedding
) -> heads.ModelHead:
    """See `MaskedLMHead`."""
    words = words_of(config, embed, tie_weights=head.tie_weights, bias=True)
    return heads.MaskedLMHead(
        config.dim,
        words,
        norm=norm_of(config)(config.dim),
        activation=activation_of(head.activation),
    )


def class_head(
    config: c.ModelConfig, head: c.SequenceClassificationHeadConfig, embed: InputEmbedding
) -> heads.ModelHead:
    """See `PredictionHead`."""
    pool = heads.build_pooling(head.pooling, config.dim, config.heads)
    return heads.PredictionHead(
        config.dim, head.classes, pool=pool, hidden=head.hidden, dropout=config.dropout
    )


def match_head(
    config: c.ModelConfig, head: c.MatchingHeadConfig, embed: InputEmbedding
) -> heads.ModelHead:
    """See `MatchingHead`."""
    pool = heads.build_pooling(head.pooling, config.dim, config.heads)
    return heads.MatchingHead(
        config.dim,
        head.classes,
        pool=pool,
        hidden=head.hidden or config.dim,
        dropout=config.dropout,
    )


def number_head(
    config: c.ModelConfig, head: c.RegressionHeadConfig, embed: InputEmbedding
) -> heads.ModelHead:
    """See `PredictionHead`."""
    pool = (
        None
        if head.pooling == c.EACH
        else heads.build_pooling(head.pooling, config.dim, config.heads)
    )
    return heads.PredictionHead(config.dim, head.outputs, pool=pool, dropout=config.dropout)


HEADS: dict[type, Callable[[c.ModelConfig, Any, InputEmbedding], heads.ModelHead]] = {
    c.LMHeadConfig: lambda config, head, embed: words_of(
        config, embed, tie_weights=head.tie_weights, bias=head.bias
    ),
    c.MaskedLMHeadConfig: masked_head,
    c.SequenceClassificationHeadConfig: class_head,
    c.MatchingHeadConfig: match_head,
    c.TokenClassificationHeadConfig: lambda config, head, embed: heads.PredictionHead(
        config.dim, head.classes, dropout=config.dropout
    ),
    c.RegressionHeadConfig: number_head,
    c.PoolingHeadConfig: lambda config, head, embed: heads.PoolingHead(
        heads.build_pooling(head.pooling, config.dim, config.heads), unit=head.unit
    ),
}
