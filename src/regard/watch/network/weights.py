"""Networks as JSON values and arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.models import Model, ModelConfig, build
from regard.models.serialization import check_shapes, load_tensors, unique_tensors, warn_nonfinite
from regard.watch.network.settings import NetworkSettings

Arrays = dict[str, npt.NDArray[Any]]


def model_json(model: Model) -> dict[str, Any]:
    """The configuration of a model."""
    assert model.config is not None
    return model.config.model_dump(mode="json")


def model_tensors(model: Model) -> Arrays:
    """The weights of a model."""
    return {name: each.detach().numpy() for name, each in unique_tensors(model).items()}


def load_model(content: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Model:
    """The model of a configuration and weights, in evaluation mode."""
    config = ModelConfig.model_validate_json(json.dumps(content))
    model = build(config)
    tensors = {name: torch.from_numpy(np.array(each)) for name, each in arrays.items()}
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    check_shapes(unique_tensors(model), shapes, "the network")
    warn_nonfinite(tensors, "the network")
    load_tensors(model, tensors)
    return model.eval()


def load_settings(content: Mapping[str, Any]) -> NetworkSettings:
    """The settings that were saved with a network."""
    return NetworkSettings.model_validate_json(json.dumps(content))


def with_prefix(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays whose name has a prefix, without it."""
    return {
        name.removeprefix(prefix): each for name, each in arrays.items() if name.startswith(prefix)
    }
