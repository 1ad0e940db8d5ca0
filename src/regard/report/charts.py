"""Plots in Vega-Lite (by Altair): score against cost, learning curves, cost by length."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from regard.compare import ResultRow
from regard.compare.formatting import format_score
from regard.compare.results import higher_is_better
from regard.report.curves import LearningCurve
from regard.report.labels import GAP, MAX_LABEL_WIDTH, PlotAxis, fit_axis, place_labels
from regard.report.styles import GREY, SeriesStyle

HEIGHT = 260
LOG_RATIO = 5.0  # an axis is logarithmic if the largest value is this many times the smallest
Chart = dict[str, Any]


class CostAxis(NamedTuple):
    """A cost that scores are plotted against."""

    title: str
    value: Callable[[ResultRow], float]
    higher_is_better: bool = False


SPEED = CostAxis("training tokens per second", lambda row: row.tokens_per_second, True)
MEMORY = CostAxis("peak training memory in MB", lambda row: row.peak_bytes / 1e6)
TIME = CostAxis("milliseconds per training step", lambda row: 1e3 * row.seconds / row.steps)


def score_title(split: str, metric: str) -> str:
    """Return the title of an axis of scores, such as "test accuracy"."""
    hint = "" if higher_is_better(metric) else " (lower is better)"
    return f"{split} {metric}{hint}"


def pareto_front(rows: Sequence[ResultRow], cost: CostAxis) -> list[ResultRow]:
    """Return the rows that no other row beats in both score and cost, cheapest first."""
    score_sign = 1 if rows and higher_is_better(rows[0].metric) else -1
    cost_sign = -1 if cost.higher_is_better else 1
    front: list[ResultRow] = []
    for row in sorted(rows, key=lambda row: (cost_sign * cost.value(row), -score_sign * row.score)):
        if not front or score_sign * row.score > score_sign * front[-1].score:
            front.append(row)
    return front


def pareto_chart(
    rows: Sequence[ResultRow], cost: CostAxis, styles: dict[str, SeriesStyle]
) -> Chart:
    """Plot the score of each mixer against a cost, its std over seeds and the Pareto front."""
    alt = altair()
    costs = [cost.value(row) for row in rows]
    spans = [
        (row.score - row.std, row.score + row.std) if len(row.scores) > 1 else (row.score,) * 2
        for row in rows
    ]
    log = min(costs) > 0 and max(costs) / min(costs) > LOG_RATIO
    metric = rows[0].metric
    x_axis = fit_axis(costs, margin=0.15, log=log)
    y_axis = fit_axis(
        [end for span in spans for end in span], margin=0.12, reverse=not higher_is_better(metric)
    )
    labels = place_labels(
        [
            (x_axis.fraction(value), y_axis.fraction(row.score), row.mixer)
            for row, value in zip(rows, costs, strict=True)
        ]
    )
    data = [
        {
            "x": value,
            "y": row.score,
            "low": low,
            "high": high,
            "label": y_axis.value(label.height),
            "left": label.left,
            "mixer": row.mixer,
            "cost": f"{value:,.4g} {cost.title}",
            "score": format_score(row),
        }
        for row, value, (low, high), label in zip(rows, costs, spans, labels, strict=True)
    ]
    title = score_title("test", metric)
    x = alt.X(
        "x:Q",
        title=cost.title,
        scale=_scale(x_axis),
        axis=alt.Axis(tickCount=4, format="~s", labelFlush=True),
    )
    y = alt.Y("y:Q", title=title, scale=_scale(y_axis), axis=alt.Axis(tickCount=6))
    front = [{"x": cost.value(row), "y": row.score} for row in pareto_front(rows, cost)]
    front_line = alt.Chart(alt.Data(values=front)).mark_line(
        interpolate="step-before" if cost.higher_is_better else "step-after",
        color=GREY,
        strokeDash=[4, 3],
        strokeWidth=1.2,
    )
    base = alt.Chart(alt.Data(values=data)).encode(x=x, y=y)
    tooltip = [alt.Tooltip(f"{name}:N") for name in ("mixer", "score", "cost")]
    layers = [
        front_line.encode(x=x, y=y),
        base.mark_rule(opacity=0.5).encode(
            y="low:Q", y2="high:Q", **_encodings(styles, "colour", "dash")
        ),
        base.mark_rule(opacity=0.6, strokeWidth=0.8).encode(y2="label:Q"),
        base.mark_point(filled=True, size=90, opacity=1).encode(
            **_encodings(styles, "colour", "shape"), tooltip=tooltip
        ),
    ]
    for left, align, dx in (("true", "right", -GAP), ("false", "left", GAP)):
        names = base.transform_filter(f"datum.left === {left}").encode(y="label:Q")
        layers += _text(names, align=align, dx=dx, limit=MAX_LABEL_WIDTH)
    return _finish(alt.layer(*layers), f"{title} against {cost.title}, one point per mixer")


def learning_chart(
    curves: Sequence[LearningCurve],
    by: str,
    metric: str,
    styles: dict[str, SeriesStyle],
    baseline: float | None,
) -> Chart:
    """Plot validation scores by "step" or "seconds": mean over seeds, band from worst to best."""
    alt = altair()
    data = [{"mixer": c.mixer, **point._asdict()} for c in curves for point in c.points]
    values = [point[name] for point in data for name in ("low", "high")]
    values += [] if baseline is None else [baseline]
    title = score_title("validation", metric)
    scale = _scale(fit_axis(values, margin=0.1, reverse=not higher_is_better(metric)))
    y, low = (
        alt.Y(f"{name}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6))
        for name in ("score", "low")
    )
    base = alt.Chart(alt.Data(values=data)).encode(
        x=alt.X(f"{by}:Q", title=by, axis=alt.Axis(tickCount=5))
    )
    tooltip = [
        alt.Tooltip("mixer:N"),
        alt.Tooltip("step:Q"),
        alt.Tooltip("seconds:Q", format=".1f"),
        *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("score", "low", "high")),
    ]
    layers = [
        base.mark_area(opacity=0.16).encode(y=low, y2="high:Q", **_encodings(styles, "colour")),
        base.mark_line(strokeWidth=1.8).encode(y=y, **_encodings(styles, "colour", "dash")),
        base.mark_point(filled=True, size=32, opacity=1).encode(
            y=y, **_encodings(styles, "colour", "shape"), tooltip=tooltip
        ),
    ]
    if baseline is not None:
        point = {"score": baseline, "mixer": "constant baseline"}
        level = alt.Chart(alt.Data(values=[point])).encode(y=y)
        layers += [level.mark_rule(strokeDash=[2, 3], color=GREY).encode(tooltip="mixer:N")]
        layers += _text(level.encode(x=alt.value("width")), align="right", dy=9, dx=-3, fontSize=10)
    return _finish(alt.layer(*layers), f"{title} by {by}, one line per mixer")


def scaling_chart(
    points: Sequence[tuple[str, int, float]], title: str, styles: dict[str, SeriesStyle]
) -> Chart:
    """Plot points (mixer, length, cost) on log axes: the slope of a line is its exponent."""
    alt = altair()
    lengths = sorted({length for _, length, _ in points})
    visible = [point for point in points if point[2] > 0]
    data = [{"mixer": mixer, "length": length, "cost": cost} for mixer, length, cost in visible]
    x = alt.X(
        "length:Q",
        title="tokens",
        scale=_scale(fit_axis(lengths, margin=0.08, log=True)),
        axis=alt.Axis(values=lengths, format=",d", labelFlush=False),
    )
    y = alt.Y(
        "cost:Q",
        title=title,
        scale=_scale(fit_axis([cost for _, _, cost in visible], margin=0.08, log=True)),
        axis=alt.Axis(tickCount=4),
    )
    base = alt.Chart(alt.Data(values=data)).encode(x=x, y=y)
    tooltip = [
        alt.Tooltip("mixer:N"),
        alt.Tooltip("length:Q"),
        alt.Tooltip("cost:Q", format=",.3g", title=title),
    ]
    line = base.mark_line(strokeWidth=1.8).encode(**_encodings(styles, "colour", "dash"))
    marks = base.mark_point(filled=True, size=60, opacity=1).encode(
        **_encodings(styles, "colour", "shape"), tooltip=tooltip
    )
    return _finish(alt.layer(line, marks), f"{title} by length on log axes, one line per mixer")


def altair() -> Any:
    """Import Altair, which is optional and takes a while to load."""
    return importlib.import_module("altair")


def _scale(axis: PlotAxis) -> Any:
    kind = {"type": "log"} if axis.log else {"zero": False}
    return altair().Scale(domain=[axis.low, axis.high], nice=False, reverse=axis.reverse, **kind)


def _encodings(styles: dict[str, SeriesStyle], *fields: str) -> dict[str, Any]:
    """Return the encodings that distinguish mixers by fields of their style."""
    alt = altair()
    channels = {"colour": alt.Color, "shape": alt.Shape, "dash": alt.StrokeDash}
    encodings = {}
    for field in fields:
        values = [getattr(style, field) for style in styles.values()]
        values = [list(value) if field == "dash" else value for value in values]
        scale = alt.Scale(domain=list(styles), range=values)
        name = {"colour": "color", "dash": "strokeDash"}.get(field, field)
        encodings[name] = channels[field]("mixer:N", scale=scale, legend=None)
    return encodings


def _text(base: Any, **position: Any) -> list[Any]:
    """Return text with an outline in the colour of the background, readable on top of lines."""
    return [
        base.mark_text(style=style, **position).encode(text="mixer:N")
        for style in ("outline", "name")
    ]


def _finish(chart: Any, description: str) -> Chart:
    properties = {"width": "container", "height": HEIGHT, "description": description}
    return dict(chart.properties(**properties).to_dict())
