"""Regression: predict numbers from the numeric columns of rows, from their texts, or from both."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_choice, check_int, did_you_mean
from regard.models.config import InputConfig, RegressionHeadConfig, TokenInput, VectorInput
from regard.tasks.base import LABELS, SPLITS, Example, ModelNeeds, Task, check_index, to_int64
from regard.tasks.baselines import CONSTANT, MAX_TEXTS, Baseline, ridge
from regard.tasks.files import ArrayBuilder
from regard.tasks.metrics import R2, MeanAbsoluteError, RootMeanSquaredError
from regard.tasks.processors import Prediction, Processor, TextProcessor
from regard.tasks.rendering import Rendered, RenderedTable
from regard.tasks.row_splits import (
    MISSING,
    SplitRows,
    UnusableRow,
    check_not_empty,
    copy_notes,
    hash_bytes,
    is_blank,
    to_text,
)
from regard.tasks.rows import Rows, read_rows
from regard.tasks.text_classification import MAX_LENGTH, choose_length
from regard.tasks.tokenizers import (
    CLASSIFIER_TOKENIZERS,
    Tokenizer,
    WordTokenizer,
    choose_tokenizer,
    tokenizer_from_dict,
    train_tokenizer,
)

AUTO = "auto"
INSPECTED = 1000  # training rows from which columns="auto" finds the numeric columns
NUMERIC_SHARE = 0.9  # of the values of a column; rows with others are left out
MEAN, RIDGE, TFIDF_RIDGE = "mean", "ridge", "TF-IDF + ridge"


class NumberRow(NamedTuple):
    """A text (empty without a text column), numbers (c), and the numbers to predict (o)."""

    text: str
    numbers: list[float]
    targets: list[float]


class RowProcessor(Processor):
    """Rows for a regression.

    Without a text, each column is a token: a vector of its standardised value and a one-hot code of
    the column. With a text, the input is its tokens; the numbers come before it, as text: for a
    tokenizer of words digit by digit, because most numbers are too rare to be words.

    Args:
        targets: Names of the numbers that are predicted.
        numbers: The numeric columns.
        mean, std: Of the numeric columns, then of the targets, in the training split.
        text: The column of the text.
        tokenizer: Converts the text to tokens.
        length: Maximum number of tokens.
    """

    def __init__(
        self,
        targets: Sequence[str],
        numbers: Sequence[str],
        mean: Sequence[float],
        std: Sequence[float],
        *,
        text: str | None = None,
        tokenizer: Tokenizer | None = None,
        length: int = MAX_LENGTH,
    ) -> None:
        self.targets, self.numbers = tuple(targets), tuple(numbers)
        self.mean, self.std = np.asarray(mean, dtype=float), np.asarray(std, dtype=float)
        self.text, self.length = text, length
        self.texts = None if tokenizer is None else TextProcessor(tokenizer, length)
        self.columns = (*self.numbers, *([] if text is None else [text]))

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: a row; or a text, if that is the only column."""
        return self.encode_values(*self._parse(raw))

    def truncates(self, raw: Any, /) -> bool:
        """See `Processor`."""
        return self.texts is not None and self.texts.truncates(self.join(*self._parse(raw)))

    def _parse(self, raw: Any) -> tuple[str, list[float]]:
        """The text and the numbers (c) of a row, or of a text."""
        if isinstance(raw, str) and self.columns == (self.text,):
            raw = {self.text: raw}
        if not isinstance(raw, Mapping):
            raise TypeError(
                f"Expected a row with {', '.join(map(repr, self.columns))}, "
                f"not {type(raw).__name__}."
            )
        for name in self.columns:
            if name not in raw:
                raise ValueError(f"The row has no {name!r}: {did_you_mean(name, map(str, raw))}")
        numbers = [to_number(name, raw[name]) for name in self.numbers]
        text = "" if self.text is None else to_text("The row", self.text, raw[self.text])
        return text, numbers

    def encode_values(self, text: str, numbers: Sequence[float]) -> dict[str, Tensor]:
        """The input of a model for a text and the numbers (c) of a row."""
        if self.texts is not None:
            return {"x": to_int64(self.texts.encode_text(self.join(text, numbers)))}
        count = len(self.numbers)
        values = (np.asarray(numbers, dtype=float) - self.mean[:count]) / self.std[:count]
        codes = torch.eye(count)
        return {"x": torch.cat((torch.as_tensor(values).float()[:, None], codes), 1)}

    def join(self, text: str, numbers: Sequence[float]) -> str:
        """The numbers with their names, and the text."""
        assert self.texts is not None
        of_words = isinstance(self.texts.tokenizer, WordTokenizer)
        return join_numbers(self.numbers, numbers, of_words=of_words) + text

    def standardize(self, targets: np.ndarray) -> np.ndarray:
        """Targets (..., o) in the units of the data -> targets of the model."""
        count = len(self.numbers)
        return (targets - self.mean[count:]) / self.std[count:]

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the numbers by name, in the units of the data."""
        count = len(self.numbers)
        values = output.detach().cpu().double().numpy() * self.std[count:] + self.mean[count:]
        return [dict(zip(self.targets, row, strict=True)) for row in values.tolist()]

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        return {
            "targets": list(self.targets),
            "numbers": list(self.numbers),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "text": self.text,
            "tokenizer": None if self.texts is None else self.texts.tokenizer.to_dict(),
            "length": self.length,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RowProcessor:
        """The processor that `to_dict` described."""
        try:
            saved = content["tokenizer"]
            return cls(
                content["targets"],
                content["numbers"],
                content["mean"],
                content["std"],
                text=content["text"],
                tokenizer=None if saved is None else tokenizer_from_dict(saved),
                length=content["length"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of rows: {error!r}") from None


class EncodedRows(NamedTuple):
    """The rows of a split: inputs as numbers (n, c), tokens[ends[i] : ends[i + 1]] of text i,
    targets (n, o) in the units of the data, and hashes (n) of the inputs. `truncated` counts texts
    with more tokens than the length."""

    numbers: np.ndarray
    tokens: np.ndarray
    ends: np.ndarray
    targets: np.ndarray
    hashes: np.ndarray
    truncated: int


class Regression(Task):
    """Predict one or several numbers of a row.

    Splits are files named train, valid and test. Missing splits get one of ten training rows,
    chosen by a hash. Numbers are standardised with the mean and the standard deviation of the
    training split; the metrics are in the units of the data.

    Args:
        data: CSV, JSON lines, a JSON array or Parquet, a folder of them, or hf:name.
        target: The column of the number to predict, or several, separated by commas.
        columns: The numeric columns to predict it from, separated by commas; "auto" are those with
            at least 90 % of numbers, but the target. None: "auto" without a text, else none.
        text: A column of text to predict it from. With `columns`, the numbers come before the text.
        length: Maximum number of tokens of a text. None: that of all but 5 % of the training texts,
            rounded up to a multiple of 16, at most 1,024.
        tokenizer: "auto", "word", "byte", "char" or "bpe", learned from the training split. None:
            "auto": "word", or "byte" for texts without words that occur again; see
            `regard.tasks.tokenizers.choose_tokenizer`.
        missing: What to do with rows in which a value is missing, no number, or not finite: "drop"
            or "error".
        encoding: Encoding of the files.
        seed: Seed of the splits.
    """

    processor: RowProcessor

    def __init__(
        self,
        data: str | Path,
        *,
        target: str,
        columns: str | None = None,
        text: str | None = None,
        length: int | None = None,
        tokenizer: str | None = None,
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        check_int(0, seed=seed)
        if text is None and (length is not None or tokenizer is not None):
            raise ValueError("length and tokenizer describe a text: also give text.")
        if length is not None:
            check_int(1, length=length)
        rows = read_rows(data, encoding)
        targets = _split_names("target", target)
        if columns == AUTO or (columns is None and text is None):
            train = rows.get("train") or rows["all"]
            numbers = _numeric_columns(train, exclude=(*targets, text), where=str(data))
        else:
            numbers = [] if columns is None else _split_names("columns", columns)
        for name in targets:
            if name in (*numbers, text):
                raise ValueError(f"{name!r} is the target, so it cannot be an input as well.")
        self.text = text
        self.source = SplitRows(
            rows,
            [*numbers, *targets, *([] if text is None else [text])],
            lambda where, values: _parse(where, values, numbers, targets, text),
            drop=missing == "drop",
            seed=seed,
        )
        trained = None
        if text is not None:
            name = AUTO if tokenizer is None else tokenizer
            if name == AUTO:
                name = choose_tokenizer(row.text for _, row in self.source.walk("train"))

            def training_texts(*, of_words: bool) -> Iterator[str]:
                for _, row in self.source.walk("train"):
                    yield join_numbers(numbers, row.numbers, of_words=of_words) + row.text

            trained = train_tokenizer(
                name,
                lambda: training_texts(of_words=name == WordTokenizer.name),
                choices=CLASSIFIER_TOKENIZERS,
            )
            of_words = isinstance(trained, WordTokenizer)
            length = length or choose_length(trained, training_texts(of_words=of_words))
        mean, std = _mean_and_std(self.source, [*numbers, *targets], len(numbers))
        self.processor = RowProcessor(
            targets, numbers, mean, std, text=text, tokenizer=trained, length=length or MAX_LENGTH
        )
        self.rows = {split: _encode_split(self.source, split, self.processor) for split in SPLITS}
        scale = torch.tensor(std[len(numbers) :])
        self.metrics = (RootMeanSquaredError(scale), MeanAbsoluteError(scale), R2())

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder of tokens, or of one vector per column."""
        texts, count = self.processor.texts, len(self.processor.numbers)
        source: InputConfig = VectorInput(width=1 + count)
        if texts is not None:
            source = TokenInput(vocab_size=texts.tokenizer.vocab_size)
        return ModelNeeds(
            kind="encoder",
            input=source,
            head=RegressionHeadConfig(num_outputs=len(self.processor.targets)),
            length=count if texts is None else texts.length,
        )

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.rows[split].targets)

    def example(self, split: str, index: int) -> Example:
        """See `Task`: the targets are standardised."""
        check_index(split, index, self.size(split))
        rows, processor = self.rows[split], self.processor
        labels = torch.as_tensor(processor.standardize(rows.targets[index])).float()
        if processor.texts is None:
            return Example(processor.encode_values("", rows.numbers[index]), {LABELS: labels})
        tokens = rows.tokens[rows.ends[index] : rows.ends[index + 1]]
        return Example({"x": to_int64(tokens)}, {LABELS: labels})

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: the mean of the training split, and ridge regression."""
        found = dict(super().baselines())
        name = RIDGE if self.text is None else TFIDF_RIDGE
        return {MEAN: found.pop(CONSTANT), **found, name: self._ridge_score}

    def _ridge_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of ridge regression on the numbers and, if there are texts, on TF-IDF."""
        data = []
        for split, indices in {
            "train": self.sample("train", MAX_TEXTS).tolist(),
            "test": list(test),
        }.items():
            rows = self.rows[split]
            texts = None
            if self.text is not None:
                wanted = dict.fromkeys(indices, "")
                for index, (_, row) in enumerate(self.source.walk(split)):
                    if index in wanted:
                        wanted[index] = row.text
                texts = [wanted[index] for index in indices]
            count = len(self.processor.numbers)
            scaled = (rows.numbers[indices] - self.processor.mean[:count]) / self.processor.std[
                :count
            ]
            data.append((scaled, texts, self.processor.standardize(rows.targets[indices])))
        (train, train_texts, targets), (numbers, texts, _) = data
        predicted = ridge((train, train_texts), targets, (numbers, texts))
        return self.metric.update(torch.as_tensor(predicted), self.batch("test", test), [])

    def notes(self) -> list[str]:
        """See `Task`."""
        hashes = {split: rows.hashes for split, rows in self.rows.items()}
        notes = [*self.source.notes(), *copy_notes(hashes, "rows")]
        if self.processor.texts is not None:
            truncated = sum(rows.truncated for rows in self.rows.values())
            notes += self.processor.texts.truncation_notes(truncated, sum(map(self.size, SPLITS)))
        return notes

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """A table of the inputs, the targets and the predictions."""
        processor = self.processor
        if processor.texts is None:
            count = len(processor.numbers)
            values = example.inputs["x"][:, 0].double().numpy() * processor.std[:count]
            inputs = [
                (name, f"{value:.6g}")
                for name, value in zip(
                    processor.numbers, values + processor.mean[:count], strict=True
                )
            ]
        else:
            inputs = [
                (str(self.text), processor.texts.tokenizer.decode(example.inputs["x"].tolist()))
            ]
        targets = processor.decode(example.targets[LABELS][None], {})[0]
        rows = [(name, value, "") for name, value in inputs]
        for name, value in targets.items():
            predicted = "" if prediction is None else f"{prediction[name]:.6g}"
            rows.append((f"→ {name}", f"{value:.6g}", predicted))
        width = 2 if prediction is None else 3
        return RenderedTable(
            ("column", "value", "predicted")[:width], [row[:width] for row in rows]
        )

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> RowProcessor:
        """See `Task`."""
        return RowProcessor.from_dict(content)


def to_number(name: str, value: Any) -> float:
    """A value of a column as a finite number; anything else is an `UnusableRow`."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UnusableRow(f"{name!r} is {value!r:.60}, not a number.") from None
    if not math.isfinite(number):
        raise UnusableRow(f"{name!r} is {value!r}, not a finite number.")
    return number


def join_numbers(names: Sequence[str], numbers: Sequence[float], *, of_words: bool) -> str:
    """Numbers with their names as text, a line for each; for words, digit by digit."""
    separator = " " if of_words else ""
    named = zip(names, numbers, strict=True)
    return "".join(f"{name}: {separator.join(f'{value:g}')}\n" for name, value in named)


def _split_names(argument: str, names: str) -> list[str]:
    """The column names of an argument, "a,b" or a list."""
    parts = names.split(",") if isinstance(names, str) else list(names)
    found = [part.strip() for part in parts if part.strip()]
    if not found or len(set(found)) != len(found):
        raise ValueError(
            f"{argument} must be different columns separated by commas, not {names!r}."
        )
    return found


def _numeric_columns(rows: Rows, exclude: Sequence[str | None], where: str) -> list[str]:
    """The columns in which nearly all values of the first training rows are numbers."""
    numeric: Counter[str] = Counter()
    present: Counter[str] = Counter()
    for _, row in islice(rows, INSPECTED):
        for name, value in row.items():
            if not is_blank(value):
                present[name] += 1
                numeric[name] += _is_number(value)
    found = [
        name
        for name, count in present.items()
        if numeric[name] >= NUMERIC_SHARE * count and name not in exclude
    ]
    if not present:
        raise ValueError(f"{where} has no rows with values.")
    if not found:
        raise ValueError(
            f"{where} has no numeric column beside the target: name a column of text with text=, "
            "or columns with columns=."
        )
    return found


def _is_number(value: Any) -> bool:
    """Whether a value is a number; NaN and infinities are, but rows with them are left out."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _parse(
    where: str, values: list[Any], numbers: Sequence[str], targets: Sequence[str], text: str | None
) -> NumberRow:
    """The numbers and the text of a row."""
    parsed = [
        to_number(name, value) for name, value in zip((*numbers, *targets), values, strict=False)
    ]
    content = "" if text is None else to_text(where, text, values[-1])
    return NumberRow(content, parsed[: len(numbers)], parsed[len(numbers) :])


def _mean_and_std(
    source: SplitRows[NumberRow], names: Sequence[str], inputs: int
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the inputs and the targets in the training split.

    An input that is constant gets 1, a target that is constant is a ValueError.
    """
    collected = array("d")
    for _, row in source.walk("train"):
        collected.extend([*row.numbers, *row.targets])
    values = np.frombuffer(collected, dtype=float).reshape(-1, len(names))
    check_not_empty("train", len(values))
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = values.mean(0), values.std(0)
    for name, spread in zip(names, std.tolist(), strict=True):
        if not math.isfinite(spread):
            raise ValueError(f"The values of {name!r} are too large to be standardised.")
    tiny = std <= 1e-12 * np.abs(mean)
    for name, is_constant, value in zip(names[inputs:], tiny[inputs:], mean[inputs:], strict=True):
        if is_constant:
            raise ValueError(f"The target {name!r} is {value:g} in all training rows.")
    return mean.tolist(), np.where(tiny, 1.0, std).tolist()


def _encode_split(source: SplitRows[NumberRow], split: str, processor: RowProcessor) -> EncodedRows:
    """The rows of a split as arrays."""
    texts = processor.texts
    tokens = ArrayBuilder(np.uint8 if texts is None else texts.tokenizer.dtype)
    ends, numbers, targets, hashes = array("q", [0]), array("d"), array("d"), array("Q")
    truncated = 0
    for _, row in source.walk(split):
        numbers.extend(row.numbers)
        targets.extend(row.targets)
        content = np.array(row.numbers).tobytes() + row.text.encode("utf-8", "surrogatepass")
        hashes.append(hash_bytes(content))
        if texts is not None:
            encoded, is_truncated = texts.truncate(processor.join(row.text, row.numbers))
            truncated += is_truncated
            tokens.append(encoded)
            ends.append(ends[-1] + len(encoded))
    check_not_empty(split, len(hashes))
    return EncodedRows(
        np.frombuffer(numbers, dtype=float).reshape(len(hashes), -1),
        tokens.finish(),
        np.array(ends),
        np.frombuffer(targets, dtype=float).reshape(len(hashes), -1),
        np.array(hashes),
        truncated,
    )
