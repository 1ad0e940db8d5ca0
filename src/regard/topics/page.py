"""The map of documents, as a PNG and on a page that opens offline."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.errors import check_choice
from regard.report.bundle import plots_available
from regard.report.charts import altair
from regard.report.markup import Content, SafeHtml, tag
from regard.report.page import document
from regard.report.plots import plot_figure
from regard.report.sections import scrolling_table, section
from regard.report.styles import COLOURS, GREY, SHAPES
from regard.tasks.tokenizers import replace_surrogates
from regard.topics.evaluation import TopicScores
from regard.topics.words import MISSING

PCA, TSNE = "pca", "tsne"
PROJECTIONS = (TSNE, PCA)
MAX_POINTS = 5000  # documents on the map, a random sample
PERPLEXITY = 30  # of t-SNE
SHOWN_WORDS, SHOWN_CHARACTERS = 3, 90  # of a topic in the legend; of a document in a tooltip
HEIGHT = 560
PNG_SCALE = 2.0
INSTALL = "The map needs the extra `plot`: pip install 'regard[plot]'."
NO_TOPIC = "no topic"
Chart = dict[str, Any]


class TopicReport(NamedTuple):
    """What the page shows.

    Attributes:
        title: What the documents and embeddings are.
        documents: The documents (n).
        labels: Their labels (n), or None.
        assigned: The topic of each document (n), -1 for none.
        words: The words of each topic.
        places: The documents on the map (n, 2).
        projection: How they were placed, "tsne" or "pca".
        scores: Scores by the name of the model, ours first.
        notes: Sentences about the data.
    """

    title: str
    documents: Sequence[str]
    labels: Sequence[str] | None
    assigned: np.ndarray
    words: Sequence[Sequence[str]]
    places: np.ndarray
    projection: str
    scores: Mapping[str, TopicScores]
    notes: Sequence[str]


def project(vectors: np.ndarray, projection: str = TSNE, *, random_state: int = 0) -> np.ndarray:
    """Vectors (n, d) in two dimensions, (n, 2): by t-SNE (van der Maaten & Hinton 2008) or PCA."""
    try:
        from sklearn import decomposition, manifold
    except ImportError:
        raise ImportError(MISSING) from None
    check_choice("projection", projection, PROJECTIONS)
    if projection == PCA or len(vectors) < 5 or vectors.shape[1] < 2:
        count = min(2, *vectors.shape)
        places = decomposition.PCA(count, svd_solver="full").fit_transform(vectors)
        return np.pad(places, ((0, 0), (0, 2 - count)))
    perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
    model = manifold.TSNE(init="pca", perplexity=perplexity, random_state=random_state)
    return np.asarray(model.fit_transform(vectors), dtype=float)


def topic_names(words: Sequence[Sequence[str]]) -> list[str]:
    """A name for each topic: its number and its first words."""
    return [f"{i}: {', '.join(each[:SHOWN_WORDS])}" for i, each in enumerate(words)]


def map_chart(report: TopicReport) -> Chart:
    """The documents as points, coloured by topic; the shape repeats the topic."""
    alt = altair()
    names = [*topic_names(report.words), NO_TOPIC]
    chosen = np.random.default_rng(0).permutation(len(report.documents))[:MAX_POINTS]
    data = []
    for i in sorted(chosen.tolist()):
        text = " ".join(replace_surrogates(report.documents[i]).split())
        row = {
            "x": round(float(report.places[i, 0]), 3),
            "y": round(float(report.places[i, 1]), 3),
            "topic": names[report.assigned[i]],
            "document": f"{text[: SHOWN_CHARACTERS - 1]}…" if text[SHOWN_CHARACTERS:] else text,
        }
        data.append(row if report.labels is None else {**row, "label": report.labels[i]})
    shapes, count = list(SHAPES), len(report.words)
    used = names if (report.assigned < 0).any() else names[:-1]
    colours = [COLOURS[i % len(COLOURS)] for i in range(count)] + [GREY]
    marks = [shapes[(i // len(COLOURS) + i) % len(shapes)] for i in range(count)] + ["circle"]
    columns = ["topic", *(["label"] if report.labels is not None else []), "document"]
    legend = alt.Legend(orient="bottom", columns=2, labelLimit=320, title=None)
    axis = alt.Axis(labels=False, ticks=False, title=None, domain=False)
    scale = {"domain": used, "range": colours[: len(used)]}
    chart = (
        alt.Chart(alt.Data(values=data))
        .mark_point(filled=True, size=28, opacity=0.7)
        .encode(
            x=alt.X("x:Q", axis=axis, scale=alt.Scale(zero=False)),
            y=alt.Y("y:Q", axis=axis, scale=alt.Scale(zero=False)),
            color=alt.Color("topic:N", scale=alt.Scale(**scale), legend=legend),
            shape=alt.Shape(
                "topic:N",
                scale=alt.Scale(domain=used, range=[SHAPES[m] for m in marks[: len(used)]]),
                legend=legend,
            ),
            tooltip=[alt.Tooltip(f"{name}:N") for name in columns],
        )
    )
    description = f"Map of {len(data):,} documents, one point each, coloured by topic"
    properties = {"width": "container", "height": HEIGHT, "description": description}
    return dict(chart.properties(**properties).to_dict())


def write_png(report: TopicReport, path: Path) -> None:
    """Write the map as a PNG."""
    if not plots_available():
        raise ImportError(INSTALL)
    convert = importlib.import_module("vl_convert")
    chart = {**map_chart(report), "width": 720, "background": "white"}
    path.write_bytes(convert.vegalite_to_png(chart, scale=PNG_SCALE))


def render_page(report: TopicReport) -> str:
    """The page as HTML: the map, the topics, and the scores beside the baselines."""
    header = tag(
        "header",
        tag("h1", "Topics"),
        tag("p", report.title, class_="muted"),
        *(tag("p", note, class_="warning") for note in report.notes),
    )
    return document("Topics", header, [_map_section(report), _words(report), _scores(report)])


def _map_section(report: TopicReport) -> SafeHtml:
    how = {TSNE: "t-SNE", PCA: "the first two principal components"}[report.projection]
    note = f"A point is a document, placed by {how} of the vectors that were clustered."
    if len(report.documents) > MAX_POINTS:
        note += f" A random sample of {MAX_POINTS:,} documents."
    if not plots_available():
        return section("map", "Map", tag("p", INSTALL, class_="missing"))
    return section("map", "Map", tag("p", note, class_="muted"), plot_figure(map_chart(report)))


def _words(report: TopicReport) -> SafeHtml:
    """A table of the topics: size, labels and words."""
    header: list[Content] = ["topic", "documents", "words"]
    if report.labels is not None:
        header.insert(2, "most frequent label")
    body = []
    for number, words in enumerate(report.words):
        members = np.flatnonzero(report.assigned == number)
        cells: list[Content] = [tag("td", f"{len(members):,}", class_="number")]
        if report.labels is not None:
            found, counts = np.unique(
                [report.labels[i] for i in members.tolist()], return_counts=True
            )
            best = int(counts.argmax())
            share = f"{found[best]} ({100 * counts[best] / len(members):.0f} %)"
            cells.append(tag("td", share, class_="number"))
        cells.append(tag("td", ", ".join(words), class_="reason"))
        body.append(tag("tr", tag("th", str(number), scope="row"), *cells))
    table = scrolling_table("Words with the largest c-TF-IDF", header, body, text_last=True)
    return section("words", "Words", table)


def _scores(report: TopicReport) -> SafeHtml:
    """A table of the scores of all models."""
    rows = score_rows(report.scores)
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", x, class_="number") for x in row[1:]))
        for row in rows[1:]
    ]
    note = (
        "NPMI: how much more often two words of a topic occur within ten words of each other than "
        "by chance, from -1 to 1. Diversity: share of different words. All models read the same "
        "documents and the same vocabulary."
    )
    table = scrolling_table("Scores", rows[0], body)
    return section("scores", "Beside other models", tag("p", note, class_="muted"), table)


def score_rows(scores: Mapping[str, TopicScores]) -> list[list[str]]:
    """A table of scores as texts, with its header."""
    first = next(iter(scores.values()))
    rows = [["model", "NPMI", "diversity", *first.agreement]]
    for name, each in scores.items():
        agreement = (f"{value:.3f}" for value in each.agreement.values())
        rows.append([name, f"{each.npmi:.3f}", f"{each.diversity:.3f}", *agreement])
    return rows
