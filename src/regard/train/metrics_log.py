"""The metrics of a run: one JSON object per line."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from regard.json_files import PARTIAL_PREFIX
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
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self.tensorboard is not None:
            self.tensorboard.write(row)

    def truncate(self, step: int, evaluated: Collection[float] = ()) -> None:
        """Drop the rows after a step, and evaluations at steps other than `evaluated`: a resumed
        run writes them again."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            row
            for row in (read_metrics(self.path) if self.path.exists() else [])
            if row["step"] <= step and ("valid" not in row or row["step"] in evaluated)
        ]
        partial = self.path.with_name(
            f"{PARTIAL_PREFIX}{METRICS_FILE}"
        )  # survives a kill at any time
        partial.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        os.replace(partial, self.path)
        if self.tensorboard is not None:
            self.tensorboard.open(step)

    def close(self) -> None:
        """Close the TensorBoard files."""
        if self.tensorboard is not None:
            self.tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a metrics file; a truncated last line is dropped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def last_row(path: Path, window: int = 4096) -> dict[str, Any]:
    """The last complete row, read from the end of the file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - window))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            return dict(json.loads(line))
        except ValueError:
            continue
    return {}
