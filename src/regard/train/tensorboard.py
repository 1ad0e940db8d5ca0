"""Write the metrics of a run for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = "tensorboard"


class TensorBoardWriter:
    """Writes event files into a subfolder of a run: one curve for every value of a metrics row
    except the step."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "tensorboard=True requires TensorBoard: pip install 'regard[track]'"
            ) from error
        self.create_writer, self.folder = SummaryWriter, folder / FOLDER
        self.writer: Any = None

    def open(self, step: int) -> None:
        """Start after a step; events of later steps, from an interrupted run, are hidden."""
        self.writer = self.create_writer(str(self.folder), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Add one row of metrics."""
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close the files."""
        if self.writer is not None:
            self.writer.close()
