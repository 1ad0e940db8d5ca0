"""The metrics of a run for TensorBoard, beside metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAME = "tensorboard"  # the folder of its files


class TensorBoardWriter:
    """Event files in a folder of a run: every number of a row but the step is a curve over the steps."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "the setting tensorboard needs tensorboard: pip install regard[track]"
            ) from error
        self.make, self.folder = SummaryWriter, folder / NAME
        self.writer: Any = None

    def open(self, step: int) -> None:
        """Begin after a step; what was written of later ones is not shown any more."""
        self.writer = self.make(str(self.folder), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """One row of the log."""
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write what is not written yet."""
        if self.writer is not None:
            self.writer.close()
