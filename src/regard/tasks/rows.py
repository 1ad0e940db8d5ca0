"""Read rows of data: CSV, JSON lines, JSON arrays, Parquet, or Hugging Face datasets."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from regard.errors import did_you_mean
from regard.tasks.files import (
    SPLIT_NAMES,
    existing_path,
    file_type,
    files_by_split,
    open_text,
)

MAX_LINE = 1 << 26  # characters
MAX_JSON_ARRAY = 1 << 30  # characters; an array is read at once
SAMPLE = 1 << 16  # characters from which the dialect of a CSV file is detected
SNIFF = 1 << 12  # characters for csv.Sniffer, whose time is quadratic
HUGGING_FACE = "hf:"

Row = dict[str, Any]
RowIterator = Iterator[tuple[str, Row]]  # where a row is, for error messages, and the row
RowReader = Iterator[tuple[str, Row | ValueError]]  # also of rows that are broken, with the reason


class Rows:
    """Rows that can be iterated over several times; each time they are read again, one by one.

    Iteration raises the error of a row that is broken: a line that is no JSON, or has too few
    fields. `read` returns an iterator that yields the error in its place, and goes on.
    """

    def __init__(self, read: Callable[[], RowReader]) -> None:
        self.read = read

    def __iter__(self) -> RowIterator:
        return raise_errors(self.read())


def raise_errors(rows: RowReader) -> RowIterator:
    """The rows up to one that is broken, whose error is raised."""
    for where, row in rows:
        if isinstance(row, ValueError):
            raise row
        yield where, row


# --------------------------------------------------------------------------------------------- CSV
def _read_csv(path: Path, encoding: str) -> RowReader:
    with open_text(path, encoding) as file:
        yield from parse_csv(file, str(path))


def parse_csv(file: IO[str], source: str) -> RowReader:
    """The rows of an open CSV file, whose dialect is detected; blank lines are left out."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))  # the default is 131,072
    start = file.read(SAMPLE)
    lines = _check_lines(read_lines(start, file), source)
    reader = csv.reader(lines, detect_dialect(start))
    try:
        header = next(reader, None)
        if not header:
            raise ValueError(f"{source} is empty: expected a line with the column names.")
        counts = Counter(header)
        for name in counts:
            if name and counts[name] > 1:
                raise ValueError(f"{source} has two columns {name!r}: rename one of them.")
        for row in reader:
            where = f"line {reader.line_num} of {source}"
            if row and len(row) != len(header):
                message = f"{where} has {len(row)} fields, but the header has {len(header)}."
                yield where, ValueError(message)
            elif row:
                yield where, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of {source}: {error}") from None


def read_lines(start: str, rest: IO[str]) -> Iterator[str]:
    """The lines, with their endings, of a text whose start was read before."""
    lines = list(io.StringIO(start, newline=""))
    *complete, last = [*lines, ""] if start == "" or start.endswith("\n") else lines
    yield from complete
    following = rest.readline(MAX_LINE)
    # the start may end inside a line, after it, or between "\r" and "\n"
    continues = not last.endswith("\r") or following == "\n"
    yield from [last + following] if continues else [last, following]
    while line := rest.readline(MAX_LINE):
        yield line


def _check_lines(lines: Iterable[str], source: str) -> Iterator[str]:
    """Refuse lines that are too long, such as a file without line endings."""
    for number, line in enumerate(lines, 1):
        if len(line) >= MAX_LINE:
            raise ValueError(f"line {number} of {source} has {MAX_LINE} characters or more.")
        yield line


def detect_dialect(sample: str) -> type[csv.Dialect]:
    """The CSV dialect in which the rows have as many fields as the header, and the most fields.

    csv.Sniffer's guess is one candidate: it is right about unusual quotes, but often wrong about
    texts that contain quotes.
    """
    candidates: list[type[csv.Dialect]] = [
        type("DelimitedDialect", (csv.excel,), {"delimiter": delimiter}) for delimiter in ",;\t|"
    ]
    with suppress(csv.Error):
        candidates.append(csv.Sniffer().sniff(sample[:SNIFF], delimiters=",;\t|"))

    def fit(dialect: type[csv.Dialect]) -> tuple[bool, int]:
        try:
            reader = csv.reader(io.StringIO(sample, newline=""), dialect)
            rows = [row for row in itertools.islice(reader, 64) if row]
        except csv.Error:
            return False, 0
        if len(sample) == SAMPLE and len(rows) > 1:
            rows.pop()  # may be truncated
        columns = len(rows[0]) if rows else 0
        regular = sum(len(row) == columns for row in rows) >= 0.9 * len(rows)
        return regular and columns > 1, columns

    return max(candidates, key=fit)


# -------------------------------------------------------------------------------- JSON and Parquet
def read_json_lines(path: Path, encoding: str = "utf-8") -> RowIterator:
    """The objects of a file with one JSON object per line."""
    return raise_errors(_read_json_lines(path, encoding))


def _read_json_lines(path: Path, encoding: str) -> RowReader:
    with open_text(path, encoding) as file:
        lines = iter(lambda: file.readline(MAX_LINE), "")
        yield from parse_json_lines(_check_lines(lines, str(path)), str(path))


def parse_json_lines(lines: Iterable[str], source: str) -> RowReader:
    """The objects of lines, of which blank ones are left out."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"line {number} of {source}"
            try:
                yield where, _check_object(_parse_json(line, where), where)
            except ValueError as error:
                yield where, error


def _read_json_array(path: Path, encoding: str) -> RowReader:
    with open_text(path, encoding) as file:
        text = file.read(MAX_JSON_ARRAY)
    if len(text) == MAX_JSON_ARRAY:
        raise ValueError(
            f"{path} has {MAX_JSON_ARRAY} characters or more: write it as JSON lines (.jsonl)."
        )
    rows = _parse_json(text, str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path} must be an array of objects, not {type(rows).__name__}.")
    for number, row in enumerate(rows, 1):
        where = f"row {number} of {path}"
        try:
            yield where, _check_object(row, where)
        except ValueError as error:
            yield where, error


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply.") from None
    except ValueError as error:  # also for integers of thousands of digits
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def _check_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object, not {type(row).__name__}.")
    return row


def _read_parquet(path: Path, encoding: str) -> RowReader:
    try:
        from pyarrow.lib import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ImportError(
            f"Reading {path} requires the package pyarrow: pip install 'regard[text]'"
        ) from None
    try:
        batches = ParquetFile(path).iter_batches(1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"row {number} of {path}", row
    except (ArrowException, OSError) as error:  # truncated files raise either
        raise ValueError(f"{path} is not a complete Parquet file: {error}") from None


READERS: dict[str, Callable[[Path, str], RowReader]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json_array,
    ".parquet": _read_parquet,
}


# ------------------------------------------------------------------------------------ Hugging Face
def _read_hugging_face(dataset: Any, name: str) -> RowReader:
    """The rows of a split of the package `datasets`, with class numbers replaced by their names."""
    features = dataset.features
    class_names = {key: names for key in features if (names := _class_names(features[key]))}
    for number, row in enumerate(dataset, 1):
        labels = {key: _to_names(row[key], names) for key, names in class_names.items()}
        yield f"row {number} of {name}", {**row, **labels}


def _class_names(feature: Any) -> list[str] | None:
    """The names of the classes of a feature, or of a list of classes."""
    inner = getattr(feature, "feature", feature)
    return list(inner.names) if type(inner).__name__ == "ClassLabel" else None


def _to_names(value: Any, names: Sequence[str]) -> Any:
    """Class numbers as names; a number below 0 is no label."""
    if isinstance(value, list):
        return [_to_names(each, names) for each in value]
    return None if value is None or value < 0 else names[value]


def _load_hugging_face(name: str) -> dict[str, Rows]:
    """The splits of a dataset on the hub, `name#configuration`, or in a folder."""
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"Reading hf:{name} requires the package datasets: pip install 'regard[hf]'"
        ) from None
    try:
        if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(*filter(None, name.partition("#")[::2]))
    except Exception as error:  # of pyarrow, the network, the disk, or datasets itself
        raise ValueError(f"Cannot read hf:{name}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        return {"all": Rows(partial(_read_hugging_face, loaded, name))}
    if "train" not in loaded:
        raise ValueError(f"hf:{name} has no split 'train', only {', '.join(loaded)}.")
    return {
        SPLIT_NAMES[key]: Rows(partial(_read_hugging_face, split, f"{name}[{key}]"))
        for key, split in loaded.items()
        if key in SPLIT_NAMES
    }


# ----------------------------------------------------------------------------------------- by name
def read_rows(data: str | Path, encoding: str = "utf-8") -> dict[str, Rows]:
    """The rows of a file, a folder or `hf:name`, by split; without splits, under "all"."""
    if str(data).startswith(HUGGING_FACE):
        return _load_hugging_face(str(data).removeprefix(HUGGING_FACE))
    path = existing_path(data)
    splits = files_by_split(path, READERS) if path.is_dir() else {"all": [path]}
    for file in itertools.chain.from_iterable(splits.values()):
        suffix = file_type(file)
        if suffix not in READERS:
            raise ValueError(
                f"Cannot read rows from {file}: supported are {', '.join(READERS)}, "
                "also compressed as .xz or .gz."
            )
        if suffix == ".parquet" and file.suffix.lower() != suffix:
            raise ValueError(f"{file}: Parquet cannot be read from {file.suffix}; decompress it.")

    def read_files(files: list[Path]) -> RowReader:
        for file in files:
            yield from READERS[file_type(file)](file, encoding)

    return {split: Rows(partial(read_files, files)) for split, files in splits.items()}


def get_column(row: Row, name: str, where: str) -> Any:
    """A value of a row; an unknown column is a ValueError with the most similar name."""
    if name not in row:
        raise ValueError(f"{where} has no column {name!r}: {did_you_mean(name, map(str, row))}")
    return row[name]


def is_missing(value: Any) -> bool:
    """Whether a value is None, an empty text or NaN."""
    return value is None or value == "" or value != value
