"""Metrics, a JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from regard.train.tensorboard import TensorBoardWriter

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to a file in a folder; without a folder it forgets.

    board   hears the same
    """

    def __init__(self, folder: Path | None, board: TensorBoardWriter | None = None) -> None:
        self.path = None if folder is None else folder / METRICS_FILE
        self.board = board

    def write(self, row: dict[str, Any]) -> None:
        """One line."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self.board is not None:
            self.board.write(row)

    def cut(self, step: int, evaluated: Collection[float] = ()) -> None:
        """Forget what was written after a step, and evaluations at other steps than these: a resumed run writes it again.
        The folder is made if need be."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_metrics(self.path) if self.path.exists() else []
        good = [
            row
            for row in rows
            if row["step"] <= step and ("valid" not in row or row["step"] in evaluated)
        ]
        kept = [json.dumps(row) for row in good]
        beside = self.path.with_name(
            f".partial-{METRICS_FILE}"
        )  # a process that is killed here must not lose the rows
        beside.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")
        os.replace(beside, self.path)
        if self.board is not None:
            self.board.open(step)

    def close(self) -> None:
        """Nothing more comes."""
        if self.board is not None:
            self.board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last may have been cut off."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def last_row(path: Path, window: int = 4096) -> dict[str, Any]:
    """The last whole line that has one, read from the end of the file; nothing where there is none."""
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
