"""Files, plain or compressed, and folders of files, which may grow."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import stat
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep, time
from typing import BinaryIO, NamedTuple, cast

from regard.watch.sources.framing import (
    DOCUMENT_START,
    HEAD,
    LineSplitter,
    Part,
    Splitter,
    is_document,
)
from regard.watch.sources.json_splitter import JsonSplitter
from regard.watch.sources.pending import PendingRecords
from regard.watch.sources.positions import FilePosition, PositionStore
from regard.watch.sources.source import Record, Source, SourceError

CHUNK = 1 << 17  # bytes read at once
FINGERPRINT = 1_024  # first bytes of a file that identify it beside its inode
POLL_SECONDS = 0.25  # between two looks for new bytes
MAX_OPEN = 64  # files held open, so that they are read to their end even if they are deleted
INCOMPLETE_SECONDS = 10.0  # how long a compressed file that ends too early may be incomplete
DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
ROTATED = re.compile(r"([.-]\d+)*(\.(gz|xz))?$")  # what rotation appends to a name


class FoundFile(NamedTuple):
    """A file that was found in a folder; `key` is its device and inode."""

    modified: int
    path: Path
    key: str
    size: int


class FileReader:
    """Reads one file from a position.

    Args:
        path: Path of the file.
        label: Its name in ids of records.
        offset: Bytes that were read before.
        number: Lines or elements that were read before.
        max_bytes: Longest line.
        follow: Whether the file may grow, so that its last line waits for its end.
    """

    def __init__(
        self, path: Path, label: str, offset: int, number: int, max_bytes: int, follow: bool
    ) -> None:
        self.label = label
        self.offset, self.number = offset, number
        self.max_bytes = max_bytes
        self.file, compressed = open_bytes(path)
        self.follow = follow and not compressed
        self.splitter: Splitter | None = None
        self.head = b""
        self.done_elements = 0  # of a document that is read again from its beginning
        self.parts: deque[Part] = deque()
        self.ended = False
        self.damage = ""

    def read(self, limit: int) -> list[tuple[Record, int, int]]:
        """The next records, each with the offset and the number after it. Fewer than `limit` if
        there is nothing more now."""
        while len(self.parts) < limit and self._read_chunk():
            pass
        taken: list[tuple[Record, int, int]] = []
        while self.parts and len(taken) < limit:
            part = self.parts.popleft()
            self.offset += part.size
            self.number += 1
            record = Record(part.data, f"{self.label}:{self.number}", part.problem)
            taken.append((record, self.offset, self.number))
        return taken

    def give_up(self) -> None:
        """End a damaged file with a record that says why it cannot be read further."""
        self.parts.append(Part(b"", f"the file cannot be read further: {self.damage}"))
        self.damage, self.ended = "", True

    def _read_chunk(self) -> bool:
        """Read and split the next bytes; False if there are none now."""
        if self.ended or self.damage:
            return False
        try:
            if self.splitter is None and not self._start():
                return False
            assert self.splitter is not None
            chunk = self.file.read(CHUNK)
        except (*DAMAGED, OSError) as error:
            self.damage = str(error) or type(error).__name__
            return False
        if chunk:
            self._add(self.splitter.feed(chunk))
        elif not self.follow:
            self._add(self.splitter.finish())
            self.ended = True
        return bool(chunk)

    def _start(self) -> bool:
        """Choose how to cut the file by its first bytes, and go to the position. In a file that may
        grow, False until there is a whole line."""
        self.file.seek(0)
        head = self.file.read(HEAD)
        on_one_line = DOCUMENT_START.match(head) is not None
        whole = b"\n" in head or len(head) == HEAD
        if self.follow and not whole and not on_one_line:
            return False
        self.head = head[:FINGERPRINT]
        if is_document(head) or (on_one_line and not whole):
            self.splitter = JsonSplitter(self.max_bytes)
            self.done_elements, self.number = self.number, 0
            self.file.seek(0)
        else:
            self.splitter = LineSplitter(self.max_bytes)
            self.file.seek(self.offset)
        return True

    def _add(self, parts: list[Part]) -> None:
        """Add parts, but not the elements of a document that were read before."""
        skipped = min(self.done_elements, len(parts))
        self.done_elements -= skipped
        self.number += skipped
        self.parts.extend(parts[skipped:])


@dataclass
class TrackedFile:
    """A file of a `FilesSource`.

    Attributes:
        position: What is acknowledged, and what the file is known by.
        offset: Bytes that were read.
        number: Lines or elements that were read.
        size: Its size when it was last found; -1 before.
        reader: Reads it, while it is open.
        damaged_since: When a compressed file was found to end too early.
        complete: Whether it will not grow, as far as one can tell.
    """

    position: FilePosition
    offset: int
    number: int
    size: int = -1
    reader: FileReader | None = None
    damaged_since: float | None = None
    complete: bool = False

    def close(self) -> None:
        """Close the reader. What it has split but not returned is read again."""
        if self.reader is not None:
            self.reader.file.close()
        self.reader = None


class FilesSource(Source):
    """The lines, or elements of JSON documents, of a file or of the files in a folder.

    Files are read in the order of their modification, the oldest first. A file is known by its
    inode and its first bytes: it is read on after it was renamed, after it was compressed by
    rotation, and when the process starts again with the same `state`; it is read from its beginning
    after it was truncated or replaced. Hidden files are left out.

    Args:
        path: A file, or a folder with all beneath it.
        max_bytes: Longest line.
        follow: Whether to wait for more at the end.
        state: Folder for the positions; None: every start is at the beginning.
        replay: Read files again from their beginning that were modified in the last so many
            seconds.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        *,
        follow: bool = False,
        state: Path | None = None,
        replay: float | None = None,
    ) -> None:
        self.path = path
        self.name = show_path(path)
        self.max_bytes = max_bytes
        self.follow = follow
        self.is_folder = path.is_dir()
        if not path.exists() and not (follow and path.parent.is_dir()):
            raise SourceError(f"There is no file or folder {self.name}")
        if path.is_file():
            check_readable(path)
        self.replay_from = None if replay is None else time() - replay
        self.store = PositionStore(state)
        self.files = {
            key: TrackedFile(position, position.offset, position.number)
            for key, position in self.store.load().items()
        }
        self.pending: PendingRecords[str, tuple[int, int]] = PendingRecords()
        self.ready: dict[str, None] = {}  # keys of files that may have more, in order
        self.open: dict[str, None] = {}  # keys of files with a reader, the last used at the end
        self.next_scan = 0.0
        self.scanned = False

    @property
    def exhausted(self) -> bool:
        """Whether all files were read; never, if they are followed."""
        return not self.follow and self.scanned and not self.ready

    def read(self, max_events: int, timeout: float) -> list[Record]:
        """The next records."""
        deadline = monotonic() + timeout
        while True:
            if monotonic() >= self.next_scan and (self.follow or not self.scanned):
                self._scan()
            records: list[Record] = []
            for key in list(self.ready):
                records += self._read_file(key, max_events - len(records))
                if len(records) >= max_events:
                    break
            wait = min(POLL_SECONDS, deadline - monotonic())
            if records or self.exhausted or wait <= 0:
                return records
            sleep(wait)

    def acknowledge(self, ids: Iterable[str]) -> None:
        """Store how far the files are done."""
        moved = []
        for key, (offset, number) in self.pending.acknowledge(ids).items():
            position = self.files[key].position
            position.offset, position.number, position.seen = offset, number, time()
            moved.append(position)
        if moved:
            self.store.save(moved)

    def close(self) -> None:
        """Close the files and the database of positions."""
        for key in self.open:
            self.files[key].close()
        self.store.close()

    def lag(self) -> int | None:
        """Bytes of the files that were found and not read, without decompression."""
        return sum(max(0, self.files[key].size - self.files[key].offset) for key in self.ready)

    # ---------------------------------------------------------------------------- finding files
    def _find_files(self) -> list[FoundFile]:
        """All files that may be read, the oldest first."""
        if self.is_folder:
            paths = [path for path in self.path.rglob("*") if not is_hidden(path, self.path)]
        elif self.follow:  # rotation renames the file, perhaps before its end was read
            stem = ROTATED.sub("", self.path.name)
            siblings = self.path.parent.iterdir()
            paths = [path for path in siblings if ROTATED.sub("", path.name) == stem]
        else:
            paths = [self.path]
        found = []
        for path in paths:
            try:
                status = path.stat()
            except OSError:
                continue  # deleted since it was listed
            if stat.S_ISREG(status.st_mode):
                key = f"{status.st_dev}:{status.st_ino}"
                found.append(FoundFile(status.st_mtime_ns, path, key, status.st_size))
        return sorted(found)

    def _scan(self) -> None:
        """Look for files that are new, have grown, were replaced or are gone."""
        started = monotonic()
        found = self._find_files()
        for file in found:
            known = self.files.get(file.key)
            if known is not None and known.size == file.size:
                known.position.path = str(file.path)
                since = known.damaged_since
                if since is not None and monotonic() - since > INCOMPLETE_SECONDS:
                    known.damaged_since, known.complete = None, True
                    self.ready[file.key] = None
                continue
            try:
                if known is None or not self._is_same(file, known):
                    known = self._track(file)
                elif known.size < 0 and self._is_replayed(file):
                    known.offset = known.number = 0
            except OSError:
                known = self._track_unreadable(file)
            if known is not None:
                known.size, known.damaged_since = file.size, None
                self.ready[file.key] = None
        for key in self.open.keys() - {file.key for file in found}:
            reader = self.files[key].reader
            if reader is not None:  # deleted: what was written is read, and no more will come
                reader.follow = False
                self.files[key].complete = True
                self.ready[key] = None
        self.scanned = True
        self.next_scan = monotonic() + max(POLL_SECONDS, 10 * (monotonic() - started))

    def _is_replayed(self, file: FoundFile) -> bool:
        return self.replay_from is not None and file.modified / 1e9 >= self.replay_from

    def _is_same(self, file: FoundFile, known: TrackedFile) -> bool:
        """Whether a file is the one that had this inode before, neither new nor truncated."""
        position = known.position
        position.path = str(file.path)
        if file.size < known.offset and not is_compressed(file.path):
            return False
        return fingerprint(file.path, position.head_size) == position.head

    def _track(self, file: FoundFile) -> TrackedFile | None:
        """Track a file that is new, or whose inode belonged to another one. None for a file beside
        the one that is followed that is no part of it."""
        original = self._find_original(file)
        if original is not None:
            position = replace(original, key=file.key, path=str(file.path))
        elif self.is_folder or file.path == self.path:
            position = self._new_position(file)
        else:
            return None
        return self._add_file(position)

    def _track_unreadable(self, file: FoundFile) -> TrackedFile:
        """Track a file that cannot be opened, which is reported when it is read."""
        known = self.files.get(file.key)
        return self._add_file(self._new_position(file)) if known is None else known

    def _new_position(self, file: FoundFile) -> FilePosition:
        label = self.store.new_label(show_path(file.path))
        return FilePosition(file.key, str(file.path.parent), str(file.path), label)

    def _add_file(self, position: FilePosition) -> TrackedFile:
        """Track a file from a position, instead of what had this key before."""
        key = position.key
        if key in self.files:
            self.files[key].close()
            self.open.pop(key, None)
            self.pending.drop(key)
        position.seen = time()
        self.store.save([position])
        self.files[key] = TrackedFile(position, position.offset, position.number)
        return self.files[key]

    def _find_original(self, file: FoundFile) -> FilePosition | None:
        """The position of the file that a compressed file is a copy of, as rotation makes it."""
        if not is_compressed(file.path):
            return None
        stem = ROTATED.sub("", file.path.name)
        for known in self.files.values():
            position = known.position
            if (
                position.key != file.key
                and position.head_size > 0
                and position.folder == str(file.path.parent)
                and ROTATED.sub("", Path(position.path).name) == stem
                and fingerprint(file.path, position.head_size) == position.head
            ):
                return replace(position, offset=known.offset, number=known.number)
        return None

    # ---------------------------------------------------------------------------- reading files
    def _read_file(self, key: str, limit: int) -> list[Record]:
        """The next records of a file. At its end, it is not ready any more."""
        known = self.files[key]
        position = known.position
        if known.reader is None:
            path, follow = Path(position.path), self.follow and not known.complete
            try:
                known.reader = FileReader(
                    path, position.label, known.offset, known.number, self.max_bytes, follow
                )
            except OSError as error:
                del self.ready[key]
                problem = f"the file cannot be opened: {error.strerror}"
                return [Record(b"", f"{position.label}:0", problem)]
        reader = known.reader
        self.open.pop(key, None)
        self.open[key] = None

        taken = reader.read(limit)
        if reader.damage and (known.complete or not self.follow):
            reader.give_up()
            taken += reader.read(limit - len(taken))
        for record, offset, number in taken:
            self.pending.add(key, record.id, (offset, number))
        known.offset, known.number = reader.offset, reader.number
        if len(reader.head) > position.head_size:
            position.head = hashlib.sha256(reader.head).hexdigest()
            position.head_size = len(reader.head)

        if reader.parts or (len(taken) == limit and not reader.ended):
            return [record for record, _, _ in taken]
        del self.ready[key]
        if reader.damage:  # perhaps it is still being written
            known.damaged_since = monotonic()
        if reader.damage or reader.ended:
            known.close()
            del self.open[key]
        elif len(self.open) > MAX_OPEN:
            oldest = next(other for other in self.open if other not in self.ready)
            self.files[oldest].close()
            del self.open[oldest]
        return [record for record, _, _ in taken]


def open_bytes(path: Path) -> tuple[BinaryIO, bool]:
    """Open a file, and whether it is compressed by gzip or xz, which its first bytes tell."""
    file = path.open("rb")
    magic = file.read(6)
    if magic[:2] != b"\x1f\x8b" and magic != b"\xfd7zXZ\x00":
        file.seek(0)
        return file, False
    file.close()
    kind = gzip.GzipFile if magic[:1] == b"\x1f" else lzma.LZMAFile
    return cast(BinaryIO, kind(path)), True


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed by gzip or xz."""
    file, compressed = open_bytes(path)
    file.close()
    return compressed


def fingerprint(path: Path, size: int) -> str:
    """Hash of the first bytes of a file, after decompression; "" for no bytes."""
    if size == 0:
        return ""
    file, _ = open_bytes(path)
    with file:
        try:
            head = file.read(size)
        except DAMAGED:
            head = b""
    return hashlib.sha256(head).hexdigest()


def is_hidden(path: Path, folder: Path) -> bool:
    """Whether a file, or a folder that it is in, has a name that starts with a dot."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def check_readable(path: Path) -> None:
    """Raise `SourceError` if a file cannot be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise SourceError(f"Cannot read {show_path(path)}: {error.strerror}") from None


def show_path(path: Path) -> str:
    """A path as text; bytes that are no UTF-8 are escaped."""
    return str(path).encode(errors="surrogateescape").decode(errors="backslashreplace")
