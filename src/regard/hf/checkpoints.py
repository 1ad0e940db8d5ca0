"""Published checkpoints as Regard models, converted by `regard.hf.families`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from regard.errors import did_you_mean
from regard.hf import families
from regard.hf.families.base import Json
from regard.hf.files import read_json_object, refuse_pickle_files
from regard.hf.weights import WeightMap, load_weights
from regard.models.build import build
from regard.models.config import HeadConfig, ModelConfig
from regard.models.model import Model
from regard.models.serialization import CONFIG_NAME, WEIGHTS_NAME, open_safetensors

INDEX_NAME = WEIGHTS_NAME + ".index.json"  # of weights in several files


def convert_config(
    config: Json, head: HeadConfig | None = None, tensors: Mapping[str, Tensor] | None = None
) -> tuple[ModelConfig, WeightMap]:
    """Convert the contents of a config.json.

    Args:
        config: Contents of config.json of transformers or timm.
        head: Head of the Regard model. None: it returns tokens.
        tensors: Weights of the checkpoint. Needed for timm, whose config.json has no sizes.

    Returns:
        The configuration of the Regard model and the map of the weights.
    """
    if "architecture" in config:
        return _convert_timm(str(config["architecture"]), config, head, tensors)
    model_type = str(config.get("model_type"))
    if model_type not in families.CHECKPOINTS:
        hint = did_you_mean(model_type, [*families.CHECKPOINTS, *families.TIMM])
        raise ValueError(f"Cannot convert models of type {model_type!r}: {hint}")
    family = families.CHECKPOINTS[model_type]
    try:
        return family.convert_config(config, head), family.weight_map(config)
    except KeyError as key:
        raise ValueError(f"The configuration of this {model_type} model lacks {key}.") from None


def _convert_timm(
    name: str, config: Json, head: HeadConfig | None, tensors: Mapping[str, Tensor] | None
) -> tuple[ModelConfig, WeightMap]:
    """Convert a timm model such as "mixer_b16_224" or "xcit_small_12_p16_224"."""
    kind = name.split("_")[0]
    if kind not in families.TIMM:
        raise ValueError(
            f"Cannot convert the timm model {name!r}: {did_you_mean(kind, families.TIMM)}"
        )
    if tensors is None:
        raise ValueError(
            f"The sizes of the timm model {name!r} are read from its weights: give the tensors."
        )
    size = (config.get("pretrained_cfg") or {}).get("input_size")
    try:
        return families.TIMM[kind](tensors, head, size[-1] if size else 224)
    except KeyError as key:
        raise ValueError(f"The weights of {name!r} lack {key}, which gives its sizes.") from None


def convert_checkpoint(
    source: str | Path | Mapping[str, Tensor],
    head: HeadConfig | None = None,
    *,
    config: Json | None = None,
    ignore: Iterable[str] = (),
) -> Model:
    """Load a published model as a Regard model, in evaluation mode.

    Args:
        source: Folder with config.json and model.safetensors (one file or several with an index),
            or tensors by name.
        head: Head of the model. None: it returns tokens (b, n, d).
        config: Contents of config.json, if `source` is tensors. Replaces the file of a folder.
        ignore: Patterns of checkpoint names that may stay unused, e.g. "pooler.*".
    """
    if isinstance(source, Mapping):
        tensors = dict(source)
        if config is None:
            raise ValueError(
                "Tensors alone do not determine the model: give `config`, the contents of "
                "config.json."
            )
    else:
        folder = Path(source)
        if not folder.exists():
            download = f"huggingface_hub.snapshot_download({str(source)!r})"
            raise FileNotFoundError(
                f"No folder {source}. For a model on the Hub, give the folder from {download}."
            )
        config = read_json_object(folder / CONFIG_NAME) if config is None else config
        tensors = read_tensors(folder)
    model_config, weight_map = convert_config(config, head, tensors)
    model = build(model_config)
    load_weights(model, tensors, weight_map, ignore=ignore)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder. Pickle files are refused."""
    files = [WEIGHTS_NAME]
    if (folder / INDEX_NAME).is_file():
        files = sorted(set(dict(read_json_object(folder / INDEX_NAME)["weight_map"]).values()))
    else:
        refuse_pickle_files(folder)
    tensors: dict[str, Tensor] = {}
    for name in files:
        with open_safetensors(folder / name) as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors
