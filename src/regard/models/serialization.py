"""Models as files: config.json and model.safetensors in a folder.  No pickle."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as packed
from torch import Tensor, nn

from regard.models.build import build
from regard.models.config import ModelConfig
from regard.models.model import Model

CONFIG_NAME, WEIGHTS_NAME, KEY = "config.json", "model.safetensors", "regard"
LARGEST_CONFIG = 1 << 20  # bytes: nobody writes more, and what is longer is no configuration


# ---------------------------------------------------------------------------------------------- write
def save(model: Model, folder: str | Path) -> None:
    """Write config.json and model.safetensors; whatever interrupts it, what can be loaded is the old model or the new one.

    Both files are written beside their place, and then renamed: a reader sees a whole file.  The weights carry the
    configuration too, so that the one rename of model.safetensors changes both at once; config.json is for the reader.
    """
    if not isinstance(model, Model) or model.config is None:
        raise ValueError(
            "this model was built by hand: only one that `build` made of a configuration can be built again"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = model.config.model_dump_json(indent=2)
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in unique_tensors(model).items()
    }
    write_atomically(folder / WEIGHTS_NAME, packed(weights, metadata={"format": "pt", KEY: text}))
    write_atomically(folder / CONFIG_NAME, text.encode())


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name; what has several names, as tied weights have, stands under the first."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if first.setdefault(id(tensor), name) == name
    }


def write_atomically(path: Path, content: bytes) -> None:
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
    """The model that was saved: same configuration, same weights, same dtypes, on the CPU, ready to evaluate (`eval`).

    Names and shapes are compared with the file before any memory is taken: a file cannot ask for more than it brings.
    """
    path = Path(folder) / WEIGHTS_NAME
    with open_safetensors(path) as file:
        config = saved_config(Path(folder), (file.metadata() or {}).get(KEY))
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        with torch.device("meta"):
            check_shapes(unique_tensors(build(config)), shapes, str(path))
        model = build(config)
        tensors = {name: file.get_tensor(name) for name in shapes}
    warn_nonfinite(tensors, str(path))
    load_tensors(model, tensors)
    return model.eval()


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """A safetensors file; one that is not whole is said to be so."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}: a saved model is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no whole safetensors file ({path.stat().st_size} bytes): {error}"
        ) from None


def saved_config(folder: Path, inside: str | None) -> ModelConfig:
    """The configuration that the weights carry; config.json only where they carry none."""
    if inside is None:
        return read_config(folder / CONFIG_NAME)
    config = parse_config(inside, f"the header of {folder / WEIGHTS_NAME}")
    beside = folder / CONFIG_NAME
    if not says(beside, config):
        warnings.warn(
            f"{beside} is not the configuration that {WEIGHTS_NAME} was saved with, which is taken: a save was interrupted, or "
            "the file was edited",
            stacklevel=3,
        )
    return config


def says(path: Path, config: ModelConfig) -> bool:
    """Whether a file holds this configuration: one that is broken does not."""
    try:
        return read_config(path) == config
    except (OSError, ValueError):
        return False


def read_config(path: str | Path) -> ModelConfig:
    """A configuration from a JSON file; what is wrong in it is said."""
    return parse_config(read_small_text(Path(path)), str(path))


def read_small_text(path: Path) -> str:
    """A text file of a sane size."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}: a saved model is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    if path.stat().st_size > LARGEST_CONFIG:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes: a configuration has at most {LARGEST_CONFIG}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None


def parse_config(text: str, where: str) -> ModelConfig:
    """JSON -> Config."""
    try:
        return ModelConfig.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(
            f"{where} is no configuration of a model: {format_validation_error(error)}"
        ) from None


def format_validation_error(error: ValidationError) -> str:
    """What pydantic found, on one line."""
    found = []
    for entry in error.errors():
        place = ".".join(map(str, entry["loc"]))
        found.append(f"{place}: {entry['msg']}" if place else entry["msg"])
    return "; ".join(found)


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors into the model, which takes over their dtypes; what shares a tensor goes on sharing it."""
    mine = unique_tensors(model)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != mine[name].is_floating_point():
            raise ValueError(
                f"{name} is of {tensor.dtype}, and the model expects such as {mine[name].dtype}"
            )
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        model.to(kinds.pop())  # for buffers too that are not saved
    with torch.no_grad():
        for name, place in unique_tensors(model).items():
            place.data = (
                tensors[name].clone()
            )  # in memory of its own: a mapped file is not aligned, and sums come out otherwise


def check_shapes(
    mine: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Say all that does not match, at most a few of each kind."""
    wrong = []
    missing, extra = [n for n in mine if n not in shapes], [n for n in shapes if n not in mine]
    if missing:
        wrong.append(f"it lacks {format_names(missing)}")
    if extra:
        wrong.append(f"the model has no {format_names(extra)}")
    other = [n for n in mine if n in shapes and tuple(mine[n].shape) != shapes[n]]
    wrong += [
        f"{n} is {shapes[n]}, and the model expects {tuple(mine[n].shape)}" for n in other[:5]
    ]
    if wrong:
        raise ValueError(f"{where} does not fit the model: {'; '.join(wrong)}")


def format_names(names: list[str], between: str = ", ") -> str:
    """At most five names, and how many more."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return between.join(names[:5]) + more


def warn_nonfinite(tensors: Mapping[str, Tensor], where: str) -> None:
    """NaN and infinity in weights are worth a warning: whatever the model says may be NaN as well."""
    broken = [
        name
        for name, t in tensors.items()
        if t.is_floating_point() and not t.is_meta and not bool(t.isfinite().all())
    ]
    if broken:
        warnings.warn(
            f"{where}: NaN or infinite numbers stand in {format_names(broken)}", stacklevel=3
        )
