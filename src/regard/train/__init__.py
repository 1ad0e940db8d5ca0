"""Training: settings, the loop, and checkpoints that survive."""

from regard.train.checkpoint import Broken
from regard.train.group import Lost, joined
from regard.train.loop import Diverged, Interrupted, Result, Trainer
from regard.train.settings import Settings

__all__ = ["Broken", "Diverged", "Interrupted", "Lost", "Result", "Settings", "Trainer", "joined"]
