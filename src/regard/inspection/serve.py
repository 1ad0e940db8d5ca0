"""`regard look --serve`: the page of a view, with a model behind it, on localhost only."""

from __future__ import annotations

from typing import Protocol

from regard.inspection.data import HeadEdit, InterventionData, TileData, ViewData


class Session(Protocol):
    """A model that the page can ask for more. Wrong questions raise ValueError, with the reason.

    Calls come from threads, one at a time.
    """

    def view(self) -> ViewData:
        """Return what the page shows at first; its `server` is True."""

    def tile(
        self,
        model: int,
        map: int,
        queries: tuple[int, int],
        keys: tuple[int, int],
        *,
        rows: int,
        columns: int,
    ) -> TileData:
        """Return a rectangle of a map, in at most `rows` x `columns` cells."""

    def intervene(self, model: int, edits: list[HeadEdit]) -> InterventionData:
        """Return the output of a model with some heads changed, beside the output without."""

    def look(self, texts: list[str]) -> ViewData:
        """Return a view of other texts, one for each text sequence; later calls are about it."""
