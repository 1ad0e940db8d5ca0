"""What is looked at: a model and one input, from a run, a Hugging Face folder or Python objects."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import SIMILARITY
from regard.hf.files import (
    MODEL_PACKAGES,
    find_model,
    import_transformers,
    load_transformers_model,
    read_json_object,
)
from regard.hf.model_inputs import ModelInputs, max_length
from regard.mixer import Mixer
from regard.models.embeddings import PatchInput, VectorInput
from regard.models.model import DualEncoder, EncoderDecoder, Model
from regard.registry import list_recipes
from regard.tasks.base import Example, Task, collate
from regard.tasks.image_folder import ImageProcessor
from regard.tasks.processors import Processor
from regard.tasks.tokenizers import replace_surrogates
from regard.tasks.translation import TextToTextProcessor
from regard.train.inference import TrainedRun, load_run
from regard.train.run import SPEC_FILE, build_task

MAX_WRITTEN = 64  # tokens that an encoder-decoder writes for a text without a target
MODEL_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")


@dataclass
class Subject:
    """A model and one input.

    Attributes:
        model: The model, or any module.
        inputs: Arguments of the call, with a batch of one.
        name: Name of the model.
        text: The text that was given, or None.
        tokens: Texts of the tokens by the name of the input: "input_ids", "x", "target" and others.
        decode: Id -> text of a token, for predictions of a language model.
        special: Ids of special tokens, such as [CLS].
        classes: Names of the classes, for a classifier.
        run: The run of the model, or None.
        encode: Text, or (source, target) -> the subject with this input; None for other inputs.
        notes: What a person should know, such as a text that was cut.
    """

    model: nn.Module
    inputs: ModelInputs
    name: str
    text: str | None = None
    tokens: dict[str, list[str]] = field(default_factory=dict)
    decode: Callable[[int], str] | None = None
    special: frozenset[int] = frozenset()
    classes: Sequence[str] = ()
    run: TrainedRun | None = None
    encode: Callable[[str | tuple[str, str]], Subject] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name; positional ones are "x"."""
        return {**dict(zip(("x",), self.inputs.args, strict=False)), **self.inputs.kwargs}

    @property
    def is_seq2seq(self) -> bool:
        """Whether the model reads a source and writes a target."""
        return isinstance(self.model, EncoderDecoder) or bool(
            getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        )

    @property
    def ids(self) -> dict[str, Tensor]:
        """Token ids (1, n), or (1, 2, n) of pairs, by the name of the input."""
        wanted = ("x", "source", "target", "input_ids", "decoder_input_ids")
        return {
            name: value
            for name, value in self.arguments.items()
            if name in wanted and isinstance(value, Tensor) and not value.is_floating_point()
        }

    @property
    def image(self) -> Tensor | None:
        """The pixels (c, height, width) that the model reads, or None."""
        for name in ("x", "source", "pixel_values"):
            value = self.arguments.get(name)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 4:
                return value[0]
        return None

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of the patches of an image."""
        if self.image is None:
            return None
        config: Any = getattr(self.model, "config", None)
        source = getattr(config, "input", None)
        if isinstance(source, PatchInput):
            return source.patches
        size = getattr(config, "patch_size", None)
        if not isinstance(size, int):
            return None
        return self.image.shape[1] // size, self.image.shape[2] // size

    def call(self) -> Any:
        """Call the model."""
        return self.inputs.call(self.model)

    def with_arguments(self, **changes: Tensor) -> Subject:
        """The same model with other values of some inputs, by name."""
        kwargs = {name: changes.get(name, value) for name, value in self.inputs.kwargs.items()}
        args = tuple(
            changes.get(name, value) for name, value in zip(("x",), self.inputs.args, strict=False)
        )
        return replace(self, inputs=ModelInputs(args, kwargs, self.inputs.mask))

    def repeat(self, count: int) -> Subject:
        """The same input `count` times, as a batch."""
        return self.with_arguments(
            **{
                name: value.expand(count, *value.shape[1:])
                for name, value in self.arguments.items()
                if isinstance(value, Tensor) and value.shape[0] == 1
            }
        )

    def task(self) -> Task:
        """The task of the run, with its data."""
        if self.run is None:
            raise ValueError("Only runs of regard train have a task with a metric.")
        return task_of(self.run)


def find_subject(
    model: Any,
    inputs: Any,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    max_tokens: int | None = None,
) -> Subject:
    """The subject of `regard.look(model, inputs)`; see there for what both may be."""
    if isinstance(model, str | Path):
        model, tokenizer, name = *load_model(str(model)), name or str(model)
    if isinstance(model, TrainedRun):
        subject = _from_run(model, inputs, max_tokens)
    elif not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a module, a run or the name of a folder, not {type(model).__name__}."
        )
    elif hasattr(model, "main_input_name"):
        subject = _from_transformers(model, inputs, tokenizer, max_tokens)
    elif max_tokens is not None:
        raise ValueError("max_tokens cuts a text, and this model was given a tensor: cut that.")
    else:
        subject = _from_module(model, inputs)
    subject.name = name or subject.name
    for each, ids in subject.ids.items():
        subject.tokens.setdefault(each, [str(token) for token in ids.flatten().tolist()])
    check_inputs(subject)
    return subject


def load_model(name: str) -> tuple[Any, Any]:
    """A run of `regard train`, or a model of transformers and its tokenizer."""
    if (Path(name) / SPEC_FILE).is_file():
        return load_run(Path(name), device="cpu"), None
    check_name(name)
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return load_transformers_model(name)


def check_name(name: str) -> None:
    """Raise a ValueError for the name of a model that is a mistake, before the Hub is asked."""
    path = Path(name)
    if find_model(name) is not None:
        return
    if name in list_recipes():
        raise ValueError(
            f"{name!r} is a recipe without weights: give regard.create({name!r}, ...)."
        )
    known, where = [*list_recipes(), *MODEL_PACKAGES], ""
    if path.parent != Path() and path.parent.is_dir():
        known = [str(each) for each in path.parent.iterdir()]
        where = f" in {path.parent}"
    close = difflib.get_close_matches(name, known, 1, SIMILARITY)
    if close or where:
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"There is no run or model {path.name!r}{where}{hint}")


def check_inputs(subject: Subject) -> None:
    """Raise a ValueError for inputs that have nothing to look at."""
    mask = subject.inputs.mask
    if mask is None:
        given = subject.arguments.get("mask", subject.arguments.get("attention_mask"))
        mask = given if isinstance(given, Tensor) else None
    if mask is not None and mask.dim() == 2 and not bool(mask.bool().any(1).all()):
        raise ValueError("All tokens are padding: there is nothing to look at.")
    limit = max_length(subject.model)
    for name, value in subject.arguments.items():
        if not isinstance(value, Tensor):
            continue
        if not value.numel():
            raise ValueError(f"There are no tokens: {name} has the shape {tuple(value.shape)}.")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"The input {name} contains NaN or infinity.")
        if not value.dim():
            raise ValueError(f"The input {name} is a single number: it needs a batch of one.")
        if value.shape[0] != 1:
            raise ValueError(
                f"One example is looked at, but {name} has {value.shape[0]}: pass {name}[:1]."
            )
        if name in subject.ids and limit is not None and value.shape[-1] > limit:
            raise ValueError(
                f"The input has {value.shape[-1]:,} tokens, but the model reads at most {limit:,}."
            )


# ---------------------------------------------------------------------------------------- runs
def task_of(run: TrainedRun) -> Task:
    """The task of a run; its data must still be where they were in training."""
    try:
        return build_task(run.spec)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ValueError(
            f"The data of run {run.folder} cannot be read ({error}). "
            "Give an input of your own: --text or --image."
        ) from error


def _from_run(run: TrainedRun, raw: Any, max_tokens: int | None) -> Subject:
    """A raw input as `regard predict` takes it, an example, or the number of a test example."""
    processor, target = run.processor, None
    notes: list[str] = []
    if isinstance(raw, tuple) and isinstance(processor, TextToTextProcessor):
        raw, target = raw
    text = raw if isinstance(raw, str) else None
    if isinstance(raw, bool):
        raise TypeError("An input of a run is a text, a path, a row, or the number of an example.")
    if isinstance(raw, int):
        task = task_of(run)
        if not 0 <= raw < task.size("test"):
            raise ValueError(
                f"The test split of run {run.folder} has {task.size('test'):,} examples: "
                f"there is no example {raw:,}."
            )
        example = task.example("test", raw)
    elif isinstance(raw, Example):
        example = raw
    elif processor is None:
        raise ValueError(
            f"Task {run.spec.task.name!r} takes no raw inputs. Give the number of a test example: "
            "--example 0."
        )
    else:
        if isinstance(raw, str) and not processor.suffixes and not raw.strip():
            raise ValueError("The text is empty: there are no tokens to look at.")
        if isinstance(raw, Path) and not processor.suffixes:
            raise ValueError(f"Task {run.spec.task.name!r} does not read files: {raw} is one.")
        if not (processor.columns or processor.suffixes or isinstance(raw, str)):
            raise TypeError(
                f"Task {run.spec.task.name!r} reads a text, or the number of a test example, not "
                f"{type(raw).__name__}."
            )
        raw = replace_surrogates(raw) if isinstance(raw, str) else raw
        try:
            if processor.truncates(raw):
                notes.append("The text is longer than the model reads, and was cut.")
            example = Example(processor.encode(raw), {})
        except OSError as error:
            raise ValueError(f"Cannot read {raw}: {error.strerror or error}") from error
    if max_tokens is not None:
        example = _cut(example, max_tokens, notes)
    if isinstance(processor, TextToTextProcessor) and text is not None:
        example = Example(_write_target(run, processor, example, target), {})
    batch = collate([example]).to(run.device)
    kwargs = {name: value for name, value in batch.inputs.items() if value is not None}
    tokens = {
        name: _token_texts(value.flatten().tolist(), _decoder(processor, name))
        for name, value in kwargs.items()
        if not value.is_floating_point() and value.dtype != torch.bool
    }
    subject = Subject(
        run.model,
        ModelInputs((), kwargs, kwargs.get("mask")),
        run.folder.name,
        text,
        tokens,
        _decoder(processor, "target"),
        classes=tuple(getattr(processor, "labels", ())),
        run=run,
        notes=notes,
    )
    if processor is not None and not processor.columns and not processor.suffixes:
        subject.encode = lambda text: _from_run(run, text, max_tokens)
    return subject


def _cut(example: Example, max_tokens: int, notes: list[str]) -> Example:
    """The first tokens of the text of an example."""
    inputs = dict(example.inputs)
    name = "source" if "source" in inputs else "x"
    if inputs[name].is_floating_point() or inputs[name].dim() != 1:
        raise ValueError("max_tokens cuts a text, and this run does not read one.")
    count = len(inputs[name])
    if count > max_tokens:
        notes.append(f"The text has {count:,} tokens; the first {max_tokens:,} are shown.")
        inputs[name] = inputs[name][:max_tokens]
    return Example(inputs, example.targets)


def _write_target(
    run: TrainedRun, processor: TextToTextProcessor, example: Example, target: str | None
) -> dict[str, Tensor]:
    """The source, and a target: the given text, or the one that the model writes."""
    if target is None:
        batch = collate([example]).to(run.device)
        target = str(processor.predict(run.model, batch.inputs)[0]["text"])
    tokens = processor.target_tokenizer.encode(target)[: processor.length - 1]
    return {**example.inputs, "target": torch.tensor([processor.start, *tokens.tolist()])}


def _decoder(processor: Processor | None, name: str) -> Callable[[int], str] | None:
    """Id -> text of a token of an input."""
    if isinstance(processor, TextToTextProcessor):
        if name != "target":
            return lambda token: processor.tokenizer.decode([token])
        special = {processor.start: "[START]", processor.end: "[END]"}
        return lambda token: special.get(token) or processor.target_tokenizer.decode([token])
    tokenizer = getattr(processor, "tokenizer", None)
    return None if tokenizer is None else lambda token: tokenizer.decode([token])


def _token_texts(ids: Sequence[int], decode: Callable[[int], str] | None) -> list[str]:
    if decode is None:
        return [str(token) for token in ids]
    texts = []
    for token in ids:
        try:
            texts.append(decode(token) or f"[{token}]")
        except (ValueError, IndexError, KeyError, OverflowError):  # a special token
            texts.append(f"[{token}]")
    return texts


# -------------------------------------------------------------------------------- transformers
def _from_transformers(
    model: nn.Module, inputs: Any, tokenizer: Any, max_tokens: int | None
) -> Subject:
    """A text, (source, target) texts, the path of an image, ids (n) or (1, n), pixels, or a dict of
    model inputs."""
    name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
    notes: list[str] = []
    target = None
    if isinstance(inputs, tuple) and len(inputs) == 2 and all(isinstance(t, str) for t in inputs):
        inputs, target = inputs
    text = inputs if isinstance(inputs, str) else None
    if max_tokens is not None and text is None:
        raise ValueError("max_tokens cuts a text, and this model was given none: cut the input.")
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError("A text needs a tokenizer: give tokenizer=..., or token ids.")
        if not inputs.strip():
            raise ValueError("The text is empty: there are no tokens to look at.")
        kwargs = _tokenize(model, tokenizer, inputs, max_tokens, notes)
    elif isinstance(inputs, Path):
        kwargs = {str(model.main_input_name): read_pixels(model, inputs)}
    elif isinstance(inputs, Mapping):
        kwargs = {name: value for name, value in inputs.items() if value is not None}
    elif isinstance(inputs, Tensor):
        kwargs = {str(model.main_input_name): inputs if inputs.dim() > 1 else inputs[None]}
    else:
        raise TypeError(
            "Inputs are a text, token ids, pixels or a dict of model inputs, "
            f"not {type(inputs).__name__}."
        )
    device = next(model.parameters()).device
    kwargs = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in kwargs.items()}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and bool((mask == 1).all()):
        del kwargs["attention_mask"]  # nothing is padding, and a call without it is the same
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" not in kwargs:
        kwargs["decoder_input_ids"] = _decoder_ids(model, tokenizer, kwargs, target)

    def decode(token: int) -> str:
        text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return text if text and "\ufffd" not in text else tokenizer.convert_ids_to_tokens(token)

    known = None if tokenizer is None else decode
    tokens = {
        name: _token_texts(value.flatten().tolist(), known)
        for name, value in kwargs.items()
        if name in ("input_ids", "decoder_input_ids") and isinstance(value, Tensor)
    }
    labels = getattr(model.config, "id2label", None) or {}
    subject = Subject(
        model,
        ModelInputs((), {"use_cache": False, **kwargs} if _has_cache(model) else kwargs, None),
        name,
        text,
        tokens,
        known,
        frozenset(getattr(tokenizer, "all_special_ids", ())),
        [str(labels[i]) for i in sorted(labels)],
        notes=notes,
    )
    if tokenizer is not None and text is not None:
        subject.encode = lambda text: _from_transformers(model, text, tokenizer, max_tokens)
    return subject


def read_pixels(model: Any, path: Path) -> Tensor:
    """An image in the size that a model reads (1, c, height, width), its values scaled by the mean
    and deviation of preprocessor_config.json, or 0.5."""
    size = getattr(model.config, "image_size", None)
    if not isinstance(size, int):
        raise ValueError(f"{type(model).__name__} does not read images of one size.")
    settings: dict[str, Any] = {}
    file = Path(str(getattr(model.config, "name_or_path", ""))) / "preprocessor_config.json"
    if file.is_file():
        settings = read_json_object(file)
    channels = int(getattr(model.config, "num_channels", 3))
    try:
        pixels = ImageProcessor(size, channels, ()).encode(path)["x"]
    except OSError as error:
        raise ValueError(f"Cannot read {path}: {error.strerror or error}") from error
    mean, deviation = (
        torch.tensor(settings.get(name, [0.5] * channels))[:, None, None]
        for name in ("image_mean", "image_std")
    )
    return ((pixels + 1) / 2 - mean)[None] / deviation


def _has_cache(model: nn.Module) -> bool:
    config: Any = model.config
    return getattr(config, "use_cache", None) is not None


def _tokenize(
    model: nn.Module, tokenizer: Any, text: str, max_tokens: int | None, notes: list[str]
) -> dict[str, Tensor]:
    limit = max_length(model)
    limit = min(each for each in (limit, max_tokens, 1 << 20) if each is not None)
    text = replace_surrogates(text)
    count = len(tokenizer(text)["input_ids"])
    if not count:
        raise ValueError("The tokenizer makes no tokens of this text.")
    if count > limit:
        notes.append(f"The text has {count:,} tokens; the first {limit:,} are shown.")
    encoded = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
    return {
        name: value
        for name, value in encoded.items()
        if name in ("input_ids", "attention_mask", "token_type_ids")
    }


def _decoder_ids(
    model: Any, tokenizer: Any, kwargs: Mapping[str, Any], target: str | None
) -> Tensor:
    """Ids of the target behind the start token: of the given target, or of what is written."""
    start = model.config.decoder_start_token_id
    start = start if start is not None else model.config.pad_token_id or 0
    device = next(model.parameters()).device
    if target is not None:
        ids = tokenizer(text_target=target)["input_ids"]
        return torch.tensor([[start, *ids]], device=device)
    source = kwargs[model.main_input_name]
    if not hasattr(model, "lm_head"):
        return torch.full((1, 1), start, device=device)
    with torch.no_grad():
        written = model.generate(source, max_new_tokens=MAX_WRITTEN, do_sample=False, num_beams=1)
    return written[:, :-1] if written.shape[1] > 1 else written


# ------------------------------------------------------------------------------- other modules
def _from_module(model: nn.Module, inputs: Any) -> Subject:
    """A model of Regard, a mixer, or any module, with a tensor, an example or a dict."""
    if isinstance(inputs, Example):
        inputs = {name: each[None] for name, each in inputs.inputs.items()}
    if isinstance(inputs, Mapping):
        given = {name: each for name, each in inputs.items() if each is not None}
        if isinstance(given.get("attn_mask"), Tensor) and given["attn_mask"].dim() == 2:
            given["attn_mask"] = given["attn_mask"][None]  # pairs (n, m), for a batch of one
        return Subject(model, ModelInputs((), given, None), type(model).__name__)
    if not isinstance(inputs, Tensor):
        if isinstance(inputs, str):
            raise TypeError("A text needs the run or the tokenizer of the model: give a tensor.")
        raise TypeError(f"Inputs are a tensor or a dict, not {type(inputs).__name__}.")
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "input", None)
    is_ids = isinstance(model, Model) and not inputs.is_floating_point()
    single = 1 if is_ids and not isinstance(model, DualEncoder) else 2
    if isinstance(kind, PatchInput):
        single = 3
    elif isinstance(kind, VectorInput) or isinstance(model, Mixer):
        single = 2
    x = inputs[None] if inputs.dim() == single else inputs
    name = model.name if isinstance(model, Mixer) else type(model).__name__
    return Subject(model, ModelInputs((x,), {}, None), name)
