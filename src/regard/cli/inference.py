"""The commands `regard predict` and `regard generate`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from regard.cli.alignment_figure import check_alignment, draw_alignments
from regard.cli.device_options import DeviceOption, DtypeOption, check_device
from regard.cli.output import echo, echo_data, fail, print_json, user_errors
from regard.cli.plugins import PluginOption
from regard.cli.prediction_output import (
    CsvOutput,
    JsonOutput,
    LineOutput,
    PredictionOutput,
    TextOutput,
)
from regard.cli.raw_inputs import RawInput, read_inputs
from regard.device import autocast, resolve_dtype
from regard.models import Decoder, DecodingStep, EncoderDecoder, LMHeadConfig
from regard.models.beam import BeamSearchConfig, beam_search
from regard.models.generation import GenerationOutput, generate as generate_texts, stream_tokens
from regard.models.sampling import (
    DecodingStrategy,
    GreedySearch,
    LogitsProcessor,
    MinPFilter,
    NoRepeatNGram,
    RepetitionPenalty,
    Sampling,
    Temperature,
    TopKFilter,
    TopPFilter,
    TypicalFilter,
)
from regard.models.serialization import CONFIG_NAME
from regard.models.stopping_criteria import StoppingCriteria
from regard.tasks import find_task
from regard.tasks.processors import Prediction, Processor, TextProcessor
from regard.tasks.tokenizers import Tokenizer
from regard.train.inference import (
    InputError,
    TrainedRun,
    context_start,
    generation_step,
    load_run,
    predict_each,
)
from regard.train.run import SPEC_FILE

MAX_ERRORS = 20  # printed to stderr; --json and --csv have all


def predict(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    files: Annotated[
        list[str], typer.Argument(help="Files or folders of inputs; - for standard input.")
    ] = [],  # noqa: B006
    text: Annotated[list[str], typer.Option(help="A text; may be repeated.")] = [],  # noqa: B006
    data: Annotated[
        str | None,
        typer.Option(
            help="Rows (CSV, JSON, Parquet, hf:name), a text file with one text per line, or a "
            "folder of images or sounds."
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Column of the text, in rows.", show_default="as in training"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs per batch.")] = 32,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    plugin: PluginOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    alignment: Annotated[
        Path | None,
        typer.Option(
            help="Also draw which source word moved which word of a translation, to a .png, .svg, "
            ".pdf or .html file."
        ),
    ] = None,
) -> None:
    """Predict with the model of a run: the label of a text, the numbers of a row, and so on.

    Example: regard predict runs/mine --text "a fine day" --json
    """

    with user_errors():
        sources = [*files, *([] if data is None else [data])]
        if not text and not sources:
            raise ValueError("Give inputs: --text, --data, files, or - for standard input.")
        if json and csv:
            raise ValueError("--json and --csv both print to stdout: give one of them.")
        if column is not None and not sources:
            raise ValueError("--column is a column of --data, which is missing.")
        run = load_run(
            folder,
            device=check_device(device, dtype),
            dtype=dtype,
            plugins=plugin,
            on_warning=lambda warning: echo(f"warning: {warning}", err=True),
        )
        processor: Any = _prediction_processor(run)
        if alignment is not None:
            check_alignment(run, alignment)
        arguments = run.spec.task.arguments
        writes_text = isinstance(run.model, EncoderDecoder)
        text_column = "source" if writes_text else "text"
        inputs = read_inputs(
            processor,
            texts=text,
            sources=sources,
            column=column,
            default_column=arguments.get(text_column) or _default_column(run, text_column),
            encoding=arguments.get("encoding", "utf-8"),
        )
        in_lines = TextOutput if writes_text else LineOutput
        output: PredictionOutput = (JsonOutput if json else CsvOutput if csv else in_lines)(
            processor
        )
        count = failed = empty = truncated = unknown = 0
        aligned: list[tuple[str, str]] = []
        for item, prediction in predict_inputs(run, inputs, batch_size):
            output.write(item, prediction)
            count += 1
            empty += isinstance(item.raw, str) and not item.raw.strip()
            if item.error:
                failed += 1
                if failed <= MAX_ERRORS:
                    echo(f"error: {' '.join(item.error.split())}", err=True)
            else:
                truncated += processor.truncates(item.raw)
                unknown += writes_text and processor.has_unknown(item.raw)
                if alignment is not None:
                    aligned.append((item.raw, prediction["text"]))
        output.close()
        if alignment is not None:
            draw_alignments(run, aligned, alignment)
    if truncated:
        length = processor.source_length if writes_text else processor.length
        echo(
            f"note: {truncated:,} of {count:,} texts have more than {length:,} "
            "tokens; the model did not see the rest.",
            err=True,
        )
    if unknown:
        echo(
            f"note: {unknown:,} of {count:,} texts have characters that do not occur in the "
            "training split.",
            err=True,
        )
    if empty and not writes_text:
        echo(
            f"note: {empty:,} of {count:,} texts are empty; the model saw a single token that "
            "stands for no text.",
            err=True,
        )
    if not count:
        echo("note: there are no inputs.", err=True)
    if failed:
        if failed < count or failed > MAX_ERRORS:
            fail(f"{failed:,} of {count:,} inputs could not be predicted")
        raise typer.Exit(1)


def predict_inputs(
    run: TrainedRun, inputs: Iterator[RawInput], batch_size: int
) -> Iterator[tuple[RawInput, Prediction]]:
    """Yield each input and its prediction; an input with an error, which names its place, and {}
    if there is none."""
    while chunk := list(itertools.islice(inputs, batch_size)):
        raw = [item.raw for item in chunk if not item.error]
        predictions = predict_each(run, raw, batch_size=batch_size)
        for item in chunk:
            prediction: Prediction | InputError = {} if item.error else next(predictions)
            if isinstance(prediction, InputError):
                reason = prediction.reason
                named = reason if reason.startswith(item.where) else f"{item.where}: {reason}"
                item, prediction = replace(item, error=named), {}
            yield item, prediction


def _prediction_processor(run: TrainedRun) -> Processor:
    """The processor of a run that can predict."""
    assert run.model.config is not None
    if isinstance(run.model, Decoder) and isinstance(run.model.config.head, LMHeadConfig):
        raise ValueError(
            f"Run {run.folder} is a language model, which continues texts: "
            f"regard generate {run.folder} --prompt ..."
        )
    if run.processor is None:
        raise ValueError(
            f"Task {run.spec.task.name!r} takes no raw inputs: its examples are generated, or "
            f"it has no processor. Evaluate it with: regard eval {run.folder}"
        )
    return run.processor


def _default_column(run: TrainedRun, argument: str) -> str:
    """The column that the task of a run reads by default: the default of an argument."""
    parameter = inspect.signature(find_task(run.spec.task.name)).parameters.get(argument)
    default = None if parameter is None else parameter.default
    return default if isinstance(default, str) else argument


# ---------------------------------------------------------------------------------------- generate
class TextGenerator(NamedTuple):
    """A language model with its prompt.

    Attributes:
        step: The model.
        tokens: The prompt.
        decode: New tokens -> text.
        stop_tokens: Tokens that end the text.
        device: Device of the model.
    """

    step: DecodingStep
    tokens: list[int]
    decode: Callable[[list[int]], str]
    stop_tokens: tuple[int, ...]
    device: torch.device


def generate(
    folder: Annotated[
        str,
        typer.Argument(
            help="Run of the task lm, or a causal language model of transformers: folder, GGUF "
            "file or Python package."
        ),
    ],
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
    min_p: Annotated[
        float | None,
        typer.Option(help="Sample from tokens at least this share as probable as the best."),
    ] = None,
    typical_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most typical tokens with this total probability."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Make earlier tokens less probable by this factor above 1."),
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, typer.Option(min=1, help="Never repeat this many tokens in a row.")
    ] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Beam search with this many beams.")] = 1,
    length_penalty: Annotated[
        float | None,
        typer.Option(help="Beam search: above 0 favours long texts.", show_default="1"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the sampling.", show_default="0")
    ] = None,
    stop: Annotated[
        list[str],
        typer.Option(help=r"Stop before this string; \n is a newline. May be repeated."),
    ] = [],  # noqa: B006
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    plugin: PluginOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Continue a text, token by token.

    Example: regard generate runs/mine --prompt "the dog" --max-new-tokens 100 --temperature 0.8
    """

    with user_errors():
        sampling = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "typical_p": typical_p,
            "seed": seed,
        }
        repetition = {"repetition_penalty": repetition_penalty, "no_repeat_ngram": no_repeat_ngram}
        beams = None
        if num_beams > 1:
            _refuse_sampling(**sampling)
            for name, value in repetition.items():
                if value is not None:
                    raise ValueError(
                        f"--{name.replace('_', '-')} does not apply to beam search: omit it."
                    )
            beams = BeamSearchConfig(
                num_beams, length_penalty=1.0 if length_penalty is None else length_penalty
            )
        elif length_penalty is not None:
            raise ValueError("--length-penalty applies to beam search: add --num-beams 4.")
        strategy = _decoding_strategy(**sampling, **repetition)  # type: ignore[arg-type]

        on = check_device(device, dtype)
        if is_transformers_model(folder):
            if plugin:
                raise ValueError(f"--plugin is for runs of regard train, and {folder} is none.")
            generator = _transformers_generator(folder, prompt, max_new_tokens, on, dtype)
        else:
            generator = _run_generator(folder, prompt, on, dtype, plugin)
        criteria = StoppingCriteria(
            generator.stop_tokens,
            strings=[one.replace("\\n", "\n") for one in stop],
            decode=generator.decode,
        )
        arguments: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop": criteria,
            "device": generator.device,
        }
        if beams is not None:
            searched = beam_search(generator.step, [generator.tokens], beams, **arguments)
            _print_output(prompt, searched[0][0], json=json)
        elif json:
            (found,) = generate_texts(
                generator.step, [generator.tokens], strategy=strategy, **arguments
            )
            _print_output(prompt, found, json=True)
        else:
            echo_data(prompt)
            for piece in stream_tokens(
                generator.step, [generator.tokens], strategy=strategy, **arguments
            ):
                echo_data(piece.text)
            echo()


def _run_generator(
    folder: str, prompt: str, device: torch.device, dtype: str, plugins: list[Path]
) -> TextGenerator:
    """A run of the task lm."""
    run = load_run(folder, device=device, dtype=dtype, plugins=plugins)
    step = generation_step(run)
    assert isinstance(run.processor, TextProcessor)
    tokenizer = run.processor.tokenizer
    tokens = _encode_prompt(prompt, tokenizer)
    if cut := context_start(len(tokens), run.processor.length):
        echo(
            f"note: the prompt has {len(tokens):,} tokens, but the model reads at most "
            f"{run.processor.length:,}: it sees the last {len(tokens) - cut:,}.",
            err=True,
        )
    return TextGenerator(step, tokens, lambda new: tokenizer.decode(new), (), run.device)


def is_transformers_model(name: str) -> bool:
    """Whether a name is a GGUF file, or a folder or package with a model of transformers."""
    if (Path(name) / SPEC_FILE).exists():
        return False
    from regard.hf.files import GGUF_SUFFIX, find_model

    path = find_model(name)
    return path is not None and (path.suffix == GGUF_SUFFIX or (path / CONFIG_NAME).is_file())


def _transformers_generator(
    name: str, prompt: str, max_new_tokens: int, device: torch.device, dtype: str
) -> TextGenerator:
    """A causal language model of transformers, which stops at its end of text."""
    from regard.cli.swap import load_model
    from regard.hf.decoding import decoding_step, end_tokens
    from regard.hf.model_inputs import max_length

    model, tokenizer, _ = load_model(name)
    model.to(device)
    plain_step = decoding_step(model, logits_to_keep=1)
    tokens: list[int] = tokenizer(prompt)["input_ids"]
    if not tokens:
        raise ValueError("The prompt is empty: give at least one token.")
    limit = max_length(model)
    if limit is not None and len(tokens) + max_new_tokens > limit:
        raise ValueError(
            f"The prompt has {len(tokens)} tokens and --max-new-tokens is {max_new_tokens}, but "
            f"the model has {limit} positions."
        )
    amp = resolve_dtype(dtype, device)

    def step(tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        with autocast(device, amp):
            return plain_step(tokens, state)

    start = len(tokenizer.decode(tokens))

    def decode(new: list[int]) -> str:  # after the prompt, so that a first space is kept
        return str(tokenizer.decode([*tokens, *new]))[start:]

    return TextGenerator(step, tokens, decode, end_tokens(model, tokenizer), device)


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
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    typical_p: float | None,
    repetition_penalty: float | None,
    no_repeat_ngram: int | None,
    seed: int | None,
) -> DecodingStrategy:
    """Sampling with the given filters, or greedy search at temperature 0, in the order of
    transformers."""
    processors: list[LogitsProcessor] = [
        *([] if repetition_penalty is None else [RepetitionPenalty(repetition_penalty)]),
        *([] if no_repeat_ngram is None else [NoRepeatNGram(no_repeat_ngram)]),
    ]
    if temperature == 0:
        _refuse_sampling(top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, seed=seed)
        return GreedySearch(*processors)
    processors += [
        *([] if temperature is None else [Temperature(temperature)]),
        *([] if top_k is None else [TopKFilter(top_k)]),
        *([] if top_p is None else [TopPFilter(top_p)]),
        *([] if min_p is None else [MinPFilter(min_p)]),
        *([] if typical_p is None else [TypicalFilter(typical_p)]),
    ]
    return Sampling(*processors, seed=0 if seed is None else seed)


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
        echo_data(f"{prompt}{output.text}\n")
