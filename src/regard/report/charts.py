"""The plots, as Vega-Lite by Altair: score against cost, learning curves, growth with the length."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from regard.compare import ResultRow
from regard.report.curves import Curve
from regard.report.labels import GAP, LIMIT, Axis, axis, place_labels
from regard.report.styles import SeriesStyle

HEIGHT = 260
WIDE = 5.0  # a ratio of largest to smallest from which an axis is logarithmic
Chart = dict[str, Any]


class CostAxis(NamedTuple):
    """What a score is set against; `more` of it is better, or less."""

    words: str
    of: Callable[[ResultRow], float]
    more: bool


SPEED = CostAxis("tokens trained on in a second", lambda row: row.speed, True)
MEMORY = CostAxis("peak memory of training in MB", lambda row: row.memory / 1e6, False)
TIME = CostAxis("milliseconds for a step", lambda row: 1e3 * row.seconds / row.steps, False)


def goodness(metric: str) -> str:
    """The title of an axis of scores."""
    return (
        "accuracy on the test split"
        if metric == "accuracy"
        else f"{metric} on the test split, less is better"
    )


# ---------------------------------------------------------------------------------------------- score against cost
def pareto_front(rows: Sequence[ResultRow], cost: CostAxis) -> list[ResultRow]:
    """The rows that no other beats in both score and cost, from the least cost up."""
    sign = 1 if rows and rows[0].metric == "accuracy" else -1
    cheap = sorted(
        rows, key=lambda row: ((-1 if cost.more else 1) * cost.of(row), -sign * row.score)
    )
    kept: list[ResultRow] = []
    for row in cheap:
        if not kept or sign * row.score > sign * kept[-1].score:
            kept.append(row)
    return kept


def pareto(rows: Sequence[ResultRow], cost: CostAxis, look: dict[str, SeriesStyle]) -> Chart:
    """A point for each mechanism, with its name and its spread over seeds, and the line of those that none beats."""
    alt = altair()
    across, up = _axes(rows, cost)
    x = alt.X(
        "x:Q",
        title=cost.words,
        scale=_scale(across),
        axis=alt.Axis(tickCount=4, format="~s", labelFlush=True),
    )
    y = alt.Y("y:Q", title=goodness(rows[0].metric), scale=_scale(up), axis=alt.Axis(tickCount=6))
    data = _points(rows, cost, across, up)
    base = alt.Chart(alt.Data(values=data)).encode(x=x, y=y)
    best = [{"x": cost.of(row), "y": row.score} for row in pareto_front(rows, cost)]
    line = alt.Chart(alt.Data(values=best)).mark_line(
        interpolate="step-before" if cost.more else "step-after",
        color="#808080",
        strokeDash=[4, 3],
        strokeWidth=1.2,
    )
    tips = [alt.Tooltip(f"{name}:N") for name in ("mechanism", "score", "cost")]
    points = base.mark_point(filled=True, size=90, opacity=1).encode(
        **_marks(look, dash=False), tooltip=tips
    )
    layers = [
        line.encode(x=x, y=y),
        base.mark_rule(opacity=0.5).encode(y="low:Q", y2="high:Q", **_marks(look, shape=False)),
    ]
    layers += [base.mark_rule(opacity=0.6, strokeWidth=0.8).encode(y2="label:Q"), points]
    for side, align, dx in ((True, "right", -GAP), (False, "left", GAP)):
        names = base.transform_filter(f"datum.left === {str(side).lower()}")
        layers += _names(names.encode(y="label:Q"), align=align, dx=dx, limit=LIMIT)
    return _finished(
        alt.layer(*layers),
        f"{goodness(rows[0].metric)} against {cost.words}, a point for each mechanism",
    )


def _axes(rows: Sequence[ResultRow], cost: CostAxis) -> tuple[Axis, Axis]:
    costs = [cost.of(row) for row in rows]
    ends = [end for row in rows for end in _ends(row)]
    log = min(costs) > 0 and max(costs) / min(costs) > WIDE
    return axis(costs, margin=0.15, log=log), axis(
        ends, margin=0.12, down=rows[0].metric != "accuracy"
    )


def _ends(row: ResultRow) -> tuple[float, float]:
    """The score less and plus its spread."""
    spread = row.spread if len(row.scores) > 1 else 0.0
    return row.score - spread, row.score + spread


def _points(
    rows: Sequence[ResultRow], cost: CostAxis, across: Axis, up: Axis
) -> list[dict[str, Any]]:
    names = place_labels(
        [(across.share(cost.of(row)), up.share(row.score), row.mixer) for row in rows]
    )
    return [
        {
            "x": cost.of(row),
            "y": row.score,
            "low": _ends(row)[0],
            "high": _ends(row)[1],
            "label": up.at(name.share),
            "left": name.left,
            "mechanism": row.mixer,
            "cost": f"{cost.of(row):,.4g} {cost.words}",
            "score": f"{row.score:.4g} {row.metric}"
            + (f" ± {row.spread:.2g}" if len(row.scores) > 1 else ""),
        }
        for row, name in zip(rows, names, strict=True)
    ]


# ---------------------------------------------------------------------------------------------- lines
def learning(
    curves: Sequence[Curve],
    by: str,
    metric: str,
    look: dict[str, SeriesStyle],
    constant: float | None,
) -> Chart:
    """Validation score by "step" or by "seconds": the mean over seeds, and a band from the worst seed to the best."""
    alt = altair()
    data = [{"mechanism": c.mixer, **p._asdict()} for c in curves for p in c.points]
    values = [p[name] for p in data for name in ("low", "high")] + (
        [] if constant is None else [constant]
    )
    title = "accuracy" if metric == "accuracy" else f"{metric}, less is better"
    scale = _scale(axis(values, margin=0.1, down=metric != "accuracy"))
    y, low = (
        alt.Y(f"{name}:Q", title=f"validation {title}", scale=scale, axis=alt.Axis(tickCount=6))
        for name in ("score", "low")
    )
    base = alt.Chart(alt.Data(values=data)).encode(
        x=alt.X(f"{by}:Q", title=by, axis=alt.Axis(tickCount=5))
    )
    tips = [
        alt.Tooltip("mechanism:N"),
        alt.Tooltip("step:Q"),
        alt.Tooltip("seconds:Q", format=".1f"),
    ]
    tips += [alt.Tooltip(f"{name}:Q", format=".3f") for name in ("score", "low", "high")]
    layers = [
        base.mark_area(opacity=0.16).encode(
            y=low, y2="high:Q", **_marks(look, shape=False, dash=False)
        ),
        base.mark_line(strokeWidth=1.8).encode(y=y, **_marks(look, shape=False)),
        base.mark_point(filled=True, size=32, opacity=1).encode(
            y=y, **_marks(look, dash=False), tooltip=tips
        ),
    ]
    if constant is not None:
        level = alt.Chart(
            alt.Data(values=[{"score": constant, "mechanism": "a constant answer"}])
        ).encode(y=y)
        layers += [
            level.mark_rule(strokeDash=[2, 3], color="#808080").encode(tooltip="mechanism:N")
        ]
        layers += _names(
            level.encode(x=alt.value("width")), align="right", dy=9, dx=-3, fontSize=10
        )
    return _finished(alt.layer(*layers), f"validation {title} by {by}, a line for each mechanism")


def growth(
    points: Sequence[tuple[str, int, float]], words: str, look: dict[str, SeriesStyle]
) -> Chart:
    """Points (mechanism, length, cost), both axes logarithmic: a straight line is a power, and its slope the exponent."""
    alt = altair()
    above = [point for point in points if point[2] > 0]
    data = [dict(zip(("mechanism", "length", "cost"), point, strict=True)) for point in above]
    lengths, costs = sorted({length for _, length, _ in points}), [cost for *_, cost in above]
    ticks = alt.Axis(values=lengths, format=",d", labelFlush=False)
    x = alt.X(
        "length:Q", title="tokens", scale=_scale(axis(lengths, margin=0.08, log=True)), axis=ticks
    )
    y = alt.Y(
        "cost:Q",
        title=words,
        scale=_scale(axis(costs, margin=0.08, log=True)),
        axis=alt.Axis(tickCount=4),
    )
    base = alt.Chart(alt.Data(values=data)).encode(x=x, y=y)
    tips = [
        alt.Tooltip("mechanism:N"),
        alt.Tooltip("length:Q"),
        alt.Tooltip("cost:Q", format=",.3g", title=words),
    ]
    line = base.mark_line(strokeWidth=1.8).encode(**_marks(look, shape=False))
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        **_marks(look, dash=False), tooltip=tips
    )
    return _finished(
        alt.layer(line, points),
        f"{words} against length, both logarithmic, a line for each mechanism",
    )


# ---------------------------------------------------------------------------------------------- what they share
def altair() -> Any:
    """The package: it is loaded when a plot is made, and may be missing until then."""
    return importlib.import_module("altair")


def _scale(along: Axis) -> Any:
    alt = altair()
    domain = [along.low, along.high]
    if along.log:
        return alt.Scale(type="log", domain=domain, nice=False, reverse=along.down)
    return alt.Scale(domain=domain, nice=False, zero=False, reverse=along.down)


def _marks(
    look: dict[str, SeriesStyle], *, shape: bool = True, dash: bool = True
) -> dict[str, Any]:
    """The channels that tell mechanisms apart."""
    alt = altair()
    names = list(look)
    channels: dict[str, Any] = {
        "color": alt.Color(
            "mechanism:N", scale=_of(names, [x.colour for x in look.values()]), legend=None
        )
    }
    if shape:
        channels["shape"] = alt.Shape(
            "mechanism:N", scale=_of(names, [x.shape for x in look.values()]), legend=None
        )
    if dash:
        channels["strokeDash"] = alt.StrokeDash(
            "mechanism:N", scale=_of(names, [list(x.dash) for x in look.values()]), legend=None
        )
    return channels


def _names(base: Any, **place: Any) -> list[Any]:
    """Text that can be read upon lines: it has a rim in the colour of the ground, which the page knows."""
    return [
        base.mark_text(style=style, **place).encode(text="mechanism:N") for style in ("rim", "name")
    ]


def _of(names: list[str], values: list[Any]) -> Any:
    alt = altair()
    return alt.Scale(domain=names, range=values)


def _finished(chart: Any, description: str) -> Chart:
    """As wide as its place; plain JSON."""
    return dict(
        chart.properties(width="container", height=HEIGHT, description=description).to_dict()
    )
