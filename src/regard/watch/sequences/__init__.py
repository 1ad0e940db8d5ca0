"""Sequences of endpoints: the levels "sequence" and "path"."""

from regard.watch.sequences.level import SequenceLevel
from regard.watch.sequences.paths import PathLevel

__all__ = ["PathLevel", "SequenceLevel"]
