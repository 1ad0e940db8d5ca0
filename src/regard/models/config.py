"""What a model is made of, in words: JSON in and out, and nothing that is not known.

Config(kind="decoder", input={"kind": "tokens", "vocab": 256}, dim=64, heads=4, layers=2, length=128,
       mixer="local", head={"kind": "language"})
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from regard.errors import did_you_mean

# The upper bounds keep a file from asking for more than any machine has.
Size = Annotated[int, Field(ge=1, le=1 << 20)]
Vocabulary = Annotated[int, Field(ge=1, le=1 << 24)]
Depth = Annotated[int, Field(ge=1, le=4096)]
Share = Annotated[float, Field(ge=0, lt=1)]

EACH = "each"  # the pooling that does not pool


def whole(digits: str) -> int:
    """A whole number as JSON has it; beyond 2^53 its readers do not agree, and nothing is so large."""
    if abs(int(digits)) > 1 << 53:
        raise ValueError(f"{digits[:20]}… is larger than 2^53")
    return int(digits)


class StrictModel(BaseModel):
    """A part of a configuration: unknown keys are errors that name the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(
                    f"{cls.__name__} has no {key!r}: {did_you_mean(str(key), cls.model_fields)}"
                )
        return given


class ModuleSpec(StrictModel):
    """A name in a table, or of a recipe, and the arguments that it takes: "local", or {"name": "local", "arguments": {...}}."""

    name: str
    arguments: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @field_validator("arguments")
    @classmethod
    def _plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        try:
            read = json.loads(json.dumps(given, allow_nan=False), parse_int=whole)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"arguments must be what JSON can say, so that a model can be saved: {error}"
            ) from None
        return dict(read)


def module_spec(name: str, /, **arguments: Any) -> ModuleSpec:
    """`part("local", window=64)`."""
    return ModuleSpec(name=name, arguments=arguments)


# ---------------------------------------------------------------------------------------------- what goes in
class TokenInput(StrictModel):
    """Token numbers (b n).

    types   how many kinds of tokens are told apart, as the two sentences of BERT; 0: none
    scale   embeddings times √d (Vaswani et al. 2017)
    norm    the model's norm stands behind the sum of the embeddings
    width   of the tables, and a linear layer behind them gives the width of the model; None: that width at once, no such layer
    """

    kind: Literal["tokens"] = "tokens"
    vocab_size: Vocabulary
    width: Size | None = None
    types: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    scale: bool = False
    norm: bool = False


class VectorInput(StrictModel):
    """Vectors (b n width): features of any kind, the elements of a set, the values of a time series."""

    kind: Literal["vectors"] = "vectors"
    width: Size


class PatchInput(StrictModel):
    """Images (b channels height width), cut into patches.

    patch   height and width of a patch; both must divide those of the image
    cls     a learned token stands before the patches
    stem    what makes a token of a patch: "linear", or "convolutions" of stride 2, one after the other (XCiT)
    """

    kind: Literal["patches"] = "patches"
    height: Size
    width: Size
    patch: Size
    channels: Size = 3
    cls: bool = True
    stem: Literal["linear", "convolutions"] = "linear"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.stem == "convolutions" and (self.patch < 2 or self.patch & (self.patch - 1)):
            raise ValueError(
                f"convolutions of stride 2 make patches of 2, 4, 8, ..., not of {self.patch}"
            )
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(
                f"patches of {self.patch} do not fill an image of {self.height} × {self.width}"
            )
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // self.patch, self.width // self.patch

    @property
    def length(self) -> int:
        """How many tokens an image becomes."""
        rows, columns = self.grid
        return rows * columns + self.cls


InputConfig = Annotated[TokenInput | VectorInput | PatchInput, Field(discriminator="kind")]


# ---------------------------------------------------------------------------------------------- what comes out
class LMHeadConfig(StrictModel):
    """Logits over the vocabulary for each token, (b n vocab).

    tie    the weights are those of the embeddings
    """

    kind: Literal["language"] = "language"
    tie_weights: bool = True
    bias: bool = False


class MaskedLMHeadConfig(StrictModel):
    """BERT's masked-token head: norm(σ(W x + b)), then logits over the vocabulary with a bias, (b n vocab)."""

    kind: Literal["masked"] = "masked"
    tie_weights: bool = True
    activation: str = "gelu"


class SequenceClassificationHeadConfig(StrictModel):
    """Logits over classes for a whole sequence, (b classes).

    pooling   how tokens become one vector, see `regard.models.heads.POOLINGS`
    hidden    a layer tanh(W x + b) stands before the last one, as in BERT
    """

    kind: Literal["classify"] = "classify"
    classes: Size
    pooling: str = "cls"
    hidden: bool = False


class MatchingHeadConfig(StrictModel):
    """Logits over classes for two sequences, (b classes), from u and v, each pooled: W₂ relu(W₁ [u, v, u ∘ v, u − v])
    (Tay et al. 2020, arXiv 2011.04006, after Mou et al. 2016, arXiv 1512.08422).

    hidden    rows of W₁; None: the width of the model
    """

    kind: Literal["match"] = "match"
    classes: Size
    pooling: str = "mean"
    hidden: Size | None = None


class TokenClassificationHeadConfig(StrictModel):
    """Logits over classes for each token, (b n classes)."""

    kind: Literal["tag"] = "tag"
    classes: Size


class RegressionHeadConfig(StrictModel):
    """Numbers for a whole sequence, (b outputs), or with pooling "each" for each token, (b n outputs)."""

    kind: Literal["regress"] = "regress"
    outputs: Size = 1
    pooling: str = "mean"


class PoolingHeadConfig(StrictModel):
    """One vector for a whole sequence, (b d), of length 1 where `unit`."""

    kind: Literal["pooled"] = "pooled"
    pooling: str = "mean"
    unit: bool = False


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


# ---------------------------------------------------------------------------------------------- the whole
class EncoderConfig(StrictModel):
    """The encoder of an encoder–decoder, where it differs from the decoder."""

    layers: Depth
    mixer: list[ModuleSpec]
    stack: ModuleSpec = ModuleSpec(name="plain")

    @field_validator("mixer", mode="before")
    @classmethod
    def _one(cls, given: Any) -> Any:
        return as_list(given)


class ModelConfig(StrictModel):
    """All of a model.

    kind       "encoder", "decoder" (causal), "seq2seq" (both, with cross-attention) or "pair" (an encoder that reads two
               sequences, one by one, and says how they match)
    input      what goes in: `TokenInput`, `VectorInput` or `PatchInput`
    head       what comes out: None gives the tokens (b n d) themselves
    length     the longest sequence; for positions and mixers that need one, else None: any
    mixer      a recipe, or several: then one for each layer, or a few that are repeated
    stack      how the layers stand together, see `regard.models.stacks.STACKS`
    ffn        a feed-forward layer, or several that take turns as mixers do; None: such a layer only mixes
    position   see `regard.models.components.POSITIONS`
    dropout    of embeddings, and of what each sub-layer adds
    cross      the recipe that looks from a decoder at its encoder; `encoder` and `target` are for seq2seq too:
    encoder    its layers, mixers and stack, those of the decoder unless given (they must then do both)
    target     what goes into the decoder: the same embeddings as for the encoder, unless given
    """

    kind: Literal["encoder", "decoder", "seq2seq", "pair"]
    input: InputConfig
    head: HeadConfig | None = None
    dim: Size
    heads: Size
    layers: Depth
    length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    mixer: list[ModuleSpec] = [ModuleSpec(name="vanilla")]
    stack: ModuleSpec = ModuleSpec(name="plain")
    ffn: list[ModuleSpec | None] = [ModuleSpec(name="mlp")]
    norm: ModuleSpec = ModuleSpec(name="layer")
    residual: ModuleSpec = ModuleSpec(name="pre")
    position: ModuleSpec = ModuleSpec(name="learned")
    dropout: Share = 0.0
    cross: ModuleSpec | None = None
    encoder: EncoderConfig | None = None
    target: TokenInput | None = None

    @field_validator("mixer", mode="before")
    @classmethod
    def _one(cls, given: Any) -> Any:
        return as_list(given)

    @field_validator("ffn", mode="before")
    @classmethod
    def _one_or_none(cls, given: Any) -> Any:
        return [None] if given is None else as_list(given)

    @model_validator(mode="after")
    def _sound(self) -> Self:
        check_head(self)
        check_sides(self)
        check_length(self)
        check_turns("mixer", self.mixer, self.layers)
        check_turns("ffn", self.ffn, self.layers)
        if self.encoder is not None:
            check_turns("encoder.mixer", self.encoder.mixer, self.encoder.layers)
            check_turns("ffn", self.ffn, self.encoder.layers)
        return self

    def replace(self, **changes: Any) -> ModelConfig:
        """The same with some keys changed, and checked: `config.but(mixer="fnet")`."""
        same = {name: value for name, value in self if name not in changes}
        return ModelConfig(**{**same, **changes})

    @property
    def tokens(self) -> TokenInput | None:
        """The vocabulary that the head speaks; None where no tokens come out."""
        source = self.input if self.target is None else self.target
        return source if isinstance(source, TokenInput) else None


def as_list(given: Any) -> Any:
    """One part as a list of it."""
    return [given] if isinstance(given, str | dict | ModuleSpec) else given


def check_head(config: ModelConfig) -> None:
    """A head must fit what goes in, and the kind of model."""
    if isinstance(config.head, LMHeadConfig | MaskedLMHeadConfig) and config.tokens is None:
        raise ValueError(
            f"a {config.head.kind} head speaks a vocabulary, and {config.input.kind} have none"
        )
    if isinstance(config.head, MaskedLMHeadConfig) and config.kind != "encoder":
        raise ValueError(
            f"a masked head fills gaps from both sides, and a {config.kind} sees one: take head 'language'"
        )
    if (config.kind == "pair") != isinstance(config.head, MatchingHeadConfig):
        raise ValueError("a model of kind 'pair' has the head 'match', and no other has it")
    if config.kind == "pair" and not isinstance(config.input, TokenInput):
        raise ValueError(f"a model of kind 'pair' reads tokens, not {config.input.kind}")
    if config.kind == "seq2seq" and not isinstance(config.head, LMHeadConfig | None):
        raise ValueError(
            f"a seq2seq model speaks tokens: its head is 'language' or null, not {config.head.kind!r}"
        )


def check_sides(config: ModelConfig) -> None:
    """What only an encoder–decoder has is given to no other."""
    if config.kind != "seq2seq":
        given = {"cross": config.cross, "encoder": config.encoder, "target": config.target}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise ValueError(
                f"{extra[0]} is for seq2seq, and this is a model of kind {config.kind!r}"
            )
    elif config.tokens is None:
        raise ValueError(
            f"the decoder of a seq2seq model reads tokens, and its input are {config.input.kind}: give target"
        )
    if config.kind == "decoder" and isinstance(config.input, PatchInput) and config.input.cls:
        raise ValueError(
            "a class token before the patches of a decoder would see none of them: give cls=false"
        )


def check_length(config: ModelConfig) -> None:
    """The number of patches is the length of an image."""
    if (
        config.kind != "seq2seq"
        and isinstance(config.input, PatchInput)
        and config.length not in (None, config.input.length)
    ):
        raise ValueError(
            f"length is {config.length}, and the image has {config.input.length} tokens: leave length out"
        )


def check_turns(name: str, parts: Sequence[ModuleSpec | None], layers: int) -> None:
    """Parts take turns evenly."""
    if not parts or layers % len(parts):
        raise ValueError(
            f"{name} names {len(parts)}, and there are {layers} layers: one for each, or a few that repeat evenly"
        )
