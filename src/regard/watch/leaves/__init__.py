"""The level "leaf": which value, type or key of an event is unusual. No network."""

from regard.watch.leaves.level import LeafLevel

__all__ = ["LeafLevel"]
