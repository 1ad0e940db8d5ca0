"""Other mixers in the models that people already have: `swap`, `restore`, and `recover`, which wins back what was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard.swap.adapters import ADAPTERS, Adapter
from regard.swap.drift import Report
from regard.swap.files import load_swapped, open_model, save_swapped
from regard.swap.parts import Parts
from regard.swap.positions import extend_positions
from regard.swap.swapping import original, restore, sites_of, swap

if TYPE_CHECKING:
    from regard.swap.recovering import Recovered, recover

__all__ = [
    "ADAPTERS", "Adapter", "Parts", "Recovered", "Report", "extend_positions", "load_swapped", "open_model", "original",
    "recover", "restore", "save_swapped", "sites_of", "swap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Training is imported when it is asked for: it brings more than a swap needs."""
    if name in ("recover", "Recovered"):
        from regard.swap import recovering

        return getattr(recovering, name)
    raise AttributeError(f"module 'regard.swap' has no attribute {name!r}")
