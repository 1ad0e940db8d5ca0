"""Read data files: compressed or not, in any encoding, single or in folders, chunk by chunk."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import lzma
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from regard.errors import did_you_mean

CHUNK = 1 << 20  # bytes read at a time
MAX_IN_MEMORY = 1 << 26  # bytes of an array; larger arrays are memory-mapped from a file
COMPRESSED: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
    "testing": "test",
}
BOM = codecs.BOM_UTF8


# ------------------------------------------------------------------------------------------- paths
def existing_path(path: str | Path) -> Path:
    """The path, if it exists; otherwise a ValueError with the most similar name in its folder."""
    path = Path(path).expanduser()
    if path.exists():
        return path
    if not path.parent.is_dir():
        raise ValueError(f"{path} does not exist: there is no folder {path.parent}.")
    siblings = [other.name for other in path.parent.iterdir()]
    hint = did_you_mean(path.name, siblings) if siblings else "its folder is empty."
    raise ValueError(f"{path} does not exist: {hint}")


def file_type(path: Path) -> str:
    """The suffix of a file without that of its compression: "a.csv.xz" -> ".csv"."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def split_from_name(path: Path) -> str | None:
    """The split in a file name: "payload_train.csv.xz" -> "train"; None if there is none."""
    words = re.split(r"[._\- ]+", path.name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def files_by_split(folder: Path, suffixes: Iterable[str]) -> dict[str, list[Path]]:
    """The files of a folder by split, or under "all" if no file name contains "train"."""
    suffixes = tuple(suffixes)
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and file_type(path) in suffixes and path.name[0] != "."
    )
    if not files:
        known = ", ".join(filter(None, suffixes))
        raise ValueError(f"There is no file in {folder} that ends in one of {known}.")
    splits: dict[str, list[Path]] = {}
    for path in files:
        if (split := split_from_name(path)) is not None:
            splits.setdefault(split, []).append(path)
    return splits if "train" in splits else {"all": files}


# ---------------------------------------------------------------------------------- bytes and text
@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed."""
    try:
        with COMPRESSED.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is not a complete {path.suffix} file: {error}") from None


def read_chunks(path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a file, chunk by chunk."""
    with open_bytes(path) as file:
        while chunk := file.read(CHUNK):
            yield chunk


@contextmanager
def open_text(path: Path, encoding: str = "utf-8", newline: str = "") -> Iterator[IO[str]]:
    """Open a file as text, with its line endings; decoding errors give the offset and the line.

    A line ends at "\\n", "\\r\\n" or "\\r"; with newline="\\n" only there, as `wc -l` counts.
    """
    codec = "utf-8-sig" if is_utf8(encoding) else encoding
    with open_bytes(path) as file:
        try:
            yield io.TextIOWrapper(file, encoding=codec, newline=newline)
        except UnicodeError as error:
            for _ in decode_chunks(read_chunks(path), str(path), encoding):
                pass  # raises an error with the position
            raise ValueError(f"{path} is not {encoding}: {error}") from None


def decode_chunks(chunks: Iterable[bytes], where: str, encoding: str = "utf-8") -> Iterator[str]:
    """Decode bytes to text chunk by chunk, without splitting characters."""
    decoder = codecs.getincrementaldecoder("utf-8" if is_utf8(encoding) else encoding)()
    offset, line, started = 0, 1, False
    for chunk in itertools.chain(chunks, [b""]):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            byte, at = error.object[error.start], offset - pending + error.start
            line += error.object[: error.start].count(b"\n")
            hint = "set encoding=... of the task, such as latin-1 or cp1252."
            if at == 0 and byte in (0xFF, 0xFE):
                hint = "it looks like UTF-16: set encoding='utf-16'."
            raise ValueError(
                f"{where} is not {encoding}: byte 0x{byte:02x} at offset {at}, line {line}; {hint}"
            ) from None
        except UnicodeError as error:  # UTF-16 without a byte-order mark has no position
            raise ValueError(f"{where} is not {encoding}: {error}") from None
        yield text if started else text.removeprefix("\ufeff")  # the byte-order mark
        offset, line, started = offset + len(chunk), line + text.count("\n"), started or bool(text)


def is_utf8(encoding: str) -> bool:
    """Whether an encoding is UTF-8; raises a ValueError for unknown encodings."""
    try:
        "".encode(encoding)  # not an encoding of bytes, such as base64
        codecs.getincrementaldecoder(encoding)
        return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
    except (LookupError, ValueError):  # ValueError: a name with NUL or half of a surrogate pair
        known = ("utf-8", "utf-16", "latin-1", "cp1252", "ascii", "shift_jis", "gb18030")
        raise ValueError(f"No encoding {encoding!r}: {did_you_mean(encoding, known)}") from None


# ------------------------------------------------------------------------------------------ arrays
class ArrayBuilder:
    """Builds a long array from pieces, in a temporary file.

    Small arrays are read back into memory; large ones are memory-mapped.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.count = np.dtype(dtype), 0
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the mapped array

    def append(self, values: np.ndarray) -> None:
        """Add a piece."""
        self.file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.count += len(values)

    def finish(self) -> np.ndarray:
        """The whole array (count)."""
        self.file.flush()
        if self.count * self.dtype.itemsize > MAX_IN_MEMORY:
            return np.memmap(self.file, dtype=self.dtype, mode="r", shape=(self.count,))
        self.file.seek(0)
        return np.frombuffer(self.file.read(), dtype=self.dtype)


def load_bytes(paths: list[Path], encoding: str | None) -> np.ndarray:
    """The concatenated bytes (count) of text files.

    A single uncompressed file is memory-mapped; otherwise the bytes are copied.

    Args:
        encoding: Encoding of the files, which are converted to UTF-8. None: raw bytes.
    """
    first = paths[0]
    keep_bytes = encoding is None or is_utf8(encoding)
    if len(paths) == 1 and first.suffix.lower() not in COMPRESSED and keep_bytes:
        if not first.stat().st_size:
            return np.zeros(0, np.uint8)
        mapped = np.memmap(first, dtype=np.uint8, mode="r")
        has_bom = encoding is not None and mapped[: len(BOM)].tobytes() == BOM
        return mapped[len(BOM) :] if has_bom else mapped
    builder = ArrayBuilder(np.uint8)
    for path in paths:
        chunks = read_chunks(path)
        if encoding is not None:
            chunks = (text.encode() for text in decode_chunks(chunks, str(path), encoding))
        for chunk in chunks:
            builder.append(np.frombuffer(chunk, np.uint8))
    return builder.finish()
