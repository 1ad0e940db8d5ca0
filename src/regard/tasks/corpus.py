"""A text corpus: the bytes of its three splits, memory-mapped, so that its size does not matter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from regard.tasks.files import (
    CHUNK,
    ArrayBuilder,
    decode_chunks,
    existing_path,
    files_by_split,
    load_bytes,
)
from regard.tasks.rows import HUGGING_FACE, Rows, get_column, read_rows
from regard.tasks.tokenizers import ByteTokenizer, Tokenizer

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".log", ".tokens", ".raw", "")
HELD_OUT = 0.05  # share of the bytes for each of valid and test, if they have no file


def load_corpus(
    data: str | Path, *, text: str | None, encoding: str, raw: bool
) -> dict[str, np.ndarray]:
    """The bytes of "train", "valid" and "test".

    Missing splits are cut from the end of the training text, between two characters.

    Args:
        data: A text file or a folder of them; with `text`, rows.
        text: The column that contains the text. None: the data is plain text.
        raw: Read bytes that may not be text.
    """
    if text is not None:
        splits = {s: _join_rows(rows, text) for s, rows in read_rows(data, encoding).items()}
    elif str(data).startswith(HUGGING_FACE):
        raise ValueError(f"{data} has rows: name the column of the text, for example text='text'.")
    else:
        path = existing_path(data)
        files = files_by_split(path, TEXT_SUFFIXES) if path.is_dir() else {"all": [path]}
        splits = {s: load_bytes(paths, None if raw else encoding) for s, paths in files.items()}
    for split, content in splits.items():
        if not len(content):
            where = data if split == "all" else f"The {split} split of {data}"
            raise ValueError(f"{where} is empty.")
    train = splits.pop("all") if "all" in splits else splits["train"]
    held_out = max(1, round(HELD_OUT * len(train)))
    for split in ("test", "valid"):
        if split not in splits:
            cut = utf8_boundary(train, len(train) - held_out)
            train, splits[split] = train[:cut], train[cut:]
    return {"train": train, "valid": splits["valid"], "test": splits["test"]}


def _join_rows(rows: Rows, column: str) -> np.ndarray:
    """The texts of a column, one per line."""
    builder = ArrayBuilder(np.uint8)
    for where, row in rows:
        value = get_column(row, column, where)
        if not isinstance(value, str):
            raise ValueError(f"{where}: {column!r} must be text, not {value!r}.")
        builder.append(np.frombuffer(f"{value}\n".encode("utf-8", "replace"), np.uint8))
    return builder.finish()


def utf8_boundary(text: np.ndarray, position: int) -> int:
    """The last start of a UTF-8 character up to `position`, or `position` for other bytes."""
    candidates = range(position, max(position - 4, 0), -1)
    return max(next((i for i in candidates if text[i] & 0xC0 != 0x80), position), 0)


def iter_texts(content: np.ndarray, where: str) -> Iterator[str]:
    """Decode bytes chunk by chunk, where possible up to the end of a line."""
    chunks = (content[at : at + CHUNK].tobytes() for at in range(0, len(content), CHUNK))
    rest = ""
    for text in decode_chunks(chunks, where):
        lines, newline, rest = (rest + text).rpartition("\n")
        if lines or newline:
            yield lines + newline
        if len(rest) > CHUNK:
            yield rest
            rest = ""
    if rest:
        yield rest


def encode_corpus(content: np.ndarray, tokenizer: Tokenizer, where: str) -> np.ndarray:
    """The tokens of a split (count); for bytes, the bytes themselves, which are the tokens - 1."""
    if isinstance(tokenizer, ByteTokenizer):
        return content
    builder = ArrayBuilder(tokenizer.dtype)
    for text in iter_texts(content, where):
        builder.append(tokenizer.encode(text))
    return builder.finish()
