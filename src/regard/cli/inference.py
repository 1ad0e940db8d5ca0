"""regard predict, regard generate: a trained model put to use."""

from __future__ import annotations

import csv as comma
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.output import print_json, user_errors
from regard.models.beam import BeamSearchConfig, beam_search
from regard.models.generation import GenerationOutput, generate as go_on, stream_tokens
from regard.models.sampling import (
    DecodingStrategy,
    GreedySearch,
    LogitsProcessor,
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
from regard.train.inference import (
    Prediction,
    TrainedRun,
    generation_step,
    load_run,
    predict as labelled,
)


def predict(
    folder: Annotated[Path, typer.Argument(help="The folder of a run of the task classify.")],
    text: Annotated[list[str], typer.Option(help="A text; may be given several times.")] = [],  # noqa: B006
    data: Annotated[
        str | None, typer.Option(help="A file of rows, or of texts, a line each.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column of the text [as in training].")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 32,
    json: Annotated[bool, typer.Option("--json", help="One JSON array to stdout.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV to stdout, row by row.")] = False,
) -> None:
    """Label texts with a trained model, and say how sure it is.

    Example: regard predict runs/mine --text "a fine day" --json
    """
    with user_errors():
        if bool(text) == (data is not None):
            raise ValueError("give either --text or --data")
        if column is not None and data is None:
            raise ValueError("--column names a column of --data")
        run = load_run(folder)
        given = (
            text
            if data is None
            else texts_of(data, column or run.spec.task.arguments.get("text", "text"), run)
        )
        found = labelled(run, given, batch=batch)
        if json:
            print_json([as_row(one) | {"probabilities": one.all} for one in found])
        elif csv:
            as_csv(found)
        else:
            for one in found:
                typer.echo(in_words(one))


def texts_of(data: str, name: str, run: TrainedRun) -> Iterator[str]:
    """The texts of a file: of a column where it has rows, else its lines."""
    encoding = run.spec.task.arguments.get("encoding", "utf-8")
    if (
        not data.startswith(HUGGING_FACE)
        and file_type(path := existing_path(data)) in TEXT_SUFFIXES
        and not path.is_dir()
    ):
        with open_text(path, encoding) as file:
            yield from (line.rstrip("\r\n") for line in file)
        return
    for rows in read_rows(data, encoding).values():
        for place, row in rows:
            value = get_column(row, name, place)
            yield "" if value is None else str(value)


def as_row(one: Prediction) -> dict[str, object]:
    """What is written of a prediction."""
    return {"text": one.text, "label": one.label, "probability": one.probability}


def as_csv(found: Iterable[Prediction]) -> None:
    """A line for each text, as soon as it is known."""
    writer = comma.DictWriter(sys.stdout, ["text", "label", "probability"], lineterminator="\n")
    writer.writeheader()
    for one in found:
        writer.writerow(as_row(one))


def in_words(one: Prediction) -> str:
    """ "right  98.1 %  the dog sees the cat."."""
    short = one.text if len(one.text) <= 60 else f"{one.text[:59]}…"
    return f"{one.label}  {100 * one.probability:.1f} %  {' '.join(short.split())}"


# ---------------------------------------------------------------------------------------------- generate
def generate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run of the task lm.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "\n",
    length: Annotated[int, typer.Option(min=1, help="New tokens, at most.")] = 200,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Below 1 surer, above 1 bolder; 0: the best [1].")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Only so many of the most probable tokens.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the most probable tokens that make up this share.")
    ] = None,
    beams: Annotated[
        int, typer.Option(min=1, help="Search for the most probable text with so many at a time.")
    ] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draws [0].")] = None,
    stop: Annotated[
        list[str],
        typer.Option(help=r"End before this; \n is the end of a line. May be given again."),
    ] = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """Go on with a text, token by token as it comes.

    Example: regard generate runs/mine --prompt "the dog" --length 100 --temperature 0.8 --seed 1
    """
    with user_errors():
        run = load_run(folder)
        step, codec = generation_step(run), reading_codec(run)
        start = checked_prompt(prompt, codec)
        ends = StoppingCriteria(
            strings=[one.replace("\\n", "\n") for one in stop], decode=lambda new: codec.decode(new)
        )
        if beams > 1:
            refuse_draws(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
            tell(
                prompt,
                beam_search(
                    step, [start], BeamSearchConfig(beams), max_new_tokens=length, stop=ends
                )[0][0],
                json=json,
            )
            return
        strategy = choice(temperature, top_k, top_p, seed)
        if json:
            tell(
                prompt,
                go_on(step, [start], max_new_tokens=length, strategy=strategy, stop=ends)[0],
                json=True,
            )
            return
        typer.echo(prompt, nl=False)
        for piece in stream_tokens(
            step, [start], max_new_tokens=length, strategy=strategy, stop=ends
        ):
            typer.echo(piece.text, nl=False)
            sys.stdout.flush()
        typer.echo()


def reading_codec(run: TrainedRun) -> Tokenizer:
    """Of a run that speaks."""
    assert run.processor is not None
    return run.processor.codec


def checked_prompt(prompt: str, codec: Tokenizer) -> list[int]:
    """The tokens of a prompt; what the model has never seen is named."""
    tokens: list[int] = codec.encode(prompt).tolist()
    if not tokens:
        raise ValueError("the prompt is empty: the model goes on from at least one token")
    strange = (
        [prompt[place] for place, token in enumerate(tokens) if token in codec.silent()]
        if codec.unit == "character"
        else []
    )
    if strange:
        raise ValueError(f"the prompt has {strange[0]!r}, which the training text lacks")
    return tokens


def choice(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> DecodingStrategy:
    """How a token is chosen; a temperature of 0 takes the best, and nothing is drawn."""
    if temperature == 0:
        refuse_draws(top_k=top_k, top_p=top_p, seed=seed)
        return GreedySearch()
    shapes: list[LogitsProcessor] = [] if temperature is None else [Temperature(temperature)]
    shapes += [] if top_k is None else [TopKFilter(top_k)]
    shapes += [] if top_p is None else [TopPFilter(top_p)]
    return Sampling(*shapes, seed=0 if seed is None else seed)


def refuse_draws(**given: float | None) -> None:
    """Where nothing is drawn, nothing about draws can be said."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} shapes draws, and here none are made: leave it out"
            )


def tell(prompt: str, result: GenerationOutput, *, json: bool) -> None:
    """A whole text at once."""
    if json:
        print_json(
            {
                "prompt": prompt,
                "text": result.text,
                "tokens": result.tokens,
                "logp": result.logp,
                "why": result.why,
            }
        )
    else:
        typer.echo(f"{prompt}{result.text}")
