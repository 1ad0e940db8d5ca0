"""Read CoNLL files: one word in a line, its label last, a blank line after each sentence."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from regard.tasks.files import (
    existing_path,
    file_type,
    files_by_split,
    open_text,
    split_from_name,
)
from regard.tasks.rows import HUGGING_FACE, READERS, RowIterator, Rows, read_rows

SUFFIXES = (".conll", ".iob", ".iob2", ".bio", ".bioes", ".txt", "")
DOCUMENT = "-DOCSTART-"
TOKENS, LABELS = "tokens", "labels"


def read_sentences(data: str | Path, encoding: str, tokens: str, labels: str) -> dict[str, Rows]:
    """Rows with the columns `tokens` and `labels`, of CoNLL files or of rows with lists."""
    if str(data).startswith(HUGGING_FACE):
        return read_rows(data, encoding)
    path = existing_path(data)
    if path.is_file():
        if file_type(path) in READERS:
            return read_rows(path, encoding)
        files = {"all": [path]}
    else:
        types = {file_type(file) for file in path.iterdir() if file.is_file()}
        if types & set(READERS) and not types & set(SUFFIXES[:-2]):
            return read_rows(path, encoding)
        files = files_by_split(path, SUFFIXES)
        _check_unread_files(path, files)

    def read_files(paths: list[Path]) -> RowIterator:
        for file in paths:
            for where, words, tags in _read_file(file, encoding):
                yield where, {tokens: words, labels: tags}

    return {split: Rows(partial(read_files, paths)) for split, paths in files.items()}


def _check_unread_files(folder: Path, files: dict[str, list[Path]]) -> None:
    """Refuse a folder with a file whose name is that of a missing split, but of another type."""
    for path in sorted(folder.iterdir()):
        split = split_from_name(path)
        is_file = path.is_file() and path.name[0] != "."
        if is_file and split is not None and split not in files and "train" in files:
            raise ValueError(
                f"{path} would not be read, although its name is that of the {split} split: let it "
                f"end in {SUFFIXES[0]}, or move it away."
            )


def _read_file(path: Path, encoding: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Where each sentence is, its words and labels.

    A line that starts with "#" is a comment unless it has as many columns as the others and its
    last is one of their labels: "#" is a word of tweets.
    """
    known: set[str] = set()
    columns, first = 0, 0
    for number, fields in _read_lines(path, encoding):
        if fields and not fields[0].startswith("#") and fields[0] != DOCUMENT:
            known.add(fields[-1])
            columns, first = columns or len(fields), first or number
    words: list[str] = []
    tags: list[str] = []
    start = 0
    for number, fields in _read_lines(path, encoding):
        if not fields or fields[0] == DOCUMENT:
            if words:
                yield f"the sentence at line {start} of {path}", words, tags
                words, tags = [], []
            continue
        if fields[0].startswith("#") and (len(fields) != columns or fields[-1] not in known):
            continue
        if len(fields) < 2:
            raise ValueError(
                f"line {number} of {path} has one column, {fields[0]!r:.60}: expected a word and "
                "its label, separated by a space or a tab."
            )
        if not fields[0].strip():
            raise ValueError(f"line {number} of {path} has a label, {fields[-1]!r}, but no word.")
        if len(fields) != columns:
            raise ValueError(
                f"line {number} of {path} has {len(fields)} columns, but line {first} has "
                f"{columns}."
            )
        start = number if not words else start
        words.append(fields[0])
        tags.append(fields[-1])
    if words:
        yield f"the sentence at line {start} of {path}", words, tags


def _read_lines(path: Path, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and columns, which tabs separate if there are any, else spaces."""
    with open_text(path, encoding) as file:
        for number, line in enumerate(file, 1):
            line = line.strip("\r\n ") if line.strip() else ""  # a blank line may contain tabs
            yield number, line.split("\t") if "\t" in line else [x for x in line.split(" ") if x]
