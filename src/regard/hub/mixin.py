"""Models that transformers has no class for, as vision and sets: `save_pretrained`, `from_pretrained`, `push_to_hub`."""

from __future__ import annotations

import json
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from regard.models import Config, Model, build
from regard.models.save import parse


class HubModel(nn.Module, PyTorchModelHubMixin, library_name="regard", tags=["regard"]):
    """Any model of ours, of any input and head: `HubModel.of(model)`.  It is called as the model is, which stands in `net`.

    model   the `Config` as JSON says it
    """

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.net = build(parse(json.dumps(model), "config.json"))

    @classmethod
    def of(cls, model: Model | Config) -> HubModel:
        """A model of ours with its weights (the same tensors, not copies), or a fresh one of a configuration."""
        config = model if isinstance(model, Config) else model.config
        if config is None:
            raise ValueError("this model was built by hand: only one that `build` made of a configuration can be wrapped")
        said = json.loads(config.model_dump_json())
        if isinstance(model, Config):
            return cls(model=said)
        with torch.device("meta"):  # its own weights would only take memory
            coat = cls(model=said)
        coat.net = model
        return coat.train(model.training)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """See the model."""
        out: Tensor = self.net(*given, **named)
        return out
