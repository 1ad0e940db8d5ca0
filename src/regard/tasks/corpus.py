"""A corpus: the bytes of its three splits, mapped from where they lie.  A text of any size takes no memory."""

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

TEXT_SUFFIXES = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".log",
    ".tokens",
    ".raw",
    "",
)  # what counts as text in a folder
SHARE = 0.05  # of the bytes: what valid and test get, each, where they have no file of their own


def load_corpus(
    data: str | Path, *, text: str | None, encoding: str, raw: bool
) -> dict[str, np.ndarray]:
    """The bytes of "train", "valid" and "test".

    text       the column that holds it, where the data are rows; None: the data are plain text
    raw        the bytes as they are, whether they are text or not
    """
    if text is None and str(data).startswith(HUGGING_FACE):
        raise ValueError(f"{data} has rows: say which column holds the text, as text='text'")
    found = (
        _of_rows(data, text, encoding)
        if text is not None
        else _of_files(existing_path(data), None if raw else encoding)
    )
    for split, got in found.items():
        if not len(got):
            raise ValueError(
                f"{data} is empty" if split == "all" else f"{data}: the split {split!r} is empty"
            )
    return split_up(found)


def _of_files(path: Path, encoding: str | None) -> dict[str, np.ndarray]:
    files = files_by_split(path, TEXT_SUFFIXES) if path.is_dir() else {"all": [path]}
    return {split: load_bytes(each, encoding) for split, each in files.items()}


def _of_rows(data: str | Path, text: str, encoding: str) -> dict[str, np.ndarray]:
    return {split: _joined(rows, text) for split, rows in read_rows(data, encoding).items()}


def _joined(rows: Rows, text: str) -> np.ndarray:
    """The texts of rows, a line's end behind each."""
    store = ArrayBuilder(np.uint8)
    for place, row in rows:
        value = get_column(row, text, place)
        if not isinstance(value, str):
            raise ValueError(f"{place}: {text!r} must be text, not {value!r}")
        store.append(np.frombuffer(f"{value}\n".encode("utf-8", "replace"), np.uint8))
    return store.finish()


def split_up(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Three splits: those that are missing are cut from the end of the training text, between two characters."""
    rest = found["all"] if "all" in found else found["train"]
    whole, splits = (
        len(rest),
        {split: found[split] for split in ("valid", "test") if split in found},
    )
    for split in ("test", "valid"):
        if split not in splits:
            at = utf8_boundary(rest, len(rest) - max(1, round(SHARE * whole)))
            rest, splits[split] = rest[:at], rest[at:]
    return {"train": rest, "valid": splits["valid"], "test": splits["test"]}


def utf8_boundary(text: np.ndarray, at: int) -> int:
    """The nearest place before `at` where a character of UTF-8 begins; where the bytes are no UTF-8, `at` itself."""
    first = next(
        (place for place in range(at, max(at - 4, 0), -1) if text[place] & 0xC0 != 0x80), at
    )
    return max(first, 0)


# ---------------------------------------------------------------------------------------------- as tokens
def iter_texts(found: np.ndarray, where: str) -> Iterator[str]:
    """Bytes as text, a chunk at a time, cut behind the last line of each chunk where it has one."""
    left = ""
    for piece in decode_chunks(
        (found[at : at + CHUNK].tobytes() for at in range(0, len(found), CHUNK)), where
    ):
        whole, end, after = (left + piece).rpartition("\n")
        if whole or end:
            yield whole + end
        left = after
        if len(left) > CHUNK:
            yield left
            left = ""
    if left:
        yield left


def encode_corpus(found: np.ndarray, codec: Tokenizer, where: str) -> np.ndarray:
    """The tokens of a split (count), in the smallest kind of number; bytes stay where they are, one less than their tokens."""
    if isinstance(codec, ByteTokenizer):
        return found
    store = ArrayBuilder(codec.dtype)
    for text in iter_texts(found, where):
        store.append(codec.encode(text))
    return store.finish()
