"""Files as users have them: compressed or not, in any encoding, one or a folder of them; never more in memory than a chunk."""

from __future__ import annotations

import codecs
import gzip
import io
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

CHUNK = 1 << 20  # bytes that are read at a time
SMALL = 1 << 26  # bytes up to which numbers are held in memory; more stay in a file
COMPRESSED: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
NAMES = {
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


# ---------------------------------------------------------------------------------------------- names
def existing_path(path: str | Path) -> Path:
    """A path that is there; else an error with the nearest name in its folder."""
    path = Path(path).expanduser()
    if path.exists():
        return path
    if not path.parent.is_dir():
        raise ValueError(f"there is no {path}: there is no folder {path.parent}")
    beside = [other.name for other in path.parent.iterdir()]
    raise ValueError(
        f"there is no {path}: {did_you_mean(path.name, beside) if beside else 'its folder is empty'}"
    )


def file_type(path: Path) -> str:
    """What a file holds by its name, without what it is packed with: "a.csv.xz" -> ".csv"."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def split_from_name(path: Path) -> str | None:
    """ "payload_train.csv.xz" -> "train"; None where the name tells no split."""
    words = re.split(r"[._\- ]+", path.name.lower())
    return next((NAMES[word] for word in words if word in NAMES), None)


def files_by_split(folder: Path, kinds: Iterable[str]) -> dict[str, list[Path]]:
    """The files of a folder: by split where their names tell a training split, else all of them under "all"."""
    kinds = tuple(kinds)
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and file_type(path) in kinds and path.name[0] != "."
    )
    if not files:
        raise ValueError(
            f"there is no file in {folder} that ends in one of {', '.join(k for k in kinds if k)}"
        )
    found: dict[str, list[Path]] = {}
    for path in files:
        if (split := split_from_name(path)) is not None:
            found.setdefault(split, []).append(path)
    return found if "train" in found else {"all": files}


# ---------------------------------------------------------------------------------------------- bytes and text
@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked; one that was cut off is said to be so."""
    try:
        with COMPRESSED.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is no whole {path.suffix} file: {error}") from None


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a chunk at a time."""
    with open_bytes(path) as file:
        while chunk := file.read(CHUNK):
            yield chunk


@contextmanager
def open_text(path: Path, encoding: str = "utf-8") -> Iterator[IO[str]]:
    """A file as text, its lines as they are; what is not in the encoding is named by its place."""
    check_encoding(encoding)
    with open_bytes(path) as file:
        try:
            yield io.TextIOWrapper(
                file, encoding="utf-8-sig" if is_utf8(encoding) else encoding, newline=""
            )
        except UnicodeDecodeError:
            raise ValueError(wrong_byte(read_chunks(path), str(path), encoding)) from None


def decode_chunks(pieces: Iterable[bytes], where: str, encoding: str = "utf-8") -> Iterator[str]:
    """Bytes as text, a chunk at a time, whole characters each."""
    check_encoding(encoding)
    decoder = codecs.getincrementaldecoder("utf-8" if is_utf8(encoding) else encoding)()
    start, line, begun = 0, 1, False
    for piece in _ending(pieces):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            at = start - pending + error.start
            before = error.object[: error.start].count(b"\n")
            raise ValueError(
                _wrong(where, encoding, error.object[error.start], at, line + before, at == 0)
            ) from None
        yield text if begun else text.removeprefix("\ufeff")  # a mark of the byte order is no text
        start, line, begun = start + len(piece), line + text.count("\n"), begun or bool(text)


def _ending(pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield from pieces
    yield b""


def wrong_byte(pieces: Iterable[bytes], where: str, encoding: str) -> str:
    """Which byte is not in the encoding: its offset, and its line."""
    try:
        for _ in decode_chunks(pieces, where, encoding):
            pass
    except ValueError as error:
        return str(error)
    return f"{where} is not in {encoding}"


def _wrong(where: str, encoding: str, byte: int, at: int, line: int, first: bool) -> str:
    hint = (
        "it looks like UTF-16: give encoding='utf-16'"
        if first and byte in (0xFF, 0xFE)
        else "give its encoding=..."
    )
    return f"{where} is not in {encoding}: byte 0x{byte:02x} at offset {at}, in line {line}; {hint}"


def check_encoding(encoding: str) -> None:
    """A name that Python knows."""
    try:
        codecs.lookup(encoding)
    except LookupError:
        known = ("utf-8", "utf-16", "latin-1", "cp1252", "ascii", "shift_jis", "gb18030")
        raise ValueError(f"no encoding {encoding!r}: {did_you_mean(encoding, known)}") from None


def is_utf8(encoding: str) -> bool:
    """Whatever it is called."""
    check_encoding(encoding)
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


# ---------------------------------------------------------------------------------------------- many numbers
class ArrayBuilder:
    """Numbers that are appended one piece after the other.  They go into a file without a name, which ends with the process;
    few are read back into memory, many are mapped."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.count = np.dtype(dtype), 0
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as what is mapped from it

    def append(self, values: np.ndarray) -> None:
        """More of them."""
        self.file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.count += len(values)

    def finish(self) -> np.ndarray:
        """All of them (count)."""
        self.file.flush()
        if self.count * self.dtype.itemsize > SMALL:
            return np.memmap(self.file, dtype=self.dtype, mode="r", shape=(self.count,))
        self.file.seek(0)
        return np.frombuffer(self.file.read(), dtype=self.dtype)


def load_bytes(paths: list[Path], encoding: str | None) -> np.ndarray:
    """The bytes (count) of text files one after the other.  encoding None: the bytes as they are; else they become UTF-8.

    A single plain file is mapped where it lies; packed, several or in another encoding, they are copied into a `ArrayBuilder`.
    """
    if (
        len(paths) == 1
        and paths[0].suffix.lower() not in COMPRESSED
        and (encoding is None or is_utf8(encoding))
    ):
        found = (
            np.memmap(paths[0], dtype=np.uint8, mode="r")
            if paths[0].stat().st_size
            else np.zeros(0, np.uint8)
        )
        return (
            found[len(BOM) :]
            if encoding is not None and found[: len(BOM)].tobytes() == BOM
            else found
        )
    store = ArrayBuilder(np.uint8)
    for path in paths:
        for piece in (
            read_chunks(path)
            if encoding is None
            else decode_chunks(read_chunks(path), str(path), encoding)
        ):
            store.append(
                np.frombuffer(piece if isinstance(piece, bytes) else piece.encode(), np.uint8)
            )
    return store.finish()
