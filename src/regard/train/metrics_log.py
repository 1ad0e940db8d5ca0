"""The metrics of a run: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from regard.json_files import name_file, write_text
from regard.train.tensorboard import TensorBoardWriter

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends rows to metrics.jsonl and TensorBoard. Without a folder, it writes nothing."""

    def __init__(self, folder: Path | None, tensorboard: TensorBoardWriter | None = None) -> None:
        self.path = None if folder is None else folder / METRICS_FILE
        self.tensorboard = tensorboard

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        if self.path is not None:
            with name_file(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self.tensorboard is not None:
            self.tensorboard.write(row)

    def truncate(self, step: int, evaluated: Collection[float] = ()) -> int:
        """Drop the rows after a step, and evaluations at steps other than `evaluated`: a resumed
        run writes them again.

        Returns the number of damaged lines, which are dropped too. The last line does not count:
        it may be the one that a killed process was writing.
        """
        if self.path is None:
            return 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parsed = list(map(parse_row, read_lines(self.path) if self.path.exists() else ()))
        rows = [
            row
            for row in filter(None, parsed)
            if row["step"] <= step and ("valid" not in row or row["step"] in evaluated)
        ]
        # by renaming, which survives a kill at any time
        write_text(self.path, "".join(f"{json.dumps(row)}\n" for row in rows))
        if self.tensorboard is not None:
            self.tensorboard.open(step)
        return parsed[:-1].count({})

    def close(self) -> None:
        """Close the TensorBoard files."""
        if self.tensorboard is not None:
            self.tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file; lines that are truncated or damaged are left out."""
    return [row for row in map(parse_row, read_lines(path)) if row]


def read_lines(path: Path) -> list[str]:
    """The lines of a file; what is not UTF-8 is replaced."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def last_row(path: Path, window: int = 4096) -> dict[str, Any]:
    """The last complete row, read from the end of the file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - window))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return next(filter(None, map(parse_row, reversed(lines))), {})


def parse_row(line: str) -> dict[str, Any]:
    """The row of a line, or an empty one if it is not an object of numbers with a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return {}
    # False for NaN; larger integers do not fit a float
    numbers = (isinstance(value, int | float) and abs(value) < 1e300 for value in row.values())
    return row if all(numbers) else {}
