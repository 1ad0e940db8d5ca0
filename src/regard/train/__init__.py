"""Training: settings, the loop, and checkpoints that survive."""

from regard.json_files import CorruptFile
from regard.train.checkpoint import CheckpointWriteError
from regard.train.distributed import ProcessLost, init_distributed
from regard.train.settings import TrainSettings
from regard.train.trainer import Diverged, Interrupted, Trainer, TrainResult

__all__ = [
    "CorruptFile",
    "Diverged",
    "Interrupted",
    "ProcessLost",
    "TrainResult",
    "TrainSettings",
    "Trainer",
    "CheckpointWriteError",
    "init_distributed",
]
