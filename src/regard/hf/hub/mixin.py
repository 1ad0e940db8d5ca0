"""Models that transformers has no class for, as vision and sets: `save_pretrained`, `from_pretrained`, `push_to_hub`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from regard.hf.checkpoints import refuse_pickle_files
from regard.models import Model, ModelConfig, build
from regard.models.serialization import parse_config


class HubModel(nn.Module, PyTorchModelHubMixin, library_name="regard", tags=["regard"]):
    """Any model of ours, of any input and head: `HubModel.of(model)`.  It is called as the model is, which stands in `net`.

    model   the `ModelConfig` as JSON says it
    """

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.net = build(parse_config(json.dumps(model), "config.json"))

    @classmethod
    def of(cls, model: Model | ModelConfig) -> HubModel:
        """A model of ours with its weights (the same tensors, not copies), or a fresh one of a configuration."""
        if not isinstance(model, Model | ModelConfig):
            raise TypeError(
                f"a model of Regard, or a Config, is expected, not {type(model).__name__}"
            )
        config = model if isinstance(model, ModelConfig) else model.config
        if config is None:
            raise ValueError(
                "this model was built by hand: only one that `build` made of a configuration can be wrapped"
            )
        said = json.loads(config.model_dump_json())
        if isinstance(model, ModelConfig):
            return cls(model=said)
        with torch.device("meta"):  # its own weights would only take memory
            coat = cls(model=said)
        coat.net = model
        return coat.train(model.training)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, strict: bool = True, **named: Any) -> HubModel:
        """Theirs, but strict unless told otherwise: it would leave missing and unknown weights without a word."""
        if Path(model_id).is_dir():
            refuse_pickle_files(Path(model_id))
        try:
            found: HubModel = super()._from_pretrained(model_id=model_id, strict=strict, **named)
        except RuntimeError as error:
            raise ValueError(
                f"the weights in {model_id} do not fit their config.json: {error}"
            ) from None
        return found

    @classmethod
    def _load_as_pickle(cls, model: Any, model_file: str, *given: Any) -> NoReturn:
        """Refused."""
        refuse_pickle_files(Path(model_file))
        raise AssertionError(model_file)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """See the model."""
        out: Tensor = self.net(*given, **named)
        return out
