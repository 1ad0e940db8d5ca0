"""Plots in Vega-Lite (by Altair): score against cost, differences to dense softmax with intervals,
learning curves, cost by length."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from regard.compare import Difference, ResultRow
from regard.compare.formatting import format_score
from regard.report.curves import LearningCurve
from regard.report.labels import (
    GAP,
    MAX_LABEL_WIDTH,
    PixelBox,
    PlotAxis,
    fit_axis,
    level_label_box,
    mark_box,
    place_labels,
)
from regard.report.styles import GREY, SeriesStyle
from regard.tasks.metrics import Metric

HEIGHT = 260
ROW_HEIGHT = 30  # of a plot with a row for each mixer
NO_MIXER = " (no mixer)"
LEVEL_LABELS = ((False, False), (True, False), (False, True), (True, True))  # left, above
LOG_RATIO = 5.0  # an axis is logarithmic if the largest value is this many times the smallest
Chart = dict[str, Any]


class CostAxis(NamedTuple):
    """A cost that scores are plotted against."""

    title: str
    value: Callable[[ResultRow], float]
    higher_is_better: bool = False


SPEED = CostAxis("training tokens per second", lambda row: row.tokens_per_second, True)
MEMORY = CostAxis("peak training memory in MB", lambda row: row.peak_bytes / 1e6)
LATENCY = CostAxis("milliseconds of inference per example", lambda row: 1e3 * row.latency)


class CurveAxis(NamedTuple):
    """What learning curves are plotted over: a field of `CurvePoint`."""

    field: str
    title: str


class BaselineLevel(NamedTuple):
    """A baseline, drawn as a horizontal line."""

    name: str
    score: float


def score_title(split: str, metric: Metric) -> str:
    """Return the title of an axis of scores, such as "test accuracy"."""
    unit = f" in {metric.unit}" if metric.unit else ""
    hint = "" if metric.higher_is_better else " (lower is better)"
    return f"{split} {metric.name}{unit}{hint}"


def near_levels(rows: Sequence[ResultRow], levels: Sequence[BaselineLevel]) -> list[BaselineLevel]:
    """Return the baselines that fit into a plot of these rows without flattening it."""
    scores = [row.score for row in rows]
    reach = max(max(scores) - min(scores), 0.05 * max(map(abs, scores)))
    return [level for level in levels if min(scores) - reach <= level.score <= max(scores) + reach]


def pareto_front(rows: Sequence[ResultRow], cost: CostAxis) -> list[ResultRow]:
    """Return the rows that no other row beats in both score and cost, cheapest first.

    Eliminated rows were trained for less time and take no part.
    """
    score_sign = 1 if rows and rows[0].higher_is_better else -1
    cost_sign = -1 if cost.higher_is_better else 1
    front: list[ResultRow] = []
    finalists = [row for row in rows if not row.eliminated]
    for row in sorted(
        finalists, key=lambda row: (cost_sign * cost.value(row), -score_sign * row.score)
    ):
        if not front or score_sign * row.score > score_sign * front[-1].score:
            front.append(row)
    return front


def pareto_chart(
    rows: Sequence[ResultRow],
    cost: CostAxis,
    metric: Metric,
    styles: dict[str, SeriesStyle],
    levels: Sequence[BaselineLevel],
) -> Chart:
    """Plot the score of each mixer against a cost, its std over seeds, the Pareto front, and
    baselines as horizontal lines. Eliminated mixers are hollow."""
    alt = altair()
    costs = [cost.value(row) for row in rows]
    spans = [
        (row.score - row.std, row.score + row.std) if len(row.scores) > 1 else (row.score,) * 2
        for row in rows
    ]
    log = min(costs) > 0 and max(costs) / min(costs) > LOG_RATIO
    x_axis = fit_axis(costs, margin=0.15, log=log)
    y_axis = fit_axis(
        [end for span in spans for end in span] + [level.score for level in levels],
        margin=0.12,
        reverse=not metric.higher_is_better,
    )
    places = [
        (x_axis.fraction(v), y_axis.fraction(r.score)) for r, v in zip(rows, costs, strict=True)
    ]
    names = place_level_labels(levels, [mark_box(x, y) for x, y in places], y_axis)
    labels = place_labels(
        [(x, y, row.mixer) for (x, y), row in zip(places, rows, strict=True)],
        [level_box(name, y_axis) for name in names],
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
            "eliminated": row.eliminated,
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
        *(
            base.transform_filter(f"datum.eliminated === {value}")
            .mark_point(filled=filled, size=90, opacity=1)
            .encode(**_encodings(styles, "colour", "shape"), tooltip=tooltip)
            for value, filled in (("true", False), ("false", True))
        ),
    ]
    for left, align, dx in (("true", "right", -GAP), ("false", "left", GAP)):
        side = base.transform_filter(f"datum.left === {left}").encode(y="label:Q")
        layers += _text(side, align=align, dx=dx, limit=MAX_LABEL_WIDTH)
    layers = [*_level_layers(names, "y", y), *layers]
    return _finish(alt.layer(*layers), f"{title} against {cost.title}, one point per mixer")


def learning_chart(
    curves: Sequence[LearningCurve],
    by: CurveAxis,
    metric: Metric,
    styles: dict[str, SeriesStyle],
    levels: Sequence[BaselineLevel],
) -> Chart:
    """Plot validation scores over steps or time: mean over seeds, band from worst to best."""
    alt = altair()
    data = [{"mixer": c.mixer, **point._asdict()} for c in curves for point in c.points]
    values = [point[name] for point in data for name in ("low", "high")]
    values += [level.score for level in levels]
    title = score_title("validation", metric)
    y_axis = fit_axis(values, margin=0.1, reverse=not metric.higher_is_better)
    scale = _scale(y_axis)
    y, low = (
        alt.Y(f"{name}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6))
        for name in ("score", "low")
    )
    base = alt.Chart(alt.Data(values=data)).encode(
        x=alt.X(f"{by.field}:Q", title=by.title, axis=alt.Axis(tickCount=5))
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
    layers += _level_layers(place_level_labels(levels, [], y_axis), "score", y)
    return _finish(alt.layer(*layers), f"{title} by {by.title}, one line per mixer")


def forest_chart(
    differences: Sequence[Difference],
    metric: Metric,
    margin: float,
    styles: dict[str, SeriesStyle],
    baselines: Sequence[str],
) -> Chart:
    """Plot differences to a reference with their intervals, a row for each; the band is what does
    not matter in practice. Baselines are hollow."""
    alt = altair()
    reference = differences[0].reference
    band = 0.0 if math.isnan(margin) else margin
    data: list[dict[str, Any]] = []
    for each in differences:
        has_interval = math.isfinite(each.low) and math.isfinite(each.high)
        low, high = (each.low, each.high) if has_interval else (each.estimate, each.estimate)
        data.append(
            {
                "mixer": each.mixer,
                "x": each.estimate,
                "low": low,
                "high": high,
                "baseline": each.mixer in baselines,
                "difference": format_difference(each.estimate, metric),
                "interval": format_interval(each, metric) or "unknown",
            }
        )
    ends = [end for row in data for end in (row["low"], row["high"])]
    better = "right" if metric.higher_is_better else "left"
    title = [f"{metric.name} minus that of {reference}", f"({better} is better)"]
    scale = _scale(fit_axis([*ends, -band, band], margin=0.06))
    x, low_end = (
        alt.X(f"{name}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=5))
        for name in ("x", "low")
    )
    names = [each.mixer for each in differences]
    y = alt.Y(
        "mixer:N",
        title=None,
        sort=names,
        scale=alt.Scale(domain=names),
        axis=alt.Axis(labelLimit=140, ticks=False, domain=False, grid=True),
    )
    base = alt.Chart(alt.Data(values=data)).encode(x=x, y=y)
    zero = alt.Chart(alt.Data(values=[{"low": -band, "high": band, "x": 0}]))
    shown = {name: style for name, style in styles.items() if name in names}
    shown |= {name: SeriesStyle(GREY, "diamond", (1, 0)) for name in names if name in baselines}
    tooltip = [alt.Tooltip(f"{name}:N") for name in ("mixer", "difference", "interval")]
    layers = [
        zero.mark_rect(opacity=0.14, color=GREY).encode(x=low_end, x2="high:Q"),
        zero.mark_rule(strokeDash=[3, 3]).encode(x=x),
        base.mark_rule(strokeWidth=2.2).encode(
            x=low_end, x2="high:Q", **_encodings(shown, "colour")
        ),
        *(
            base.transform_filter(f"datum.baseline === {value}")
            .mark_point(filled=filled, size=80, opacity=1)
            .encode(**_encodings(shown, "colour", "shape"), tooltip=tooltip)
            for value, filled in (("true", False), ("false", True))
        ),
    ]
    height = ROW_HEIGHT * len(names) + 10
    return _finish(alt.layer(*layers), f"{' '.join(title)}, one row per mixer", height)


def format_difference(value: float, metric: Metric) -> str:
    """Return a difference of scores with its sign and unit: "+0.012"."""
    return ("−" if value < 0 else "+") + metric.format_value(abs(value))


def format_interval(difference: Difference, metric: Metric) -> str:
    """Return the confidence interval in words; "" if it is unknown."""
    if math.isnan(difference.low) or math.isnan(difference.high):
        return ""
    low, high = (format_difference(end, metric) for end in (difference.low, difference.high))
    return f"{low} to {high}"


def scaling_chart(
    points: Sequence[tuple[str, int, float]], title: str, styles: dict[str, SeriesStyle]
) -> Chart:
    """Plot points (mixer, length, cost) on log axes: the slope of a line is its exponent."""
    alt = altair()
    lengths = sorted({length for _, length, _ in points})
    data = [{"mixer": mixer, "length": length, "cost": cost} for mixer, length, cost in points]
    x = alt.X(
        "length:Q",
        title="tokens",
        scale=_scale(fit_axis(lengths, margin=0.08, log=True)),
        axis=alt.Axis(values=lengths, format=",d", labelFlush=False),
    )
    y = alt.Y(
        "cost:Q",
        title=title,
        scale=_scale(fit_axis([cost for _, _, cost in points], margin=0.08, log=True)),
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


class LevelLabel(NamedTuple):
    """A baseline and where on its line its name is."""

    level: BaselineLevel
    left: bool
    above: bool


def level_box(label: LevelLabel, axis: PlotAxis) -> PixelBox:
    """Return the rectangle of the name of a baseline."""
    height, name = axis.fraction(label.level.score), label.level.name + NO_MIXER
    return level_label_box(height, name, left=label.left, above=label.above)


def place_level_labels(
    levels: Sequence[BaselineLevel], marks: Sequence[PixelBox], axis: PlotAxis
) -> list[LevelLabel]:
    """Place the names of baselines so that they cover neither marks nor each other."""
    taken, placed = list(marks), list[LevelLabel]()
    for level in sorted(levels, key=lambda level: level.score):
        candidates = [LevelLabel(level, left, above) for left, above in LEVEL_LABELS]
        free = (
            each
            for each in candidates
            if not any(level_box(each, axis).overlaps(box) for box in taken)
        )
        placed.append(next(free, candidates[0]))
        taken.append(level_box(placed[-1], axis))
    return placed


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


def _level_layers(labels: Sequence[LevelLabel], field: str, y: Any) -> list[Any]:
    """Return a dashed line with a name for each baseline."""
    alt = altair()
    layers = []
    for level, left, above in labels:
        data = [{field: level.score, "mixer": level.name + NO_MIXER}]
        line = alt.Chart(alt.Data(values=data)).encode(y=y)
        layers.append(line.mark_rule(strokeDash=[2, 3], color=GREY).encode(tooltip="mixer:N"))
        layers += _text(
            line.encode(x=alt.value(0 if left else "width")),
            align="left" if left else "right",
            dx=3 if left else -3,
            dy=-7 if above else 9,
            fontSize=10,
        )
    return layers


def _finish(chart: Any, description: str, height: int = HEIGHT) -> Chart:
    properties = {"width": "container", "height": height, "description": description}
    return dict(chart.properties(**properties).to_dict())
