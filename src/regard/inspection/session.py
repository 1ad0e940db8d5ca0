"""A view with its models behind it: what the server of `regard look --serve` asks."""

from __future__ import annotations

from regard.inspection.data import HeadEdit, InterventionData, TileData, ViewData
from regard.inspection.inspected import InspectedModel
from regard.inspection.view import View

METRIC_EXAMPLES = 64  # test examples on which an intervention is evaluated, for a run


class ViewSession:
    """See `regard.inspection.serve.Session`.

    Args:
        view: The view at first.
        metric_examples: Test examples for the metric of an intervention, of a run whose data are
            there; 0: no metric.
    """

    def __init__(self, view: View, *, metric_examples: int = METRIC_EXAMPLES) -> None:
        self._view, self.metric_examples = view, metric_examples

    def view(self) -> ViewData:
        """What the page shows."""
        return {**self._view.data(), "server": True}

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
        """A rectangle of a map."""
        return self._view.tile(model, map, queries, keys, rows=rows, columns=columns)

    def intervene(self, model: int, edits: list[HeadEdit]) -> InterventionData:
        """The output of a model with some heads changed, beside the output without; of a run also
        the metric, if its data are there."""
        if not 0 <= model < len(self._view.models):
            raise ValueError(f"There is no model {model}: there are {len(self._view.models)}.")
        subject, examples = self._view.models[model].subject, self.metric_examples
        if examples and subject.run is not None:
            try:
                subject.task()
            except ValueError:  # its data are elsewhere
                examples = 0
        return self._view.intervene(
            model, edits, examples=examples if subject.run is not None else 0
        )

    def look(self, texts: list[str]) -> ViewData:
        """A view of another text. A model with a source and a target takes two; it writes the
        target itself if there is one text, or the second is empty."""
        models = []
        for inspected in self._view.models:
            encode = inspected.subject.encode
            if encode is None:
                raise ValueError("This view is not of a text, so there is no other to look at.")
            has_target = inspected.subject.is_seq2seq and len(texts) == 2 and texts[1].strip()
            given = (texts[0], texts[1]) if has_target else texts[0]
            models.append(InspectedModel(encode(given), inspected.kept))
        self._view = View(models)
        return self.view()
