"""The inputs of `regard predict`: texts, rows or paths from options, files and standard input."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import typer

from regard.tasks.corpus import TEXT_SUFFIXES
from regard.tasks.files import existing_path, file_type, is_utf8, open_text
from regard.tasks.processors import Processor
from regard.tasks.row_splits import to_text
from regard.tasks.rows import (
    HUGGING_FACE,
    Row,
    RowReader,
    get_column,
    is_missing,
    parse_csv,
    parse_json_lines,
    read_rows,
)

STDIN = "-"
JSON_TYPES = (".jsonl", ".ndjson", ".json")  # whose rows may differ in their columns


@dataclass(frozen=True)
class RawInput:
    """An input, or why it cannot be read.

    Attributes:
        where: The place of the input, for error messages.
        raw: What the processor takes.
        row: All columns of the row that it comes from. None: it is a text or a path.
        error: The reason, with the place; empty if it could be read.
    """

    where: str
    raw: Any = None
    row: Row | None = None
    error: str = ""


def read_inputs(
    processor: Processor,
    *,
    texts: Sequence[str] = (),
    sources: Sequence[str] = (),
    column: str | None = None,
    default_column: str = "text",
    encoding: str = "utf-8",
) -> Iterator[RawInput]:
    """Yield the inputs for a processor: rows if it has `columns`, paths if it has `suffixes`, else
    texts. What cannot be read, an input or the rest of a source, is an input with an error.

    Args:
        texts: Texts that are given as they are.
        sources: Files, folders, hf:name or "-" for standard input.
        column: The column of the text; standard input then has rows. None: standard input has one
            text per line.
        default_column: The column of the text in other rows, if `column` is None.
        encoding: Encoding of the files and of standard input.
    """
    takes_texts = not processor.columns and not processor.suffixes
    if texts and not takes_texts:
        raise ValueError(f"--text gives texts, but this task reads {describe_inputs(processor)}.")
    if column is not None and not takes_texts:
        raise ValueError(
            f"--column is the column of a text, but this task reads {describe_inputs(processor)}."
        )
    for number, text in enumerate(texts, 1):
        yield RawInput(f"text {number}", text)
    for source in sources:
        try:
            if processor.columns:
                yield from _read_rows(source, encoding, processor.columns, lambda where, row: row)
            elif processor.suffixes:
                yield from _find_paths(source, processor.suffixes)
            else:
                yield from _read_texts(source, column, default_column, encoding)
        except ValueError as error:
            yield RawInput(source, error=str(error))


def describe_inputs(processor: Processor) -> str:
    """What a processor reads, in words."""
    if processor.columns:
        return f"rows with the columns {', '.join(processor.columns)}"
    if processor.suffixes:
        return f"files that end in {', '.join(processor.suffixes)}"
    return "texts"


# ------------------------------------------------------------------------------------------- rows
def _read_rows(
    source: str, encoding: str, columns: Sequence[str], to_raw: Callable[[str, Row], Any]
) -> Iterator[RawInput]:
    """The rows of a source. A table without one of the columns is a ValueError; of JSON, whose rows
    may differ, only the rows without it are inputs with an error."""
    if source == STDIN:
        with _open_stdin(encoding) as file:
            text = file.read()
        is_table = not text.lstrip().startswith("{")
        readers = [_parse_rows(text, is_table=is_table)]
    else:
        is_json = Path(source).is_dir() or file_type(Path(source)) in JSON_TYPES
        is_table = not is_json or source.startswith(HUGGING_FACE)
        readers = [rows.read() for rows in read_rows(source, encoding).values()]
    for where, row in itertools.chain.from_iterable(readers):
        if isinstance(row, ValueError):
            yield RawInput(where, error=str(row))
            continue
        try:
            for name in columns:
                get_column(row, name, where)
        except ValueError as error:
            if is_table:
                raise
            yield RawInput(where, row=row, error=str(error))
            continue
        try:
            item = RawInput(where, to_raw(where, row), row)
        except ValueError as error:
            item = RawInput(where, row=row, error=str(error))
        yield item


def _parse_rows(text: str, *, is_table: bool) -> RowReader:
    """The rows of standard input: CSV with a header, or JSON lines."""
    if is_table:
        return parse_csv(io.StringIO(text, newline=""), "standard input")
    return parse_json_lines(text.split("\n"), "standard input")


# ------------------------------------------------------------------------------------------ texts
def _read_texts(
    source: str, column: str | None, default_column: str, encoding: str
) -> Iterator[RawInput]:
    """The lines of a text file, or a column of rows."""
    if source == STDIN and column is None:
        with _open_stdin(encoding) as file:
            yield from _read_lines(file, "standard input")
        return
    if source != STDIN and not source.startswith(HUGGING_FACE):
        path = existing_path(source)
        if path.is_file() and file_type(path) in TEXT_SUFFIXES:
            with open_text(path, encoding, newline="\n") as file:
                yield from _read_lines(file, str(path))
            return
    name = column or default_column

    def to_raw(where: str, row: Row) -> str:
        return "" if is_missing(row[name]) else to_text(where, name, row[name])

    yield from _read_rows(source, encoding, [name], to_raw)


@contextmanager
def _open_stdin(encoding: str) -> Iterator[IO[str]]:
    """Standard input as text with its line endings, without a byte-order mark."""
    codec = "utf-8-sig" if is_utf8(encoding) else encoding
    stream = io.TextIOWrapper(typer.get_binary_stream("stdin"), encoding=codec, newline="\n")
    try:
        yield stream
    except UnicodeError as error:
        raise ValueError(f"standard input is not {encoding}: {error}") from None
    finally:
        stream.detach()


def _read_lines(file: IO[str], source: str) -> Iterator[RawInput]:
    for number, line in enumerate(file, 1):
        yield RawInput(f"line {number} of {source}", line.rstrip("\r\n"))


# ------------------------------------------------------------------------------------------ paths
def _find_paths(source: str, suffixes: Sequence[str]) -> Iterator[RawInput]:
    """A file, the files of a folder and its subfolders by name, or the paths on standard input."""
    if source == STDIN:
        for line in typer.get_text_stream("stdin"):
            if line.strip():
                yield _find_path(line.rstrip("\r\n"))
        return
    found = _find_path(source)
    if found.error or not found.raw.is_dir():
        yield found
        return
    paths = [each for each in sorted(found.raw.rglob("*")) if each.suffix.lower() in suffixes]
    if not paths:
        raise ValueError(f"There is no file in {source} that ends in one of {', '.join(suffixes)}.")
    yield from (RawInput(str(path), path) for path in paths)


def _find_path(name: str) -> RawInput:
    try:
        return RawInput(name, existing_path(name))
    except ValueError as error:
        return RawInput(name, Path(name), error=str(error))
