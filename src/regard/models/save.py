"""Models as files: config.json and model.safetensors in a folder.  No pickle."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as packed
from torch import Tensor, nn

from regard.models.build import build
from regard.models.config import Config
from regard.models.model import Model

CONFIG, WEIGHTS, KEY = "config.json", "model.safetensors", "regard"
LARGEST_CONFIG = 1 << 20  # bytes: nobody writes more, and what is longer is no configuration


# ---------------------------------------------------------------------------------------------- write
def save(model: Model, folder: str | Path) -> None:
    """Write config.json and model.safetensors; whatever interrupts it, what can be loaded is the old model or the new one.

    Both files are written beside their place, and then renamed: a reader sees a whole file.  The weights carry the
    configuration too, so that the one rename of model.safetensors changes both at once; config.json is for the reader.
    """
    if model.config is None:
        raise ValueError("this model was built by hand: only one that `build` made of a configuration can be built again")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = model.config.model_dump_json(indent=2)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in own_tensors(model).items()}
    replace(folder / WEIGHTS, packed(weights, metadata={"format": "pt", KEY: text}))
    replace(folder / CONFIG, text.encode())


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name; what has several names, as tied weights have, stands under the first."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if first.setdefault(id(tensor), name) == name}


def replace(path: Path, content: bytes) -> None:
    """Put content into a file at once: it is written and flushed beside its place, then renamed."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~current_umask())  # mkstemp lets nobody else read
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    flush_folder(path.parent)


def current_umask() -> int:
    """What new files may not be; it can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def flush_folder(folder: Path) -> None:
    """A rename lasts through a power cut once its folder is flushed; some systems open no folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---------------------------------------------------------------------------------------------- read
def load(folder: str | Path) -> Model:
    """The model that was saved: same configuration, same weights, same dtypes, on the CPU, ready to evaluate (`eval`)."""
    folder = Path(folder)
    tensors, inside = read_weights(folder / WEIGHTS)
    config = saved_config(folder, inside)
    model = build(config)
    fill(model, tensors, where=str(folder / WEIGHTS))
    return model.eval()


def saved_config(folder: Path, inside: str | None) -> Config:
    """The configuration that the weights carry; config.json only where they carry none."""
    if inside is None:
        return read_config(folder / CONFIG)
    config = parse(inside, f"the header of {folder / WEIGHTS}")
    beside = folder / CONFIG
    if not beside.exists() or parse(small_text(beside), str(beside)) != config:
        warnings.warn(
            f"{beside} is not the configuration that {WEIGHTS} was saved with, which is taken: a save was interrupted, or "
            "the file was edited",
            stacklevel=3,
        )
    return config


def read_config(path: str | Path) -> Config:
    """A configuration from a JSON file; what is wrong in it is said."""
    return parse(small_text(Path(path)), str(path))


def small_text(path: Path) -> str:
    """A text file of a sane size."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: a saved model is a folder with {CONFIG} and {WEIGHTS}")
    if path.stat().st_size > LARGEST_CONFIG:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: a configuration has at most {LARGEST_CONFIG}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None


def parse(text: str, where: str) -> Config:
    """JSON -> Config."""
    try:
        return Config.model_validate_json(json.dumps(json.loads(text)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    except ValidationError as error:
        raise ValueError(f"{where} is no configuration of a model: {said(error)}") from None


def said(error: ValidationError) -> str:
    """What pydantic found, on one line."""
    found = []
    for entry in error.errors():
        place = ".".join(map(str, entry["loc"]))
        found.append(f"{place}: {entry['msg']}" if place else entry["msg"])
    return "; ".join(found)


def read_weights(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a safetensors file, and the configuration in its header, where there is one."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: a saved model is a folder with {CONFIG} and {WEIGHTS}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get(KEY)  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({path.stat().st_size} bytes): {error}") from None


def fill(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Put the tensors into the model, which takes over their dtypes; names and shapes must be the same on both sides."""
    mine = own_tensors(model)
    check_same(mine, tensors, where)
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.data = tensors[name].to(tensor.device)


def check_same(mine: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Say all that does not match, at most a few of each kind."""
    wrong = []
    missing, extra = [n for n in mine if n not in tensors], [n for n in tensors if n not in mine]
    if missing:
        wrong.append(f"without {few(missing)}, which the model has")
    if extra:
        wrong.append(f"with {few(extra)}, which the model has not")
    shapes = [n for n in mine if n in tensors and mine[n].shape != tensors[n].shape]
    wrong += [f"{n} is {tuple(tensors[n].shape)}, and the model expects {tuple(mine[n].shape)}" for n in shapes[:5]]
    kinds = [n for n in mine if n in tensors and mine[n].is_floating_point() != tensors[n].is_floating_point()]
    wrong += [f"{n} is of {tensors[n].dtype}, and the model expects {mine[n].dtype}" for n in kinds[:5]]
    if wrong:
        raise ValueError(f"{where} does not fit the model: {'; '.join(wrong)}")


def few(names: list[str]) -> str:
    """At most five names, and how many more."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
