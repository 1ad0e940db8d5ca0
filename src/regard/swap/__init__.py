"""Other mixers in the models that people already have: `swap`, `restore`, and `recover`, which wins back what was lost."""

from regard.swap.adapters import ADAPTERS, Adapter
from regard.swap.drift import Report
from regard.swap.parts import Parts
from regard.swap.swapping import original, restore, sites_of, swap

__all__ = ["ADAPTERS", "Adapter", "Parts", "Report", "original", "restore", "sites_of", "swap"]
