# mypy: disable-error-code="no-untyped-call, arg-type, attr-defined"
"""`RegardConfig`: the configuration of a Regard model in the format of transformers."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedConfig

from regard.errors import format_validation_error
from regard.models.config import (
    ModelConfig,
    RegressionHeadConfig,
    SequenceClassificationHeadConfig,
    TokenClassificationHeadConfig,
)


class RegardConfig(PreTrainedConfig):
    """Wraps a `ModelConfig`; create it with `RegardConfig.from_model_config(config)`.

    Attributes:
        model: The `ModelConfig` with its head, as JSON. `config.regard` is the `ModelConfig`
            itself.
        use_cache: Whether `generate` carries the state of the stream from token to token.
    """

    model_type = "regard"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    model: dict[str, Any] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.model is not None:
            config = self.regard
            self.is_encoder_decoder = config.kind == "seq2seq"
            if self.id2label is None and kwargs.get("num_labels") is None:
                kwargs["num_labels"] = count_labels(config) or 2
            if self.is_encoder_decoder and self.decoder_start_token_id is None:
                has_bos = self.bos_token_id is not None
                self.decoder_start_token_id = self.bos_token_id if has_bos else self.pad_token_id
        super().__post_init__(**kwargs)

    @classmethod
    def from_model_config(cls, config: ModelConfig, **kwargs: Any) -> RegardConfig:
        """Wrap a `ModelConfig`; `kwargs` are keys of transformers such as pad_token_id."""
        return cls(model=json.loads(config.model_dump_json()), **kwargs)

    @property
    def regard(self) -> ModelConfig:
        """The `ModelConfig`, validated."""
        if self.model is None:
            raise ValueError(
                "The configuration has no model: create it with "
                "RegardConfig.from_model_config(config)."
            )
        try:
            return ModelConfig.model_validate_json(json.dumps(self.model))
        except ValidationError as error:
            message = format_validation_error(error)
            raise ValueError(
                f"config.json has no valid Regard model under 'model': {message}"
            ) from None

    @regard.setter
    def regard(self, config: ModelConfig) -> None:
        self.model = json.loads(config.model_dump_json())

    # names that other code expects of any configuration
    hidden_size = property(lambda self: self.regard.dim)
    num_hidden_layers = property(lambda self: self.regard.layers)
    num_attention_heads = property(lambda self: self.regard.heads)
    max_position_embeddings = property(lambda self: self.regard.length)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the output, or else of the input. None: the model has none."""
        tokens = None if self.model is None else self.regard.tokens
        return None if tokens is None else tokens.vocab_size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        config = self.regard
        if config.tokens is None:
            raise ValueError(f"A model with input {config.input.kind!r} has no vocabulary.")
        key = "input" if config.target is None else "target"
        self.regard = config.replace(**{key: config.tokens.model_copy(update={"vocab_size": size})})


def count_labels(config: ModelConfig) -> int | None:
    """The number of labels of the head, or None if it has none."""
    if isinstance(config.head, SequenceClassificationHeadConfig | TokenClassificationHeadConfig):
        return config.head.num_classes
    return config.head.num_outputs if isinstance(config.head, RegressionHeadConfig) else None
