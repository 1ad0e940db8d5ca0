"""Series of numbers in windows of time: the level "series", and a model for any series."""

from regard.watch.series.level import SeriesLevel
from regard.watch.series.model import SeriesModel, SeriesScores

__all__ = ["SeriesLevel", "SeriesModel", "SeriesScores"]
