# mypy: disable-error-code="no-untyped-call, arg-type, attr-defined"
"""The configuration of our models in the layout of transformers: config.json, with all of ours under "model"."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedConfig

from regard.models.config import (
    ModelConfig,
    RegressionHeadConfig,
    SequenceClassificationHeadConfig,
    TokenClassificationHeadConfig,
)
from regard.models.serialization import format_validation_error


class RegardConfig(PreTrainedConfig):
    """`RegardConfig.of(config)` of a `regard.models.ModelConfig`; `config.regard` is that again.

    model      the `ModelConfig` as JSON says it, with its head
    use_cache  whether `generate` carries the state of the stream from token to token
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
            ours = self.regard
            self.is_encoder_decoder = ours.kind == "seq2seq"
            if self.id2label is None and kwargs.get("num_labels") is None:
                kwargs["num_labels"] = labels_of(ours) or 2
            if self.is_encoder_decoder and self.decoder_start_token_id is None:
                self.decoder_start_token_id = (
                    self.bos_token_id if self.bos_token_id is not None else self.pad_token_id
                )
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, config: ModelConfig, **more: Any) -> RegardConfig:
        """Ours in theirs; `more` are their own keys, such as pad_token_id and id2label."""
        return cls(model=json.loads(config.model_dump_json()), **more)

    @property
    def regard(self) -> ModelConfig:
        """Theirs as ours, checked."""
        if self.model is None:
            raise ValueError(
                "this configuration says nothing of the model: make it by RegardConfig.of(config)"
            )
        try:
            return ModelConfig.model_validate_json(json.dumps(self.model))
        except ValidationError as error:
            raise ValueError(
                f"config.json holds no model of ours under 'model': {format_validation_error(error)}"
            ) from None

    @regard.setter
    def regard(self, config: ModelConfig) -> None:
        self.model = json.loads(config.model_dump_json())

    # what other code asks of any configuration
    hidden_size = property(lambda self: self.regard.dim)
    num_hidden_layers = property(lambda self: self.regard.layers)
    num_attention_heads = property(lambda self: self.regard.heads)
    max_position_embeddings = property(lambda self: self.regard.length)

    @property
    def vocab_size(self) -> int | None:
        """Of the tokens that come out, or go in; None: there are none."""
        tokens = None if self.model is None else self.regard.tokens
        return None if tokens is None else tokens.vocab_size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        ours = self.regard
        key = "input" if ours.target is None else "target"
        if ours.tokens is None:
            raise ValueError(f"a model that reads {ours.input.kind} has no vocabulary to change")
        self.regard = ours.replace(**{key: ours.tokens.model_copy(update={"vocab_size": size})})


def labels_of(config: ModelConfig) -> int | None:
    """How many labels the head tells apart; None: it has none."""
    if isinstance(config.head, SequenceClassificationHeadConfig | TokenClassificationHeadConfig):
        return config.head.classes
    return config.head.outputs if isinstance(config.head, RegressionHeadConfig) else None
