"""Rows as users have them: CSV, JSON lines, a JSON array, Parquet, or a data set of Hugging Face.

`Rows` are read again each time they are walked, a row at a time, and hold nothing.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from regard.errors import did_you_mean
from regard.tasks.files import existing_path, file_type, files_by_split, open_text

LONGEST = 1 << 26  # characters of a line, or of a field: what is longer is no row
ARRAY = 1 << 30  # characters of a JSON array, which is read at once
SAMPLE = 1 << 16  # characters that a CSV file is judged by
GUESS = 1 << 12  # and that the csv module guesses by, which takes their square
HUGGING_FACE = "hf:"

Row = dict[str, Any]


class Rows(ABC):
    """Rows with a place each, so that what is wrong can be pointed at: `for place, row in rows`."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Row]]: ...


class CsvRows(Rows):
    """A file with a header, in the dialect that fits its first rows."""

    def __init__(self, path: Path, encoding: str) -> None:
        self.path, self.encoding = path, encoding

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """See `Rows`."""
        csv.field_size_limit(
            max(csv.field_size_limit(), LONGEST)
        )  # texts are longer than the usual 131,072
        with open_text(self.path, self.encoding) as file:
            start = file.read(SAMPLE)
            reader = csv.reader(
                bounded(read_lines(start, file), str(self.path)), detect_dialect(start)
            )
            yield from self._rows(reader)

    def _rows(self, reader: Any) -> Iterator[tuple[str, Row]]:
        try:
            header = next(reader, None)
            if not header:
                raise ValueError(
                    f"{self.path} is empty: a line with the names of the columns is expected"
                )
            if twice := [name for name in dict.fromkeys(header) if name and header.count(name) > 1]:
                raise ValueError(
                    f"{self.path} has more than one column {twice[0]!r}: give each a name of its own"
                )
            for row in reader:
                place = f"line {reader.line_num} of {self.path}"
                if row and len(row) != len(header):
                    raise ValueError(
                        f"{place} has {len(row)} fields, and the header has {len(header)}"
                    )
                if row:
                    yield place, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num} of {self.path}: {error}") from None


def read_lines(start: str, rest: IO[str]) -> Iterator[str]:
    """The lines of a text whose start was read already; their ends stay on, since a field may hold some."""
    found = list(io.StringIO(start, newline=""))
    *whole, last = [*found, ""] if start == "" or start.endswith("\n") else found
    yield from whole
    more = rest.readline(LONGEST)
    joined = (
        not last.endswith("\r") or more == "\n"
    )  # a line may end within what was read, or just behind it
    yield from [last + more] if joined else [last, more]
    while line := rest.readline(LONGEST):
        yield line


def bounded(lines: Iterable[str], where: str) -> Iterator[str]:
    """Lines that a row may have: a file without any end of line would be one line."""
    for number, line in enumerate(lines, 1):
        if len(line) >= LONGEST:
            raise ValueError(
                f"line {number} of {where} has {LONGEST} characters or more: these are no rows"
            )
        yield line


def detect_dialect(sample: str) -> type[csv.Dialect]:
    """The dialect in which the first rows have as many fields as the header, and the most; of equals the plainest.

    The guess of the csv module is one candidate: it is right about odd quotes, and often wrong about texts with quotes.
    """
    candidates = [plain(delimiter) for delimiter in ",;\t|"]
    with suppress(csv.Error):
        candidates.append(csv.Sniffer().sniff(sample[:GUESS], delimiters=",;\t|"))
    return max(candidates, key=lambda dialect: fit(sample, dialect))


def plain(separator: str) -> type[csv.Dialect]:
    """Double quotes, doubled inside, and this between fields."""

    class Plain(csv.excel):
        delimiter = separator

    return Plain


def fit(sample: str, dialect: type[csv.Dialect]) -> tuple[bool, int]:
    """Whether all whole rows of the sample are alike, and the number of their fields."""
    try:
        rows = [
            row
            for row in itertools.islice(csv.reader(io.StringIO(sample, newline=""), dialect), 64)
            if row
        ]
    except csv.Error:
        return False, 0
    whole = (
        rows[:-1] if len(sample) == SAMPLE and len(rows) > 1 else rows
    )  # the last may be cut off
    wide = len(whole[0]) if whole else 0
    alike = sum(len(row) == wide for row in whole) >= 0.9 * len(whole)
    return alike and wide > 1, wide


class JsonLinesRows(Rows):
    """An object a line."""

    def __init__(self, path: Path, encoding: str) -> None:
        self.path, self.encoding = path, encoding

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """See `Rows`."""
        with open_text(self.path, self.encoding) as file:
            lines = iter(lambda: file.readline(LONGEST), "")
            for number, line in enumerate(bounded(lines, str(self.path)), 1):
                if line.strip():
                    place = f"line {number} of {self.path}"
                    yield place, checked(parsed(line, place), place)


class JsonArrayRows(Rows):
    """An array of objects, which is read at once: so not too long a one."""

    def __init__(self, path: Path, encoding: str) -> None:
        self.path, self.encoding = path, encoding

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """See `Rows`."""
        with open_text(self.path, self.encoding) as file:
            text = file.read(ARRAY)
        if len(text) == ARRAY:
            raise ValueError(
                f"{self.path} is an array of {ARRAY} characters or more: write it as JSON lines (.jsonl)"
            )
        found = parsed(text, str(self.path))
        if not isinstance(found, list):
            raise ValueError(
                f"{self.path} must hold an array of objects, not {type(found).__name__}"
            )
        for number, row in enumerate(found, 1):
            place = f"row {number} of {self.path}"
            yield place, checked(row, place)


def parsed(text: str, where: str) -> Any:
    """JSON; whatever is wrong with it is one kind of error."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:  # also for whole numbers of thousands of digits
        raise ValueError(f"{where} is no JSON: {error}") from None


def checked(row: Any, where: str) -> Row:
    """A row is an object."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object, not {type(row).__name__}")
    return row


class ParquetRows(Rows):
    """A file of Apache Parquet, a batch of rows at a time; needs pyarrow."""

    def __init__(self, path: Path, encoding: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """See `Rows`."""
        try:
            from pyarrow.lib import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise ImportError(
                f"to read {self.path} the package pyarrow is needed: pip install 'regard[text]'"
            ) from None
        try:
            rows = (
                row
                for batch in ParquetFile(self.path).iter_batches(1024)
                for row in batch.to_pylist()
            )
            for number, row in enumerate(rows, 1):
                yield f"row {number} of {self.path}", row
        except (ArrowException, OSError) as error:  # a file that was cut off is told in either way
            raise ValueError(f"{self.path} is no whole Parquet file: {error}") from None


READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".csv": CsvRows,
    ".tsv": CsvRows,
    ".jsonl": JsonLinesRows,
    ".ndjson": JsonLinesRows,
    ".json": JsonArrayRows,
    ".parquet": ParquetRows,
}


class ChainedRows(Rows):
    """The rows of several files, one after the other."""

    def __init__(self, parts: list[Rows]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """See `Rows`."""
        return itertools.chain.from_iterable(self.parts)


class HuggingFaceRows(Rows):
    """A split of a data set of the package `datasets`; numbers of classes become their names."""

    def __init__(self, found: Any, name: str) -> None:
        self.found, self.name = found, name

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """See `Rows`."""
        features = self.found.features
        named = {
            key: features[key].names
            for key in features
            if type(features[key]).__name__ == "ClassLabel"
        }
        for number, row in enumerate(self.found, 1):
            words = {
                key: names[row[key]]
                for key, names in named.items()
                if row[key] is not None and row[key] >= 0
            }
            missing = {key: None for key in named if key not in words}  # −1 stands for no label
            yield f"row {number} of {self.name}", {**row, **missing, **words}


# ---------------------------------------------------------------------------------------------- by name
def read_rows(data: str | Path, encoding: str = "utf-8") -> dict[str, Rows]:
    """The rows of a file, a folder or `hf:name`: by split where there are any, else under "all"."""
    if str(data).startswith(HUGGING_FACE):
        return hugging_face(str(data).removeprefix(HUGGING_FACE))
    path = existing_path(data)
    if not path.is_dir():
        return {"all": open_rows(path, encoding)}
    return {
        split: ChainedRows([open_rows(file, encoding) for file in files])
        for split, files in files_by_split(path, READERS).items()
    }


def open_rows(path: Path, encoding: str) -> Rows:
    """The rows of a file, by its name."""
    if file_type(path) not in READERS:
        raise ValueError(
            f"{path} ends in {file_type(path)!r}: rows are read from {', '.join(READERS)}, each also as .xz or .gz"
        )
    if file_type(path) == ".parquet" and path.suffix.lower() != ".parquet":
        raise ValueError(
            f"{path}: a Parquet file is packed inside, and is not read from {path.suffix}"
        )
    return READERS[file_type(path)](path, encoding)


def hugging_face(name: str) -> dict[str, Rows]:
    """A data set by its name on the hub, `name#configuration` where it has several, or by its folder."""
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"to read hf:{name} the package datasets is needed: pip install 'regard[hf]'"
        ) from None
    try:
        found = loaded(datasets, name)
    except (
        Exception
    ) as error:  # it raises what pyarrow, the network, the disk and its own checks raise
        raise ValueError(f"hf:{name} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        return {"all": HuggingFaceRows(found, name)}
    known = {
        "train": "train",
        "validation": "valid",
        "valid": "valid",
        "dev": "valid",
        "test": "test",
    }
    if "train" not in found:
        raise ValueError(f"hf:{name} has no split 'train': there are {', '.join(found)}")
    return {
        known[key]: HuggingFaceRows(part, f"{name}[{key}]")
        for key, part in found.items()
        if key in known
    }


def loaded(datasets: Any, name: str) -> Any:
    """What `datasets` makes of a name: a folder that `save_to_disk` wrote, another folder, or a name on the hub."""
    if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(name)
    bare, _, configuration = name.partition("#")
    return datasets.load_dataset(bare, *([configuration] if configuration else []))


def get_column(row: Row, name: str, place: str) -> Any:
    """A value of a row; a column that is not there is an error with the nearest name."""
    if name not in row:
        raise ValueError(f"{place} has no column {name!r}: {did_you_mean(name, map(str, row))}")
    return row[name]


def is_missing(value: Any) -> bool:
    """Nothing, an empty text, or NaN, by which tables say the same."""
    return value is None or value == "" or value != value
