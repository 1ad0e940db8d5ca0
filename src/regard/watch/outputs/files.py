"""Alerts as lines of a file or of standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.watch.outputs.documents import FORMATS
from regard.watch.outputs.output import Output, OutputError


class FileOutput(Output):
    """Appends alerts to a file, one JSON document a line, flushed to the disk.

    A line that was cut off by a crash is ended first, so that the next alert has a line of its own.
    The file may be moved away at any time, by logrotate for example: a new one is begun.

    Args:
        path: The file; "-" is standard output.
        format: One of `FORMATS`.
    """

    def __init__(self, path: str, format: str) -> None:
        self.name = f"{format}:{path}"
        self.path, self.to_document = path, FORMATS[format]
        if path != "-" and Path(path).is_dir():
            raise ValueError(f"Output {self.name} is a folder: give the name of a file.")
        if path != "-" and not Path(path).absolute().parent.is_dir():
            raise ValueError(
                f"The folder of output {self.name} does not exist: create "
                f"{Path(path).absolute().parent} first."
            )

    def send(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        lines = b"".join(to_line(self.to_document(alert)) for alert in alerts)
        try:
            if self.path == "-":
                sys.stdout.buffer.write(lines)
                sys.stdout.buffer.flush()
                return
            with open(self.path, "ab+") as file:
                if file.tell() > 0:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"cannot write to {self.path}: {error.strerror or error}") from None


def to_line(document: Mapping[str, Any]) -> bytes:
    """A document as one line of JSON in UTF-8, with a line feed. Half surrogate pairs, which UTF-8
    lacks, are written as escapes."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n"
