"""`HubModel`: Regard models on the Hub, also those without a class in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from regard.hf.files import refuse_pickle_files
from regard.models import Model, ModelConfig, build
from regard.models.serialization import parse_config


class HubModel(nn.Module, PyTorchModelHubMixin, library_name="regard", tags=["regard"]):
    """Any Regard model with `save_pretrained`, `from_pretrained` and `push_to_hub`.

    `HubModel.wrap(model)` wraps a model.

    It is called like the model, which is in `net`.

    Args:
        model: The `ModelConfig` as JSON.
    """

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.net = build(parse_config(json.dumps(model), "config.json"))

    @classmethod
    def wrap(cls, model: Model | ModelConfig) -> HubModel:
        """Wrap a model (sharing its weights), or a new model of a configuration."""
        if not isinstance(model, Model | ModelConfig):
            raise TypeError(
                f"Expected a Regard model or a ModelConfig, not {type(model).__name__}."
            )
        config = require_config(model) if isinstance(model, Model) else model
        values = json.loads(config.model_dump_json())
        if isinstance(model, ModelConfig):
            return cls(model=values)
        with torch.device("meta"):  # without memory for weights that are replaced at once
            wrapper = cls(model=values)
        wrapper.net = model
        return wrapper.train(model.training)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, strict: bool = True, **kwargs: Any) -> HubModel:
        """Strict by default: huggingface_hub ignores missing and unexpected weights otherwise."""
        if Path(model_id).is_dir():
            refuse_pickle_files(Path(model_id))
        try:
            model: HubModel = super()._from_pretrained(model_id=model_id, strict=strict, **kwargs)
        except RuntimeError as error:
            raise ValueError(
                f"The weights in {model_id} do not fit its config.json: {error}"
            ) from None
        return model

    @classmethod
    def _load_as_pickle(cls, model: Any, model_file: str, *args: Any) -> NoReturn:
        refuse_pickle_files(Path(model_file))
        raise AssertionError(model_file)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the model."""
        out: Tensor = self.net(*args, **kwargs)
        return out


def require_config(model: Model) -> ModelConfig:
    """The configuration of a model, which only models from `build` have."""
    if model.config is None:
        raise ValueError(
            "The model has no configuration: only models that `build` made can be wrapped."
        )
    return model.config
