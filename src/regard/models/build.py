"""Builds a model from its configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from regard import registry
from regard.block import Block, Layer
from regard.deep_init import deepnorm_init
from regard.errors import Unsupported
from regard.ffn import FEED_FORWARDS, FeedForward, get_activation
from regard.mixer import Mixer
from regard.models import config as c, heads
from regard.models.components import (
    add_relative_position,
    bind_module,
    build_module,
    build_position,
    residual_factory,
)
from regard.models.embeddings import InputEmbedding, PatchEmbedding, TokenEmbedding, VectorEmbedding
from regard.models.model import Backbone, Decoder, DualEncoder, Encoder, Model, Seq2Seq
from regard.models.stacks import STACKS, StackBuilder
from regard.norm import NORMS, Norm
from regard.residual import DeepNormScales, Residual, deepnorm_scales, deepnorm_seq2seq_scales
from regard.stack import build_sublayers


def build(config: c.ModelConfig) -> Model:
    """Build the model of a configuration, with random weights from torch's global generator.

    Raises:
        ValueError, Unsupported: The parts do not fit together; the message says why.
    """
    config = config.replace()  # validated again, which pydantic's `model_copy` does not
    model = MODELS[config.kind](config)
    model.config = config
    return model


def build_encoder(config: c.ModelConfig) -> Encoder:
    """Build an `Encoder`."""
    backbone = build_backbone(config, "encoder")
    return Encoder(backbone, build_head(config, backbone))


def build_decoder(config: c.ModelConfig) -> Decoder:
    """Build a `Decoder`."""
    backbone = build_backbone(config, "decoder")
    return Decoder(backbone, build_head(config, backbone))


def build_dual_encoder(config: c.ModelConfig) -> DualEncoder:
    """Build a `DualEncoder`."""
    backbone = build_backbone(config, "encoder")
    head = build_head(config, backbone)
    assert head is not None  # checked by the configuration
    return DualEncoder(backbone, head)


def build_seq2seq(config: c.ModelConfig) -> Seq2Seq:
    """Build a `Seq2Seq`. Encoder and decoder share one embedding, unless the target has its own."""
    source = build_embedding(config, config.input)
    target = source if config.target is None else build_embedding(config, config.target)
    encoder = Backbone(source, *build_stack(config, "encoder"))
    decoder = Backbone(target, *build_stack(config, "decoder"))
    return Seq2Seq(encoder, decoder, build_head(config, decoder))


MODELS: dict[str, Callable[[c.ModelConfig], Model]] = {
    "encoder": build_encoder,
    "decoder": build_decoder,
    "seq2seq": build_seq2seq,
    "dual_encoder": build_dual_encoder,
}


def build_backbone(config: c.ModelConfig, role: str) -> Backbone:
    """Build embedding, layers and final norm."""
    return Backbone(build_embedding(config, config.input), *build_stack(config, role))


# ------------------------------------------------------------------------------------------- layers
def build_stack(config: c.ModelConfig, role: str) -> tuple[Layer, Norm | None]:
    """Build the layers of a side, "encoder" or "decoder", and its final norm if it needs one."""
    side = side_config(config, role)
    scales, norm = side_scales(config, role), norm_factory(config)
    residual = residual_factory(config.residual, side.layers, scales, norm)

    def build_block(index: int) -> Block:
        with name_layer(index, role):
            mixer, cross, ffn = build_layer_modules(config, role, index)
            return Block(mixer, ffn, cross=cross, residual=residual, dropout=config.dropout)

    def build_layer_sublayers(index: int) -> list[Layer]:
        if config.residual != c.ModuleSpec(name="pre"):
            raise ValueError(
                f"a {side.stack.name} stack has its own pre-norm residuals: residual must be 'pre'"
            )
        with name_layer(index, role):
            mixer, cross, ffn = build_layer_modules(config, role, index)
            return build_sublayers(mixer, ffn, cross=cross, norm=norm, dropout=config.dropout)

    period = math.lcm(len(side.mixer), len(config.ffn))
    builder = StackBuilder(
        side.layers, period, build_block, build_layer_sublayers, norm, config.heads
    )
    stack: Layer = bind_module("stack", STACKS, side.stack, builder)()
    if config.residual.name == "deepnorm":
        deepnorm_init(stack, scales.beta)
    residuals = [module for module in stack.modules() if isinstance(module, Residual)]
    needs_norm = not residuals or any(residual.needs_final_norm for residual in residuals)
    return stack, norm(stack.out_dim) if needs_norm else None


def side_config(config: c.ModelConfig, role: str) -> c.EncoderConfig:
    """Layers, mixers and stack of the encoder or decoder of a model."""
    if role == "encoder" and config.encoder is not None:
        return config.encoder
    return c.EncoderConfig(layers=config.layers, mixer=config.mixer, stack=config.stack)


def side_scales(config: c.ModelConfig, role: str) -> DeepNormScales:
    """DeepNorm's scales of the encoder or decoder of a model."""
    if config.kind != "seq2seq":
        return deepnorm_scales(config.layers)
    encoder, decoder = deepnorm_seq2seq_scales(side_config(config, "encoder").layers, config.layers)
    return encoder if role == "encoder" else decoder


def build_layer_modules(
    config: c.ModelConfig, role: str, index: int
) -> tuple[Mixer, Mixer | None, FeedForward | None]:
    """Build mixer, cross-attention and feed-forward layer of layer `index`."""
    mixers, ffns = side_config(config, role).mixer, config.ffn
    spec, causal, length = mixers[index % len(mixers)], role == "decoder", max_length(config, role)
    mixer = add_relative_position(
        config.position,
        build_mixer(config, spec, causal=causal, length=length),
        length=length,
        columns=grid_columns(config, role),
    )
    cross = None
    if config.kind == "seq2seq" and role == "decoder":
        spec = config.cross or c.module_spec("vanilla")
        cross = build_mixer(config, spec, causal=False, length=max_length(config, "encoder"))
    ffn_spec = ffns[index % len(ffns)]
    if ffn_spec is None:
        return mixer, cross, None
    return mixer, cross, build_module("ffn", FEED_FORWARDS, ffn_spec, config.dim)


@contextmanager
def name_layer(index: int, role: str) -> Iterator[None]:
    """Prefix `Unsupported` errors with the layer."""
    try:
        yield
    except Unsupported as error:
        raise Unsupported(f"layer {index} of the {role}: {error}") from None


def build_mixer(
    config: c.ModelConfig, spec: c.ModuleSpec, *, causal: bool, length: int | None
) -> Mixer:
    """Create a recipe, with the width, heads and length of the model where it needs them.

    A recipe with a default number of heads keeps it, unless its arguments set another.
    """
    arguments = {name: lists_to_tuples(value) for name, value in spec.arguments.items()}
    for name in ("causal", "dim"):
        if name in arguments:
            raise ValueError(f"{spec.name}: the model sets {name}, leave it out of the arguments")
    parameters = registry.get_recipe(spec.name).parameters
    required = inspect.Parameter.empty
    if parameters["heads"].default is required:
        arguments.setdefault("heads", config.heads)
    if "length" in parameters and length is not None:
        arguments.setdefault("length", length)
    if (
        "length" in parameters
        and parameters["length"].default is required
        and "length" not in arguments
    ):
        raise ValueError(f"{spec.name} needs a maximum length: set length in the configuration")
    return registry.create(spec.name, dim=config.dim, causal=causal, **arguments)


def lists_to_tuples(value: Any) -> Any:
    """Convert lists to tuples, which JSON lacks and recipes take."""
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list) else value


def norm_factory(config: c.ModelConfig) -> Callable[[int], Norm]:
    """Factory (width -> norm)."""
    return partial(build_module, "norm", NORMS, config.norm)


def image_input(config: c.ModelConfig, role: str) -> c.PatchInput | None:
    """Image input of a side; None if it reads no images."""
    reads_input = role == "encoder" or config.kind == "decoder"
    return config.input if reads_input and isinstance(config.input, c.PatchInput) else None


def grid_columns(config: c.ModelConfig, role: str) -> int | None:
    """Columns of the image grid of a side; None without one, or with a class token before it."""
    image = image_input(config, role)
    return None if image is None or image.class_token else image.grid[1]


def max_length(config: c.ModelConfig, role: str) -> int | None:
    """Maximum sequence length of a side; for images the number of tokens."""
    image = image_input(config, role)
    return config.length if image is None else image.length


# --------------------------------------------------------------------------------------- embeddings
def build_embedding(
    config: c.ModelConfig, source: c.TokenInput | c.VectorInput | c.PatchInput
) -> InputEmbedding:
    """Build the embedding of an input."""
    dim, dropout = config.dim, config.dropout
    if isinstance(source, c.PatchInput):
        rows, columns = source.grid
        return PatchEmbedding(
            source.grid,
            source.patch_size,
            dim,
            position=build_position(
                config.position, dim=dim, length=rows * columns, rows=rows, columns=columns
            ),
            channels=source.channels,
            class_token=source.class_token,
            stem=source.stem,
            dropout=dropout,
        )
    if isinstance(source, c.VectorInput):
        position = build_position(config.position, dim=dim, length=config.length)
        return VectorEmbedding(source.width, dim, position=position, dropout=dropout)
    embedding_dim = source.embedding_dim or dim
    return TokenEmbedding(
        source.vocab_size,
        embedding_dim,
        position=build_position(config.position, dim=embedding_dim, length=config.length),
        type_vocab_size=source.type_vocab_size,
        scale=source.scale_embeddings,
        norm=norm_factory(config)(embedding_dim) if source.norm else None,
        dropout=dropout,
        out_dim=None if source.embedding_dim is None else dim,
    )


# -------------------------------------------------------------------------------------------- heads
def build_head(config: c.ModelConfig, backbone: Backbone) -> heads.ModelHead | None:
    """Build the head of a configuration, for the output width of the backbone."""
    head, dim, dropout = config.head, backbone.stack.out_dim, config.dropout
    match head:
        case None:
            return None
        case c.LMHeadConfig():
            return build_lm_head(config, backbone, head.tie_weights, head.bias)
        case c.MaskedLMHeadConfig():
            return heads.MaskedLMHead(
                dim,
                build_lm_head(config, backbone, head.tie_weights, bias=True),
                norm=norm_factory(config)(dim),
                activation=get_activation(head.activation),
            )
        case c.TokenClassificationHeadConfig():
            return heads.PredictionHead(dim, head.num_classes, dropout=dropout)
        case c.RegressionHeadConfig(pooling="none"):
            return heads.PredictionHead(dim, head.num_outputs, dropout=dropout)
    pooling = heads.build_pooling(head.pooling, dim, config.heads)
    match head:
        case c.SequenceClassificationHeadConfig():
            return heads.PredictionHead(
                dim,
                head.num_classes,
                pooling=pooling,
                hidden_layer=head.hidden_layer,
                dropout=dropout,
            )
        case c.MatchingHeadConfig():
            hidden = head.hidden or dim
            return heads.MatchingHead(
                dim, head.num_classes, pooling=pooling, hidden=hidden, dropout=dropout
            )
        case c.RegressionHeadConfig():
            return heads.PredictionHead(dim, head.num_outputs, pooling=pooling, dropout=dropout)
        case c.PoolingHeadConfig():
            return heads.PoolingHead(pooling, normalize=head.normalize)


def build_lm_head(
    config: c.ModelConfig, backbone: Backbone, tie_weights: bool, bias: bool
) -> heads.LMHead:
    """Build a language-modelling head, tied to the token embeddings or not."""
    assert config.tokens is not None
    assert isinstance(backbone.embed, TokenEmbedding)
    weight = backbone.embed.tokens.weight if tie_weights else None
    dim = backbone.stack.out_dim
    return heads.LMHead(dim, config.tokens.vocab_size, weight=weight, bias=bias)
