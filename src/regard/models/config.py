"""Model configuration, as strict JSON: unknown keys are errors.

ModelConfig(kind="decoder", input={"kind": "tokens", "vocab_size": 256}, dim=64, heads=4, layers=2,
            length=128, mixer="local", head={"kind": "lm"})

The configurations of inputs are in `regard.models.embeddings`, those of heads in
`regard.models.heads`, each beside the module that it describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from regard.models.detection_head import DetectionHeadConfig as DetectionHeadConfig
from regard.models.embeddings import (
    FeatureInput as FeatureInput,
    InputConfig as InputConfig,
    InputSpec as InputSpec,
    PatchInput as PatchInput,
    TokenInput as TokenInput,
    VectorInput as VectorInput,
    VideoInput as VideoInput,
)
from regard.models.heads import (
    LMHeadConfig as LMHeadConfig,
    MaskedLMHeadConfig as MaskedLMHeadConfig,
    MatchingHeadConfig as MatchingHeadConfig,
    PoolingHeadConfig as PoolingHeadConfig,
    RegressionHeadConfig as RegressionHeadConfig,
    SegmentationHeadConfig as SegmentationHeadConfig,
    SequenceClassificationHeadConfig as SequenceClassificationHeadConfig,
    TokenClassificationHeadConfig as TokenClassificationHeadConfig,
)
from regard.models.spec import (
    Depth as Depth,
    ModuleSpec as ModuleSpec,
    OptionalSpecList as OptionalSpecList,
    Probability as Probability,
    Size as Size,
    SpecList as SpecList,
    StrictModel as StrictModel,
    VocabSize as VocabSize,
    as_list as as_list,
    as_optional_list as as_optional_list,
    module_spec as module_spec,
    parse_json_int as parse_json_int,
)

HeadConfig = Annotated[
    LMHeadConfig
    | MaskedLMHeadConfig
    | SequenceClassificationHeadConfig
    | MatchingHeadConfig
    | TokenClassificationHeadConfig
    | RegressionHeadConfig
    | SegmentationHeadConfig
    | DetectionHeadConfig
    | PoolingHeadConfig,
    Field(discriminator="kind"),
]

# keys of attention layers, which a recurrent model does not have
ATTENTION_PARTS = ("mixer", "stack", "ffn", "norm", "residual", "position", "cross", "encoder")


class EncoderConfig(StrictModel):
    """Encoder of a seq2seq model, where it differs from the decoder."""

    layers: Depth
    mixer: SpecList
    stack: ModuleSpec | None = None


class RNNConfig(StrictModel):
    """A recurrent encoder and decoder in a seq2seq model, with one layer each.

    Attributes:
        attention: Whether the decoder attends to all annotations of the source (Bahdanau et al.
            2015), or has one context vector (Cho et al. 2014).
    """

    attention: bool = True


class DRAWConfig(StrictModel):
    """What a DRAW model has beside the width of its recurrent states.

    Attributes:
        glimpses: Number T of steps.
        latent: Width of the latent vector z of each step.
        read_size: Rows and columns N of the patch that a step reads. None: the whole image, without
            attention.
        write_size: Rows and columns of the patch that a step writes. None: the whole image.
    """

    glimpses: Annotated[int, Field(ge=1, le=1 << 12)] = 16
    latent: Size = 32
    read_size: Size | None = 5
    write_size: Size | None = 5


class ModelConfig(StrictModel):
    """Configuration of a model; `regard.models.build` builds it.

    Attributes:
        kind: "encoder", "decoder" (causal), "seq2seq" (encoder and decoder with cross-attention),
            "dual_encoder" (one encoder reads two sequences separately; the head matches them) or
            "draw" (a recurrent autoencoder of images).
        input: `TokenInput`, `FeatureInput`, `VectorInput`, `PatchInput` or `VideoInput`.
        head: Head, or None to return the tokens (b, n, d).
        length: Maximum sequence length, for positional encodings and mixers that need one.
        mixer: Recipe of each layer, or a few recipes that repeat.
        stack: How layers are combined, see `regard.models.stacks.STACKS`. None: the stack that the
            mixer brings along, such as "realformer", else "sequential".
        ffn: Feed-forward layer, or several that repeat as mixers do. None: no feed-forward layer.
        position: Positional encoding, see `regard.models.components.POSITIONS`.
        dropout: Dropout of embeddings and of the output of each sub-layer.
        seed: Seed of what recipes draw beside their weights: random features, hashes, random
            blocks, noise. Each layer has a seed of its own that follows from it, unless the
            arguments of the recipe set `seed`.
        cross: seq2seq only: recipe of the cross-attention.
        encoder: seq2seq only: layers, mixers and stack of the encoder. None: those of the decoder,
            which must then work causal and non-causal.
        target: seq2seq only: input of the decoder. None: shares the embedding of the encoder.
        rnn: seq2seq only: a recurrent encoder and decoder of width `dim`. `heads`, `layers` are
            then 1, and the parts of attention layers keep their defaults. None: attention layers.
        draw: draw only: its glimpses; `dim` is the width of its states, and other parts as with
            `rnn`.
    """

    kind: Literal["encoder", "decoder", "seq2seq", "dual_encoder", "draw"]
    input: InputConfig
    head: HeadConfig | None = None
    dim: Size
    heads: Size
    layers: Depth
    length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    mixer: SpecList = Field(default=[ModuleSpec(name="vanilla")])
    stack: ModuleSpec | None = None
    ffn: OptionalSpecList = Field(default=[ModuleSpec(name="mlp")])
    norm: ModuleSpec = ModuleSpec(name="layer")
    residual: ModuleSpec = ModuleSpec(name="pre")
    position: ModuleSpec = ModuleSpec(name="learned")
    dropout: Probability = 0.0
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    cross: ModuleSpec | None = None
    encoder: EncoderConfig | None = None
    target: TokenInput | None = None
    rnn: RNNConfig | None = None
    draw: DRAWConfig | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        check_head(self)
        check_seq2seq_keys(self)
        check_rnn(self)
        check_draw(self)
        if (
            self.kind != "seq2seq"
            and self.input.fixed_length is not None
            and self.length not in (None, self.input.fixed_length)
        ):
            raise ValueError(
                f"length is {self.length} but the image has {self.input.fixed_length} tokens: "
                "leave length out"
            )
        check_repeats("mixer", self.mixer, self.layers)
        check_repeats("ffn", self.ffn, self.layers)
        if self.encoder is not None:
            check_repeats("encoder.mixer", self.encoder.mixer, self.encoder.layers)
            check_repeats("ffn", self.ffn, self.encoder.layers)
        return self

    def replace(self, **changes: Any) -> ModelConfig:
        """Copy with some keys changed, validated: `config.replace(mixer="fnet")`."""
        unchanged = {name: value for name, value in self if name not in changes}
        return ModelConfig(**{**unchanged, **changes})

    @property
    def tokens(self) -> TokenInput | None:
        """Vocabulary of an LM head: the target's, or the input's. None if neither is tokens."""
        source = self.input if self.target is None else self.target
        return source if isinstance(source, TokenInput) else None


def check_head(config: ModelConfig) -> None:
    """Check that the head fits the input and the kind of model."""
    head = config.head
    if config.kind == "dual_encoder" and not isinstance(config.input, TokenInput):
        raise ValueError(f"kind 'dual_encoder' reads 'tokens', not {config.input.kind!r}")
    if head is None:
        if config.kind == "dual_encoder":
            raise ValueError("kind 'dual_encoder' needs head 'matching', not None")
        return
    if head.needs_vocabulary and config.tokens is None:
        raise ValueError(
            f"head {head.kind!r} needs a vocabulary, but the input is {config.input.kind!r}"
        )
    if config.kind not in head.models:
        others = {"dual_encoder": "'matching'", "seq2seq": "'lm' or null"}
        hint = f": use head {others[config.kind]}" if config.kind in others else ""
        needed = " or ".join(map(repr, head.models))
        raise ValueError(f"head {head.kind!r} needs kind {needed}, not {config.kind!r}{hint}")


def check_seq2seq_keys(config: ModelConfig) -> None:
    """Check that only seq2seq models have their keys, and that their decoder reads tokens."""
    if config.kind != "seq2seq":
        for name in ("cross", "encoder", "target", "rnn"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} is for kind 'seq2seq', not {config.kind!r}")
    elif config.tokens is None:
        raise ValueError(
            "the decoder of a seq2seq model reads tokens, "
            f"but the input is {config.input.kind!r}: set target"
        )
    if (
        config.kind == "decoder"
        and isinstance(config.input, PatchInput)
        and config.input.class_token
    ):
        raise ValueError(
            "the class token of a decoder would come first and see no patch: set class_token=false"
        )


def check_rnn(config: ModelConfig) -> None:
    """Check a model with `rnn`."""
    if config.rnn is None:
        return
    refuse_attention_parts(config, "rnn")
    if not isinstance(config.input, TokenInput) or not isinstance(config.head, LMHeadConfig):
        raise ValueError("a model with rnn reads 'tokens' and has head 'lm'")


def check_draw(config: ModelConfig) -> None:
    """Check that the kind "draw" and only this kind has `draw`, and reads images."""
    if (config.kind == "draw") != (config.draw is not None):
        raise ValueError(f"kind 'draw' and draw belong together, but the kind is {config.kind!r}")
    if config.draw is None:
        return
    refuse_attention_parts(config, "draw")
    if not isinstance(config.input, PatchInput) or config.head is not None:
        raise ValueError("a model of kind 'draw' reads 'patches' and has no head")
    side = min(config.input.height, config.input.width)
    for name in ("read_size", "write_size"):
        size = getattr(config.draw, name)
        if size is not None and size > side:
            raise ValueError(f"draw.{name} is {size}, more than the {side} pixels of the image")


def refuse_attention_parts(config: ModelConfig, name: str) -> None:
    """Check that a recurrent model, described by the key `name`, has no parts of attention
    layers."""
    for count in ("heads", "layers"):
        if getattr(config, count) != 1:
            raise ValueError(f"a model with {name} has {count} 1, not {getattr(config, count)}")
    for part in ATTENTION_PARTS:
        if getattr(config, part) != ModelConfig.model_fields[part].get_default():
            raise ValueError(f"a model with {name} has no {part}: leave it out")


def check_repeats(name: str, specs: Sequence[ModuleSpec | None], layers: int) -> None:
    """Check that the specs repeat evenly over the layers."""
    if not specs or layers % len(specs):
        raise ValueError(
            f"{name} has {len(specs)} entries for {layers} layers: "
            "give one per layer, or a number that divides the layers"
        )
