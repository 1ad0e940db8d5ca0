"""Training: settings, the trainer, checkpoints and distributed training."""

from regard.json_files import CorruptFile
from regard.train.checkpoint import CheckpointWriteError
from regard.train.distributed import ProcessLost, init_distributed
from regard.train.settings import TrainSettings
from regard.train.trainer import Diverged, Interrupted, Trainer, TrainResult

__all__ = [
    "CheckpointWriteError",
    "CorruptFile",
    "Diverged",
    "Interrupted",
    "ProcessLost",
    "TrainResult",
    "TrainSettings",
    "Trainer",
    "init_distributed",
]
