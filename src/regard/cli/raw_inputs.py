"""The inputs of `regard predict`: texts, rows or paths from options, files and standard input."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from regard.tasks.corpus import TEXT_SUFFIXES
from regard.tasks.files import existing_path, file_type, open_text
from regard.tasks.processors import Processor
from regard.tasks.rows import HUGGING_FACE, RowIterator, get_column, read_rows

STDIN = "-"


def read_inputs(
    processor: Processor,
    *,
    texts: Sequence[str] = (),
    sources: Sequence[str] = (),
    column: str | None = None,
    default_column: str = "text",
    encoding: str = "utf-8",
) -> Iterator[Any]:
    """Yield the raw inputs for a processor: rows if it has `columns`, paths if it has `suffixes`,
    else texts.

    Args:
        texts: Texts that are given as they are.
        sources: Files, folders, hf:name or "-" for standard input.
        column: The column of the text; standard input then has rows. None: standard input has one
            text per line.
        default_column: The column of the text in other rows, if `column` is None.
        encoding: Encoding of the files.
    """
    takes_texts = not processor.columns and not processor.suffixes
    if texts and not takes_texts:
        raise ValueError(f"--text gives texts, but this task reads {describe_inputs(processor)}.")
    if column is not None and not takes_texts:
        raise ValueError(
            f"--column is the column of a text, but this task reads {describe_inputs(processor)}."
        )
    yield from texts
    for source in sources:
        if processor.columns:
            for where, row in _read_rows(source, encoding):
                yield {name: get_column(row, name, where) for name in processor.columns}
        elif processor.suffixes:
            yield from _find_paths(source, processor.suffixes)
        else:
            yield from _read_texts(source, column, default_column, encoding)


def describe_inputs(processor: Processor) -> str:
    """What a processor reads, in words."""
    if processor.columns:
        return f"rows with the columns {', '.join(processor.columns)}"
    if processor.suffixes:
        return f"files that end in {', '.join(processor.suffixes)}"
    return "texts"


def input_columns(processor: Processor, raw: Any) -> dict[str, Any]:
    """A raw input as values by name: its columns, its path or its text."""
    if processor.columns:
        return {name: raw[name] for name in processor.columns}
    return {"path" if processor.suffixes else "text": str(raw)}


def _read_texts(
    source: str, column: str | None, default_column: str, encoding: str
) -> Iterator[str]:
    """The lines of a text file, or a column of rows."""
    if source == STDIN and column is None:
        yield from (line.rstrip("\r\n") for line in typer.get_text_stream("stdin"))
        return
    if source != STDIN and not source.startswith(HUGGING_FACE):
        path = existing_path(source)
        if path.is_file() and file_type(path) in TEXT_SUFFIXES:
            with open_text(path, encoding) as file:
                yield from (line.rstrip("\r\n") for line in file)
            return
    for where, row in _read_rows(source, encoding):
        value = get_column(row, column or default_column, where)
        yield "" if value is None else str(value)


def _read_rows(source: str, encoding: str) -> RowIterator:
    if source == STDIN:
        yield from _rows_of_stdin()
        return
    for rows in read_rows(source, encoding).values():
        yield from rows


def _rows_of_stdin() -> RowIterator:
    """JSON lines if the first line is an object, else CSV with a header."""
    text = typer.get_text_stream("stdin").read()
    if not text.lstrip().startswith("{"):
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        try:
            for row in reader:
                where = f"line {reader.line_num} of standard input"
                if None in row or None in row.values():
                    raise ValueError(f"{where} has another number of fields than the header.")
                yield where, row
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num} of standard input: {error}") from None
        return
    for number, line in enumerate(text.splitlines(), 1):
        where = f"line {number} of standard input"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be an object, not {type(row).__name__}.")
        yield where, row


def _find_paths(source: str, suffixes: Sequence[str]) -> Iterator[Path]:
    """A file, the files of a folder and its subfolders by name, or the paths on standard input."""
    if source == STDIN:
        for line in typer.get_text_stream("stdin"):
            if line.strip():
                yield existing_path(line.rstrip("\r\n"))
        return
    path = existing_path(source)
    if path.is_file():
        yield path
        return
    found = [each for each in sorted(path.rglob("*")) if each.suffix.lower() in suffixes]
    if not found:
        raise ValueError(f"There is no file in {path} that ends in one of {', '.join(suffixes)}.")
    yield from found
