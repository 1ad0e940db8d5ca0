"""Model configuration, as strict JSON: unknown keys are errors.

ModelConfig(kind="decoder", input={"kind": "tokens", "vocab_size": 256}, dim=64, heads=4, layers=2,
            length=128, mixer="local", head={"kind": "lm"})
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from regard.errors import did_you_mean

# The upper bounds keep a file from asking for more than any machine has.
Size = Annotated[int, Field(ge=1, le=1 << 20)]
VocabSize = Annotated[int, Field(ge=1, le=1 << 24)]
Depth = Annotated[int, Field(ge=1, le=4096)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class StrictModel(BaseModel):
    """Frozen pydantic model whose errors name the nearest valid key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                hint = did_you_mean(str(key), cls.model_fields)
                raise ValueError(f"{cls.__name__} has no {key!r}: {hint}")
        return values


def parse_json_int(digits: str) -> int:
    """Parse an integer of a JSON file. Larger than 2^53 is an error: JSON readers disagree."""
    if abs(int(digits)) > 1 << 53:
        raise ValueError(f"{digits[:20]}… is larger than 2^53")
    return int(digits)


class ModuleSpec(StrictModel):
    """Name of a module and the arguments to build it with.

    Written as "local", or {"name": "local", "arguments": {"window": 64}}.
    """

    name: str
    arguments: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("arguments")
    @classmethod
    def _check_json(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            text = json.dumps(arguments, allow_nan=False)
            return dict(json.loads(text, parse_int=parse_json_int))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"arguments must be JSON values, so that the model can be saved: {error}"
            ) from None


def module_spec(name: str, /, **arguments: Any) -> ModuleSpec:
    """Shorthand for a `ModuleSpec`: `module_spec("local", window=64)`."""
    return ModuleSpec(name=name, arguments=arguments)


def as_list(value: Any) -> Any:
    """Wrap a single spec into a list."""
    return [value] if isinstance(value, str | dict | ModuleSpec) else value


def as_optional_list(value: Any) -> Any:
    """Wrap a single spec, or None, into a list."""
    return [None] if value is None else as_list(value)


SpecList = Annotated[list[ModuleSpec], BeforeValidator(as_list)]
OptionalSpecList = Annotated[list[ModuleSpec | None], BeforeValidator(as_optional_list)]


# ------------------------------------------------------------------------------------------- inputs
class TokenInput(StrictModel):
    """Token ids (b, n).

    Attributes:
        vocab_size: Number of token ids.
        embedding_dim: Width of the embedding tables, followed by a linear projection to the model
            width. None: the model width, without a projection.
        type_vocab_size: Number of token types (segments in BERT). 0: no token types.
        scale_embeddings: Multiply embeddings by √d (Vaswani et al. 2017).
        norm: Apply the model's norm to the sum of the embeddings.
    """

    kind: Literal["tokens"] = "tokens"
    vocab_size: VocabSize
    embedding_dim: Size | None = None
    type_vocab_size: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    scale_embeddings: bool = False
    norm: bool = False


class VectorInput(StrictModel):
    """Vectors (b, n, width): features, elements of a set, values of a time series."""

    kind: Literal["vectors"] = "vectors"
    width: Size


class PatchInput(StrictModel):
    """Images (b, channels, height, width), split into square patches.

    Attributes:
        patch_size: Side of a patch. Must divide height and width.
        class_token: Prepend a learned class token.
        stem: "linear", or "conv": a sequence of stride-2 convolutions (XCiT).
    """

    kind: Literal["patches"] = "patches"
    height: Size
    width: Size
    patch_size: Size
    channels: Size = 3
    class_token: bool = True
    stem: Literal["linear", "conv"] = "linear"

    @model_validator(mode="after")
    def _check_patch_size(self) -> Self:
        size = self.patch_size
        if self.stem == "conv" and (size < 2 or size & (size - 1)):
            raise ValueError(f"stem 'conv' needs a patch_size that is a power of 2, not {size}")
        if self.height % size or self.width % size:
            raise ValueError(
                f"patch_size {size} does not divide the image size {self.height} × {self.width}"
            )
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // self.patch_size, self.width // self.patch_size

    @property
    def length(self) -> int:
        """Number of tokens of an image."""
        rows, columns = self.grid
        return rows * columns + self.class_token


InputConfig = Annotated[TokenInput | VectorInput | PatchInput, Field(discriminator="kind")]


# -------------------------------------------------------------------------------------------- heads
class LMHeadConfig(StrictModel):
    """Language-modelling head: logits over the vocabulary for each token, (b, n, vocab_size).

    Attributes:
        tie_weights: Share the weights of the token embeddings.
    """

    kind: Literal["lm"] = "lm"
    tie_weights: bool = True
    bias: bool = False


class MaskedLMHeadConfig(StrictModel):
    """BERT's masked-LM head: norm(σ(W x + b)), then vocabulary logits (b, n, vocab_size)."""

    kind: Literal["masked_lm"] = "masked_lm"
    tie_weights: bool = True
    activation: str = "gelu"


class SequenceClassificationHeadConfig(StrictModel):
    """Logits over classes for a whole sequence, (b, num_classes).

    Attributes:
        pooling: How tokens become one vector, see `regard.models.heads.POOLINGS`.
        hidden_layer: Insert a layer tanh(W x + b) before the classifier, as in BERT.
    """

    kind: Literal["sequence_classification"] = "sequence_classification"
    num_classes: Size
    pooling: str = "cls"
    hidden_layer: bool = False


class MatchingHeadConfig(StrictModel):
    """Logits over classes for a pair of sequences, (b, num_classes).

    W₂ relu(W₁ [u, v, u ∘ v, u − v]) of the pooled sequences u and v
    (Tay et al. 2020, arXiv 2011.04006, after Mou et al. 2016, arXiv 1512.08422).

    Attributes:
        hidden: Rows of W₁. None: the model width.
    """

    kind: Literal["matching"] = "matching"
    num_classes: Size
    pooling: str = "mean"
    hidden: Size | None = None


class TokenClassificationHeadConfig(StrictModel):
    """Logits over classes for each token, (b, n, num_classes)."""

    kind: Literal["token_classification"] = "token_classification"
    num_classes: Size


class RegressionHeadConfig(StrictModel):
    """Numbers for a whole sequence, (b, num_outputs), or with pooling "none" for each token."""

    kind: Literal["regression"] = "regression"
    num_outputs: Size = 1
    pooling: str = "mean"


class PoolingHeadConfig(StrictModel):
    """One vector for a whole sequence, (b, d); `normalize` scales it to length 1."""

    kind: Literal["pooling"] = "pooling"
    pooling: str = "mean"
    normalize: bool = False


HeadConfig = Annotated[
    LMHeadConfig
    | MaskedLMHeadConfig
    | SequenceClassificationHeadConfig
    | MatchingHeadConfig
    | TokenClassificationHeadConfig
    | RegressionHeadConfig
    | PoolingHeadConfig,
    Field(discriminator="kind"),
]


# ------------------------------------------------------------------------------------------- models
class EncoderConfig(StrictModel):
    """Encoder of a seq2seq model, where it differs from the decoder."""

    layers: Depth
    mixer: SpecList
    stack: ModuleSpec = ModuleSpec(name="sequential")


class ModelConfig(StrictModel):
    """Configuration of a model; `regard.models.build` builds it.

    Attributes:
        kind: "encoder", "decoder" (causal), "seq2seq" (encoder and decoder with cross-attention) or
            "dual_encoder" (one encoder reads two sequences separately; the head matches them).
        input: `TokenInput`, `VectorInput` or `PatchInput`.
        head: Head, or None to return the tokens (b, n, d).
        length: Maximum sequence length, for positional encodings and mixers that need one.
        mixer: Recipe of each layer, or a few recipes that repeat.
        stack: How layers are combined, see `regard.models.stacks.STACKS`.
        ffn: Feed-forward layer, or several that repeat as mixers do. None: no feed-forward layer.
        position: Positional encoding, see `regard.models.components.POSITIONS`.
        dropout: Dropout of embeddings and of the output of each sub-layer.
        cross: seq2seq only: recipe of the cross-attention.
        encoder: seq2seq only: layers, mixers and stack of the encoder. None: those of the decoder,
            which must then work causal and non-causal.
        target: seq2seq only: input of the decoder. None: shares the embedding of the encoder.
    """

    kind: Literal["encoder", "decoder", "seq2seq", "dual_encoder"]
    input: InputConfig
    head: HeadConfig | None = None
    dim: Size
    heads: Size
    layers: Depth
    length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    mixer: SpecList = [ModuleSpec(name="vanilla")]
    stack: ModuleSpec = ModuleSpec(name="sequential")
    ffn: OptionalSpecList = [ModuleSpec(name="mlp")]
    norm: ModuleSpec = ModuleSpec(name="layer")
    residual: ModuleSpec = ModuleSpec(name="pre")
    position: ModuleSpec = ModuleSpec(name="learned")
    dropout: Probability = 0.0
    cross: ModuleSpec | None = None
    encoder: EncoderConfig | None = None
    target: TokenInput | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        check_head(self)
        check_seq2seq_keys(self)
        if (
            self.kind != "seq2seq"
            and isinstance(self.input, PatchInput)
            and self.length not in (None, self.input.length)
        ):
            raise ValueError(
                f"length is {self.length} but the image has {self.input.length} tokens: "
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
    if isinstance(head, LMHeadConfig | MaskedLMHeadConfig) and config.tokens is None:
        raise ValueError(
            f"head {head.kind!r} needs a vocabulary, but the input is {config.input.kind!r}"
        )
    if isinstance(head, MaskedLMHeadConfig) and config.kind != "encoder":
        raise ValueError(
            f"head 'masked_lm' needs an encoder, but kind is {config.kind!r}: use head 'lm'"
        )
    if config.kind == "dual_encoder" and not isinstance(head, MatchingHeadConfig):
        given = None if head is None else head.kind
        raise ValueError(f"kind 'dual_encoder' needs head 'matching', not {given!r}")
    if isinstance(head, MatchingHeadConfig) and config.kind != "dual_encoder":
        raise ValueError(f"head 'matching' needs kind 'dual_encoder', not {config.kind!r}")
    if config.kind == "dual_encoder" and not isinstance(config.input, TokenInput):
        raise ValueError(f"kind 'dual_encoder' reads 'tokens', not {config.input.kind!r}")
    if config.kind == "seq2seq" and not isinstance(head, LMHeadConfig | None):
        raise ValueError(f"the head of a seq2seq model is 'lm' or null, not {head.kind!r}")


def check_seq2seq_keys(config: ModelConfig) -> None:
    """Check that only seq2seq models have their keys, and that their decoder reads tokens."""
    if config.kind != "seq2seq":
        for name in ("cross", "encoder", "target"):
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


def check_repeats(name: str, specs: Sequence[ModuleSpec | None], layers: int) -> None:
    """Check that the specs repeat evenly over the layers."""
    if not specs or layers % len(specs):
        raise ValueError(
            f"{name} has {len(specs)} entries for {layers} layers: "
            "give one per layer, or a number that divides the layers"
        )
