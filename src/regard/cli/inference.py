"""The commands `regard predict` and `regard generate`."""

from __future__ import annotations

import csv as csv_module
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.device_options import DeviceOption, DtypeOption, check_device
from regard.cli.output import print_json, user_errors
from regard.models.beam import BeamSearchConfig, beam_search
from regard.models.generation import GenerationOutput, generate as generate_texts, stream_tokens
from regard.models.sampling import (
    DecodingStrategy,
    GreedySearch,
    Sampling,
    Temperature,
    TopKFilter,
    TopPFilter,
)
from regard.models.stopping_criteria import StoppingCriteria
from regard.tasks.corpus import TEXT_SUFFIXES
from regard.tasks.files import existing_path, file_type, open_text
from regard.tasks.rows import HUGGING_FACE, get_column, read_rows
from regard.tasks.tokenizers import Tokenizer
from regard.train import inference
from regard.train.inference import TrainedRun, generation_step, load_run


def predict(
    folder: Annotated[Path, typer.Argument(help="Folder of a run of the task classify.")],
    text: Annotated[list[str], typer.Option(help="A text to label; may be repeated.")] = [],  # noqa: B006
    data: Annotated[
        str | None, typer.Option(help="A file of rows, or a text file with one text per line.")
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Column of the text in --data.", show_default="as in training"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per batch.")] = 32,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Predict the labels of texts, with their probabilities.

    Example: regard predict runs/mine --text "a fine day" --json
    """

    with user_errors():
        if bool(text) == (data is not None):
            raise ValueError("Give either --text or --data.")
        if column is not None and data is None:
            raise ValueError("--column is a column of --data, which is missing.")
        run = load_run(folder, device=check_device(device, dtype), dtype=dtype)
        texts: Iterable[str] = text
        if data is not None:
            texts = _read_texts(data, column or run.spec.task.arguments.get("text", "text"), run)
        predictions = inference.predict(run, texts, batch_size=batch_size)
        if json:
            print_json([prediction._asdict() for prediction in predictions])
        elif csv:
            writer = csv_module.writer(sys.stdout, lineterminator="\n")
            writer.writerow(["text", "label", "probability"])
            for prediction in predictions:
                writer.writerow(prediction[:3])
        else:
            for one in predictions:
                short = one.text if len(one.text) <= 60 else f"{one.text[:59]}…"
                percent = f"{100 * one.probability:.1f} %"
                typer.echo(f"{one.label}  {percent}  {' '.join(short.split())}")


def _read_texts(data: str, column: str, run: TrainedRun) -> Iterator[str]:
    """The texts of a file: a column if it has rows, otherwise its lines."""

    encoding = run.spec.task.arguments.get("encoding", "utf-8")
    if not data.startswith(HUGGING_FACE):
        path = existing_path(data)
        if path.is_file() and file_type(path) in TEXT_SUFFIXES:
            with open_text(path, encoding) as file:
                yield from (line.rstrip("\r\n") for line in file)
            return
    for rows in read_rows(data, encoding).values():
        for where, row in rows:
            value = get_column(row, column, where)
            yield "" if value is None else str(value)


# ---------------------------------------------------------------------------------------- generate
def generate(
    folder: Annotated[Path, typer.Argument(help="Folder of a run of the task lm.")],
    prompt: Annotated[str, typer.Option(help="Start of the text.")] = "\n",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 200,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="Sampling temperature; 0 takes the most probable token.", show_default="1"
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from the k most probable tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most probable tokens with this total probability."),
    ] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Beam search with this many beams.")] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the sampling.", show_default="0")
    ] = None,
    stop: Annotated[
        list[str],
        typer.Option(help=r"Stop before this string; \n is a newline. May be repeated."),
    ] = [],  # noqa: B006
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Continue a text, token by token.

    Example: regard generate runs/mine --prompt "the dog" --max-new-tokens 100 --temperature 0.8
    """

    with user_errors():
        run = load_run(folder, device=check_device(device, dtype), dtype=dtype)
        step = generation_step(run)
        assert run.processor is not None
        tokenizer = run.processor.tokenizer
        tokens = _encode_prompt(prompt, tokenizer)
        criteria = StoppingCriteria(
            strings=[one.replace("\\n", "\n") for one in stop],
            decode=lambda new: tokenizer.decode(new),
        )
        if num_beams > 1:
            _refuse_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
            beams = BeamSearchConfig(num_beams)
            searched = beam_search(
                step,
                [tokens],
                beams,
                max_new_tokens=max_new_tokens,
                stop=criteria,
                device=run.device,
            )
            _print_output(prompt, searched[0][0], json=json)
            return
        strategy = _decoding_strategy(temperature, top_k, top_p, seed)
        if json:
            found = generate_texts(
                step,
                [tokens],
                max_new_tokens=max_new_tokens,
                strategy=strategy,
                stop=criteria,
                device=run.device,
            )
            _print_output(prompt, found[0], json=True)
            return
        typer.echo(prompt, nl=False)
        for piece in stream_tokens(
            step,
            [tokens],
            max_new_tokens=max_new_tokens,
            strategy=strategy,
            stop=criteria,
            device=run.device,
        ):
            typer.echo(piece.text, nl=False)
            sys.stdout.flush()
        typer.echo()


def _encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt; characters that the model does not know are an error."""
    tokens: list[int] = tokenizer.encode(prompt).tolist()
    if not tokens:
        raise ValueError("The prompt is empty: give at least one token.")
    if tokenizer.unit == "character":
        for character, token in zip(prompt, tokens, strict=True):
            if token in tokenizer.special_tokens():
                raise ValueError(
                    f"The prompt contains {character!r}, which is not in the training text."
                )
    return tokens


def _decoding_strategy(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> DecodingStrategy:
    """Sampling with the given filters, or greedy search at temperature 0."""

    if temperature == 0:
        _refuse_sampling(top_k=top_k, top_p=top_p, seed=seed)
        return GreedySearch()
    filters = [
        *([] if temperature is None else [Temperature(temperature)]),
        *([] if top_k is None else [TopKFilter(top_k)]),
        *([] if top_p is None else [TopPFilter(top_p)]),
    ]
    return Sampling(*filters, seed=0 if seed is None else seed)


def _refuse_sampling(**options: float | None) -> None:
    """Refuse sampling options where nothing is sampled."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} applies to sampling, which beam search and "
                "temperature 0 do not use: omit it."
            )


def _print_output(prompt: str, output: GenerationOutput, *, json: bool) -> None:
    if json:
        print_json({"prompt": prompt, **output._asdict()})
    else:
        typer.echo(f"{prompt}{output.text}")
