"""The output of `regard predict`: lines for a person, CSV, or JSON.

A row keeps all its columns, and what is predicted for it gets the prefix "predicted_". A text or a
path is one column, "text" or "path"; what is predicted for it needs a prefix only if its name is
the same. An input that could not be predicted has an "error" instead.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.text import Text

from regard.cli.output import console, echo, echo_data, print_json
from regard.cli.raw_inputs import RawInput
from regard.tasks.processors import Prediction, Processor
from regard.tasks.rendering import Rendered, RenderedText

ERROR, PREFIX = "error", "predicted_"
MAX_SHOWN = 60  # characters of an input
SPAN_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def name_predictions(
    names: Iterable[str], taken: Collection[str], *, of_row: bool
) -> dict[str, str]:
    """Map names of predicted values to names that no column of the input has."""
    used = set(taken)
    found = {}
    for name in names:
        base = PREFIX + name if of_row or name in used else name
        free, number = base, 2
        while free in used:
            free, number = f"{base}_{number}", number + 1
        found[name] = free
        used.add(free)
    return found


def name_error(taken: Collection[str]) -> str:
    """The name of the error beside the columns `taken`."""
    return name_predictions([ERROR], taken, of_row=False)[ERROR]


class PredictionOutput(ABC):
    """Prints inputs and their predictions.

    Args:
        processor: The processor of the run.
    """

    def __init__(self, processor: Processor) -> None:
        self.processor = processor

    @abstractmethod
    def write(self, item: RawInput, prediction: Prediction) -> None:
        """Print an input, or keep it until `close`. With an error, its prediction is empty."""

    @abstractmethod
    def close(self) -> None:
        """Print what was kept."""

    def single_value(self, item: RawInput) -> dict[str, Any]:
        """A text or a path by its name; of a row that was read as a text, the text."""
        if self.processor.columns or item.raw is None:
            return {}
        return {"path" if self.processor.suffixes else "text": str(item.raw)}


class LineOutput(PredictionOutput):
    """A line for each prediction, with the start of what the model read; or, if the processor
    renders predictions, the rendering."""

    def __init__(self, processor: Processor) -> None:
        super().__init__(processor)
        self.colours: dict[str, str] = {}  # of the labels of spans

    def write(self, item: RawInput, prediction: Prediction) -> None:
        """See `PredictionOutput`; errors are left out."""
        if item.error:
            return
        rendered = self.processor.render(prediction)
        if rendered is not None:
            self._print_rendered(rendered)
            return
        words = []
        for name, value in prediction.items():
            if isinstance(value, float):
                words.append(f"{name} {value:.4g}")
            elif isinstance(value, str):
                words.append(value)
            elif not isinstance(value, Mapping):
                words.append(f"{name} {value}")
        if len(self.processor.columns) > 1:
            text = ", ".join(f"{name}={item.raw[name]}" for name in self.processor.columns)
        else:
            value = item.raw[self.processor.columns[0]] if self.processor.columns else item.raw
            text = " ".join(str(value).split())
        words.append(text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…")
        echo("  ".join(words))

    def _print_rendered(self, rendered: Rendered) -> None:
        """Print a rendering; on a terminal, each label of the spans of a text has a colour."""
        if not sys.stdout.isatty() or not isinstance(rendered, RenderedText):
            echo(rendered.to_text())
            return
        shown = Text()
        for text, label in rendered.pieces():
            if label is None:
                shown.append(text)
                continue
            number = len(self.colours) % len(SPAN_COLOURS)
            colour = self.colours.setdefault(label, SPAN_COLOURS[number])
            shown.append(text, f"bold {colour}").append(f" {label}", f"italic {colour}")
        console().print(shown, soft_wrap=True)

    def close(self) -> None:
        """See `PredictionOutput`: nothing was kept."""


class TextOutput(PredictionOutput):
    """The text that the model wrote, a line for each input; empty for one with an error."""

    def write(self, item: RawInput, prediction: Prediction) -> None:
        """See `PredictionOutput`."""
        echo_data(" ".join(str(prediction.get("text", "")).split()) + "\n")

    def close(self) -> None:
        """See `PredictionOutput`: nothing was kept."""


class JsonOutput(PredictionOutput):
    """An array with an object for each input."""

    def __init__(self, processor: Processor) -> None:
        super().__init__(processor)
        self.objects: list[dict[str, Any]] = []

    def write(self, item: RawInput, prediction: Prediction) -> None:
        """See `PredictionOutput`."""
        given = self.single_value(item) if item.row is None else item.row
        names = name_predictions(prediction, given, of_row=item.row is not None)
        shown = {name: to_json(value) for name, value in given.items()}
        shown |= {names[name]: value for name, value in prediction.items()}
        if item.error:
            shown[name_error(given)] = item.error
        self.objects.append(shown)

    def close(self) -> None:
        """See `PredictionOutput`."""
        print_json(self.objects)


class CsvOutput(PredictionOutput):
    """A line for each input, without tables such as the probabilities of all labels.

    The columns are those of the first input, of the first prediction, and the error. Lines before
    the first prediction are kept until then.
    """

    def __init__(self, processor: Processor) -> None:
        super().__init__(processor)
        self.kept: list[tuple[RawInput, Prediction]] = []
        self.columns: list[str] = []  # of the inputs
        self.names: dict[str, str] | None = None  # of what is predicted
        self.left_out: dict[str, None] = {}  # columns of other inputs

    def write(self, item: RawInput, prediction: Prediction) -> None:
        """See `PredictionOutput`."""
        if self.names is not None:
            self._print_line(item, prediction, self.names)
            return
        self.kept.append((item, prediction))
        if not item.error:
            self._print_kept(prediction)

    def close(self) -> None:
        """See `PredictionOutput`; columns that could not be printed are noted on stderr."""
        if self.names is None and self.kept:
            self._print_kept({})
        if self.left_out:
            echo(
                f"note: only some inputs have {', '.join(map(repr, self.left_out))}, which CSV "
                "leaves out because the first input has not: use --json.",
                err=True,
            )

    def _print_kept(self, prediction: Prediction) -> None:
        """Print the header, and the lines that waited for it."""
        for item, _ in self.kept:
            given = self.single_value(item) if item.row is None else item.row
            self.columns += [name for name in given if name not in self.columns]
        flat = [name for name, value in prediction.items() if not isinstance(value, Mapping)]
        of_rows = any(item.row is not None for item, _ in self.kept)
        self.names = name_predictions(flat, self.columns, of_row=of_rows)
        taken = [*self.columns, *self.names.values()]
        echo_data(format_csv_row([*taken, name_error(taken)]))
        for item, predicted in self.kept:
            self._print_line(item, predicted, self.names)

    def _print_line(self, item: RawInput, prediction: Prediction, names: Iterable[str]) -> None:
        row = item.row or {}
        given = self.single_value(item) | row
        self.left_out |= dict.fromkeys(name for name in row if name not in self.columns)
        cells = [given.get(name) for name in self.columns]
        cells += [prediction.get(name) for name in names]
        echo_data(format_csv_row([*map(to_cell, cells), item.error]))


def to_cell(value: Any) -> Any:
    """A value for CSV: lists and objects as JSON."""
    if isinstance(value, list | tuple | dict):
        return json.dumps(to_json(value), ensure_ascii=False)
    return value


def to_json(value: Any) -> Any:
    """A value of a row for JSON: NaN is null, and others, such as dates, are texts."""
    if isinstance(value, dict):
        return {str(name): to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def format_csv_row(values: Iterable[object]) -> str:
    """A line of a CSV file."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()
