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
from regard.cells import BahdanauDecoder, BiEncoder, DeepOutput, FixedContextDecoder
from regard.deep_init import deepnorm_init
from regard.errors import Unsupported
from regard.ffn import FEED_FORWARDS, FeedForward
from regard.mixer import Mixer
from regard.models import config as c, heads
from regard.models.components import (
    add_relative_position,
    bind_module,
    build_module,
    build_position,
    residual_factory,
)
from regard.models.draw import DRAW
from regard.models.embeddings import EmbeddingContext, InputEmbedding, TokenEmbedding
from regard.models.model import (
    Backbone,
    Decoder,
    DualEncoder,
    Encoder,
    EncoderDecoder,
    Model,
    Seq2Seq,
)
from regard.models.recurrent import RNNSeq2Seq
from regard.models.stacks import STACKS, StackBuilder, mixers_stack
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


def build_seq2seq(config: c.ModelConfig) -> EncoderDecoder:
    """Build a `Seq2Seq`, or with `rnn` a `RNNSeq2Seq`. Encoder and decoder share
    one embedding, unless the target has its own."""
    if config.rnn is not None:
        return build_rnn(config, config.rnn)
    source = build_embedding(config, config.input)
    target = source if config.target is None else build_embedding(config, config.target)
    encoder = Backbone(source, *build_stack(config, "encoder"))
    decoder = Backbone(target, *build_stack(config, "decoder"))
    return Seq2Seq(encoder, decoder, build_head(config, decoder))


def build_rnn(config: c.ModelConfig, rnn: c.RNNConfig) -> RNNSeq2Seq:
    """Build a `RNNSeq2Seq`; all widths are `dim`, and that of an annotation is twice as large."""
    head, tokens, dim = config.head, config.tokens, config.dim
    assert isinstance(head, c.LMHeadConfig)  # checked by the configuration, as the next
    assert tokens is not None
    plain = config.replace(rnn=None, position=c.ModuleSpec(name="none"))
    source = build_embedding(plain, config.input)
    target = source if config.target is None else build_embedding(plain, config.target)
    decoder = (BahdanauDecoder if rnn.attention else FixedContextDecoder)(dim, dim, 2 * dim)
    output = DeepOutput(dim, dim, 2 * dim, tokens.vocab_size, width=dim)
    if head.tie_weights:
        assert isinstance(target, TokenEmbedding)
        if target.tokens.weight.shape != output.out.weight.shape:
            raise ValueError("tie_weights needs embeddings of the model's width: embedding_dim")
        output.out.weight = target.tokens.weight
    return RNNSeq2Seq(source, target, BiEncoder(dim, dim), decoder, output, dropout=config.dropout)


def build_draw(config: c.ModelConfig) -> DRAW:
    """Build a `DRAW`."""
    source, draw = config.input, config.draw
    assert isinstance(source, c.PatchInput)  # checked by the configuration, as the next
    assert draw is not None
    shape = source.channels, source.height, source.width
    return DRAW(shape, config.dim, draw, seed=config.seed)


MODELS: dict[str, Callable[[c.ModelConfig], Model]] = {
    "encoder": build_encoder,
    "decoder": build_decoder,
    "seq2seq": build_seq2seq,
    "dual_encoder": build_dual_encoder,
    "draw": build_draw,
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
    shared: dict[str, Mixer] = {}

    def build_block(index: int, count: int) -> Block:
        with name_layer(config, index, role):
            mixer, cross, ffn = build_layer_modules(config, role, index, count, shared)
            return Block(mixer, ffn, cross=cross, residual=residual, dropout=config.dropout)

    def build_layer_sublayers(index: int, count: int) -> list[Layer]:
        if config.residual != c.ModuleSpec(name="pre"):
            assert side.stack is not None
            raise ValueError(
                f"a {side.stack.name} stack has its own pre-norm residuals: residual must be 'pre'"
            )
        with name_layer(config, index, role):
            mixer, cross, ffn = build_layer_modules(config, role, index, count, shared)
            return build_sublayers(mixer, ffn, cross=cross, norm=norm, dropout=config.dropout)

    period = math.lcm(len(side.mixer), len(config.ffn))
    builder = StackBuilder(
        side.layers, period, build_block, build_layer_sublayers, norm, config.heads, residual
    )
    stack: Layer
    if side.stack is None:
        stack = mixers_stack(builder)
    else:
        stack = bind_module("stack", STACKS, side.stack, builder)()
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
    config: c.ModelConfig, role: str, index: int, count: int, shared: dict[str, Mixer]
) -> tuple[Mixer, Mixer | None, FeedForward | None]:
    """Build mixer, cross-attention and feed-forward layer of layer `index` of `count`.

    `shared` holds the mixers whose projections later layers share, and gets those of this layer.
    """
    side, ffns = side_config(config, role), config.ffn
    spec, causal = side.mixer[index % len(side.mixer)], role == "decoder"
    length = max_length(config, role)
    mixer_seed, cross_seed, ffn_seed = (
        registry.derive_seed(config.seed, int(causal), index, part) for part in range(3)
    )
    alike = [i for i in range(count) if side.mixer[i % len(side.mixer)] == spec]
    layer = registry.LayerNumber(alike.index(index), len(alike))
    mixer = add_relative_position(
        config.position,
        build_mixer(
            config, spec, shared, causal=causal, length=length, layer=layer, seed=mixer_seed
        ),
        length=length,
        columns=grid_columns(config, role),
    )
    if mixer.requires_stack and side.stack and side.stack.name != mixer.stack_name:
        raise Unsupported(
            f"{mixer.name} needs the stack {mixer.stack_name!r}, which passes on what it hands to "
            f"the next layer; the stack {side.stack.name!r} does not. Leave stack out, or use the "
            "mixer 'vanilla'"
        )
    cross = None
    if config.kind == "seq2seq" and role == "decoder":
        spec = config.cross or c.module_spec("vanilla")
        length = max_length(config, "encoder")
        cross = build_mixer(
            config, spec, shared, causal=False, length=length, layer=None, seed=cross_seed
        )
        if cross.requires_stack:
            raise Unsupported(
                f"{cross.name} hands something to the next layer, and cross-attention passes "
                "nothing on: use cross='vanilla'"
            )
    ffn_spec = ffns[index % len(ffns)]
    if ffn_spec is None:
        return mixer, cross, None
    build_ffn = FEED_FORWARDS.get(ffn_spec.name)
    takes_seed = build_ffn is not None and "seed" in inspect.signature(build_ffn).parameters
    options = {"seed": ffn_seed} if takes_seed and "seed" not in ffn_spec.arguments else {}
    return mixer, cross, build_module("ffn", FEED_FORWARDS, ffn_spec, config.dim, **options)


@contextmanager
def name_layer(config: c.ModelConfig, index: int, role: str) -> Iterator[None]:
    """Prefix `Unsupported` errors with the layer; say how a mixer that is not causal can be used in
    the encoder alone."""
    try:
        yield
    except Unsupported as error:
        hint = ""
        if config.kind == "seq2seq" and role == "decoder" and config.encoder is None:
            hint = (
                " To use it in the encoder alone, set encoder (for regard train: --encoder-mixer) "
                "and leave the mixer of the decoder causal."
            )
        raise Unsupported(f"layer {index} of the {role}: {error}{hint}") from None


def build_mixer(
    config: c.ModelConfig,
    spec: c.ModuleSpec,
    shared: dict[str, Mixer],
    *,
    causal: bool,
    length: int | None,
    layer: registry.LayerNumber | None,
    seed: int,
) -> Mixer:
    """Create a recipe, with the width, heads and length of the model where it needs them, and the
    number and seed of the layer.

    A recipe with a default number of heads keeps it, unless its arguments set another. With
    share="layers", it gets the first mixer of the same spec as `projection`.
    """
    arguments = {name: lists_to_tuples(value) for name, value in spec.arguments.items()}
    for name in ("causal", "dim"):
        if name in arguments:
            raise ValueError(f"{spec.name}: the model sets {name}, leave it out of the arguments")
    recipe = registry.get_recipe(spec.name)
    parameters = recipe.parameters
    arguments |= recipe.layer_options(arguments, layer=layer, seed=seed)
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
    if "projection" not in parameters or arguments.get("share") != "layers":
        return registry.create(spec.name, dim=config.dim, causal=causal, **arguments)
    key = f"{'cross' if layer is None else 'self'} {spec.model_dump_json()}"
    arguments["projection"] = shared.get(key)
    shared[key] = registry.create(spec.name, dim=config.dim, causal=causal, **arguments)
    return shared[key]


def lists_to_tuples(value: Any) -> Any:
    """Convert lists to tuples, which JSON lacks and recipes take."""
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list) else value


def norm_factory(config: c.ModelConfig) -> Callable[[int], Norm]:
    """Factory (width -> norm)."""
    return partial(build_module, "norm", NORMS, config.norm)


def side_input(config: c.ModelConfig, role: str) -> c.InputSpec | None:
    """Input of a side; None for the decoder of a seq2seq model."""
    return config.input if role == "encoder" or config.kind == "decoder" else None


def grid_columns(config: c.ModelConfig, role: str) -> int | None:
    """Columns of the grid that the tokens of a side form; None if they form none."""
    source = side_input(config, role)
    return None if source is None or source.grid is None else source.grid[1]


def max_length(config: c.ModelConfig, role: str) -> int | None:
    """Maximum sequence length of a side."""
    source = side_input(config, role)
    fixed = None if source is None else source.fixed_length
    return config.length if fixed is None else fixed


# -------------------------------------------------------------------------------- input and head
def build_embedding(config: c.ModelConfig, source: c.InputSpec) -> InputEmbedding:
    """Build the embedding of an input."""

    def position(dim: int, length: int | None, grid: tuple[int, int] | None) -> Any:
        cells = {} if grid is None else {"rows": grid[0], "columns": grid[1]}
        return build_position(config.position, dim=dim, length=length, **cells)

    return source.build(
        EmbeddingContext(config.dim, config.dropout, config.length, norm_factory(config), position)
    )


def build_head(config: c.ModelConfig, backbone: Backbone) -> heads.ModelHead | None:
    """Build the head of a configuration, for the output width of the backbone."""
    if config.head is None:
        return None
    tokens, embed = config.tokens, backbone.embed
    return config.head.build(
        heads.HeadContext(
            backbone.stack.out_dim,
            config.heads,
            config.dropout,
            norm_factory(config),
            vocab_size=None if tokens is None else tokens.vocab_size,
            embeddings=embed.tokens.weight if isinstance(embed, TokenEmbedding) else None,
        )
    )
