"""Published checkpoints: their configuration and weights become ours.  The families stand in `regard.hf.families`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import did_you_mean
from regard.hf.families import bert, gpt2, reformer, t5, timm, vit
from regard.hf.families.base import Json
from regard.hf.weights import WeightMap, load_weights
from regard.models.build import build
from regard.models.config import HeadConfig, ModelConfig
from regard.models.model import Model
from regard.models.serialization import CONFIG_NAME, WEIGHTS_NAME, open_safetensors, read_small_text

INDEX = WEIGHTS_NAME + ".index.json"  # of weights in several files
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Family(NamedTuple):
    """How to read a family: their configuration and a head -> ours, and their configuration -> the map of the weights."""

    config: Callable[[Json, HeadConfig | None], ModelConfig]
    names: Callable[[Json], WeightMap]


FAMILIES: dict[str, Family] = {
    "bert": Family(bert.bert_config, lambda their: bert.BERT),
    "roberta": Family(bert.roberta_config, bert.roberta_map),
    "xlm-roberta": Family(bert.roberta_config, bert.roberta_map),
    "camembert": Family(bert.roberta_config, bert.roberta_map),
    "longformer": Family(bert.longformer_config, bert.longformer_map),
    "big_bird": Family(bert.bigbird_config, lambda their: bert.BIGBIRD),
    "fnet": Family(bert.fnet_config, lambda their: bert.FNET),
    "nystromformer": Family(bert.nystrom_config, lambda their: bert.NYSTROM),
    "gpt2": Family(gpt2.gpt2_config, lambda their: gpt2.GPT2),
    "vit": Family(vit.vit_config, lambda their: vit.VIT),
    "t5": Family(t5.t5_config, t5.t5_names),
    "switch_transformers": Family(t5.switch_config, t5.switch_map),
    "reformer": Family(reformer.reformer_config, reformer.reformer_map),
}
TIMM = {
    "mixer": (timm.mixer_config, timm.mixer_map),
    "xcit": (timm.xcit_config, timm.xcit_map),
}


def convert_config(
    their: Json, head: HeadConfig | None = None, tensors: Mapping[str, Tensor] | None = None
) -> tuple[ModelConfig, WeightMap]:
    """The contents of their config.json -> our configuration with this head, and the map of the weights.

    tensors   their weights, for timm's models: their config.json says little, so sizes are read off the tensors
    """
    if "architecture" in their:
        return from_sizes(str(their["architecture"]), their, head, tensors)
    kind = str(their.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"no map for models of type {kind!r}: {did_you_mean(kind, [*FAMILIES, *TIMM])}"
        )
    try:
        return FAMILIES[kind].config(their, head), FAMILIES[kind].names(their)
    except KeyError as missing:
        raise ValueError(f"their configuration of a {kind} model does not say {missing}") from None


def from_sizes(
    name: str, their: Json, head: HeadConfig | None, tensors: Mapping[str, Tensor] | None
) -> tuple[ModelConfig, WeightMap]:
    """A model of timm, such as "mixer_b16_224" and "xcit_small_12_p16_224"."""
    kind = name.split("_")[0]
    if kind not in TIMM:
        raise ValueError(f"no map for timm's {name!r}: {did_you_mean(kind, TIMM)}")
    if tensors is None:
        raise ValueError(f"the sizes of timm's {name!r} are read off its weights: give the tensors")
    config, names = TIMM[kind]
    size = (their.get("pretrained_cfg") or {}).get("input_size")
    image = {"image": size[-1]} if size and kind == "xcit" else {}
    try:
        return config(tensors, head, **image), names(tensors, **image)
    except KeyError as missing:
        raise ValueError(
            f"the weights of {name!r} lack {missing}, by which its sizes are told"
        ) from None


def convert_checkpoint(
    source: str | Path | Mapping[str, Tensor],
    head: HeadConfig | None = None,
    *,
    their: Json | None = None,
    leave: Iterable[str] = (),
) -> Model:
    """A published model as one of ours, ready to evaluate.

    source   a folder with their config.json and model.safetensors, whole or in several files; or the tensors by name
    head     what comes out; None: the tokens (b n d)
    their    the contents of config.json, where the source has none; given with a folder, in place of its own
    leave    patterns of their names that may stay unused, such as "pooler.*"
    """
    if isinstance(source, Mapping):
        tensors = dict(source)
        if their is None:
            raise ValueError(
                "tensors alone do not tell what model they are of: give `their`, the contents of config.json"
            )
    else:
        if not Path(source).exists():
            fetch = f"huggingface_hub.snapshot_download({str(source)!r})"
            raise FileNotFoundError(
                f"there is no folder {source}: for a model on the hub, give what {fetch} returns"
            )
        their = read_json(Path(source) / CONFIG_NAME) if their is None else their
        tensors = read_tensors(Path(source))
    config, names = convert_config(their, head, tensors)
    model = build(config)
    load_weights(model, tensors, names, leave=leave)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder; a pickle is refused, with the way out."""
    if (folder / INDEX).is_file():
        files = sorted(set(dict(read_json(folder / INDEX)["weight_map"]).values()))
    else:
        refuse_pickle_files(folder)
        files = [WEIGHTS_NAME]
    found: dict[str, Tensor] = {}
    for name in files:
        with open_safetensors(folder / name) as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def refuse_pickle_files(folder: Path) -> None:
    """A pickle may run any code when it is opened, so none is."""
    pickles = (
        [folder]
        if folder.is_file()
        else sorted(path for kind in PICKLES for path in folder.glob(kind))
    )
    if pickles and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{pickles[0]} is a pickle, which may run code when it is opened, and is not read.  If you trust it, convert it: "
            "`tensors = torch.load(path, weights_only=True)`, then `safetensors.torch.save_file("
            f"{{name: t.clone().contiguous() for name, t in tensors.items()}}, {WEIGHTS_NAME!r})`"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; what is wrong with it is said."""
    try:
        found = json.loads(read_small_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object")
    return found
