"""The activity graph: which endpoint follows which, and the steps that led to an alert."""

from __future__ import annotations

from typing import Any

from regard.watch.detector import Detector
from regard.watch.sequences import SequenceLevel

ARROW = " → "
LEAST_SHARE = 0.02  # of the steps from an endpoint that an edge must have


def activity_graph(detector: Detector | None, tenant: str, limit: int) -> dict[str, Any]:
    """The steps that a model has learned, between the endpoints that are called most.

    Returns:
        "nodes": {"name", "count"}, the most frequent first, and "edges": {"source", "target",
        "count", "share"}, where share is that of the steps from the source. Both are empty if there
        is no model, or if it has no level "sequence" of order 1 or more.
    """
    level = next(
        (each for each in (detector.levels if detector else ()) if isinstance(each, SequenceLevel)),
        None,
    )
    if level is None or level.transitions.order < 1:
        return {"nodes": [], "edges": []}
    vocabulary, model = level.vocabulary, level.transitions
    counts = {
        symbol: count
        for symbol, count in model.counts[0].items()
        if vocabulary.tenant(symbol) == tenant
    }
    kept = sorted(counts, key=lambda symbol: -counts[symbol])[:limit]
    edges = []
    for key, count in model.counts[1].items():
        source, target = divmod(key, model.symbols)
        share = count / model.totals[1][source]
        if source in kept and target in kept and source != target and share >= LEAST_SHARE:
            edges.append(
                {
                    "source": vocabulary.name(source),
                    "target": vocabulary.name(target),
                    "count": count,
                    "share": share,
                }
            )
    nodes = [{"name": vocabulary.name(each), "count": counts[each]} for each in kept]
    return {"nodes": nodes, "edges": sorted(edges, key=lambda edge: -edge["count"])}


def alert_path(content: dict[str, Any]) -> list[str]:
    """The endpoints that led to an alert, in order: those of its longest path finding."""
    paths = [
        finding["observed"].split(ARROW)
        for finding in content["findings"]
        if finding["kind"] == "path" and isinstance(finding["observed"], str)
    ]
    return max(paths, key=len, default=[content["endpoint"]])
