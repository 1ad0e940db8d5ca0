"""Saving and loading models: config.json and model.safetensors in a folder, never a pickle."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from regard.device import resolve_device
from regard.errors import describe_stored_error
from regard.models.build import build
from regard.models.config import ModelConfig
from regard.models.model import Model

CONFIG_NAME, WEIGHTS_NAME, METADATA_KEY = "config.json", "model.safetensors", "regard"
MAX_CONFIG_BYTES = 1 << 20


# --------------------------------------------------------------------------------------------- save
def save(model: Model, folder: str | Path) -> None:
    """Write config.json and model.safetensors. An interrupted call leaves either the old or
    the new model in the folder.

    Files are written to temporary names and renamed. The weights contain the configuration too, so
    that renaming model.safetensors replaces both at once; config.json is for readers.

    Raises FileExistsError if the folder contains files of these names that Regard did not write.
    """
    if not isinstance(model, Model) or model.config is None:
        raise ValueError(
            "this model has no configuration: only models from `regard.models.build` can be saved"
        )
    folder = Path(folder)
    check_replaceable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = model.config.model_dump_json(indent=2)
    weights = {name: t.detach().cpu().contiguous() for name, t in unique_tensors(model).items()}
    content = serialize(weights, metadata={"format": "pt", METADATA_KEY: text})
    write_atomically(folder / WEIGHTS_NAME, content)
    write_atomically(folder / CONFIG_NAME, text.encode())


def check_replaceable(folder: Path) -> None:
    """Raise FileExistsError if saving would overwrite a file that Regard did not write."""
    weights, config = folder / WEIGHTS_NAME, folder / CONFIG_NAME
    try:
        if weights.exists():
            with open_safetensors(weights) as file:
                ours = METADATA_KEY in (file.metadata() or {})
        else:
            ours = True
        ours = ours and (not config.exists() or bool(read_config(config)))
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise FileExistsError(
            f"{folder} contains a {weights.name if weights.exists() else config.name} that Regard "
            "did not write: save to another folder, or move the file away."
        )


def remove_partial_files(folder: Path) -> None:
    """Delete the temporary files of `save` in a process that was killed."""
    names = "|".join(map(re.escape, (WEIGHTS_NAME, CONFIG_NAME)))
    for path in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        if re.fullmatch(rf"\.({names})\.\w{{8}}", path.name) and path.is_file():
            path.unlink()


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied tensors appear once, under their first name."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if first.setdefault(id(tensor), name) == name
    }


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by writing and flushing a temporary file, then renaming it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0o022)  # can only be read by setting it
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp gives access to the owner only
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    # The rename survives a power failure once the folder is flushed; some systems cannot open one.
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# --------------------------------------------------------------------------------------------- load
def load(folder: str | Path, *, device: str | torch.device = "cpu") -> Model:
    """Load a saved model: same configuration, weights and dtypes, in evaluation mode.

    Names and shapes are compared with the file before memory is allocated: a file cannot ask for
    more than it contains.

    Args:
        folder: Folder with config.json and model.safetensors.
        device: Device by name, such as "auto" or "cuda", or a `torch.device`.
    """
    device = resolve_device(device)
    path = Path(folder) / WEIGHTS_NAME
    with open_safetensors(path) as file:
        config = load_config(Path(folder), (file.metadata() or {}).get(METADATA_KEY))
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        with torch.device("meta"):
            check_shapes(unique_tensors(build(config)), shapes, str(path))
        model = build(config)
        tensors = {name: file.get_tensor(name) for name in shapes}
    warn_nonfinite(tensors, str(path))
    load_tensors(model, tensors)
    return model.to(device).eval()


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file."""
    check_exists(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({path.stat().st_size} bytes): {error}"
        ) from None


def check_exists(path: Path) -> None:
    """Check that a file of a saved model exists."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: a saved model is a folder with {CONFIG_NAME} "
            f"and {WEIGHTS_NAME}"
        )


def load_config(folder: Path, metadata: str | None) -> ModelConfig:
    """Configuration in the metadata of the weights; config.json only if they have none."""
    path = folder / CONFIG_NAME
    if metadata is None:
        return read_config(path)
    config = parse_config(metadata, f"the metadata of {folder / WEIGHTS_NAME}")
    try:
        same = read_config(path) == config
    except (OSError, ValueError):
        same = False
    if not same:
        warnings.warn(
            f"{path} differs from the configuration in {WEIGHTS_NAME}, which is used: "
            "a save was interrupted, or the file was edited",
            stacklevel=3,
        )
    return config


def read_config(path: str | Path) -> ModelConfig:
    """Read a configuration from a JSON file."""
    return parse_config(read_small_text(Path(path)), str(path))


def read_small_text(path: Path) -> str:
    """Read a UTF-8 file of at most `MAX_CONFIG_BYTES`."""
    check_exists(path)
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} has {size} bytes: a configuration has at most {MAX_CONFIG_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def parse_config(text: str, where: str) -> ModelConfig:
    """Parse the JSON of a configuration; `where` names its source in errors."""
    try:
        return ModelConfig.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(describe_stored_error(where, error, "a model configuration")) from None


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors into a model, which takes their dtypes; tied tensors stay tied."""
    own = unique_tensors(model)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != own[name].is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}, the model needs {own[name].dtype}")
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())  # also buffers that are not saved
    with torch.no_grad():
        for name, tensor in unique_tensors(model).items():
            # Copied: memory-mapped tensors are not aligned, which changes rounding.
            tensor.data = tensors[name].clone()


def check_shapes(
    own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Check that names and shapes match; the error lists at most five of each kind of mismatch."""
    errors = []
    missing = [name for name in own if name not in shapes]
    unexpected = [name for name in shapes if name not in own]
    if missing:
        errors.append(f"it lacks {format_names(missing)}")
    if unexpected:
        errors.append(f"the model has no {format_names(unexpected)}")
    different = [n for n in own if n in shapes and tuple(own[n].shape) != shapes[n]]
    errors += [
        f"{n} has shape {shapes[n]}, the model needs {tuple(own[n].shape)}" for n in different[:5]
    ]
    if errors:
        raise ValueError(f"{where} does not fit the model: {'; '.join(errors)}")


def format_names(names: list[str], separator: str = ", ") -> str:
    """At most five names, and the number of others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return separator.join(names[:5]) + more


def warn_nonfinite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Warn about NaN and infinity in weights."""
    broken = [
        name
        for name, t in tensors.items()
        if t.is_floating_point() and not t.is_meta and not bool(t.isfinite().all())
    ]
    if broken:
        warnings.warn(f"{where}: NaN or infinity in {format_names(broken)}", stacklevel=3)
