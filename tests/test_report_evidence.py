"""The page of a complete comparison: baselines, intervals, search, costs, examples; in Chromium."""

import base64
import io
import json
import math
import re
import struct
import wave
from dataclasses import replace

import numpy as np
import pytest

from browser import Browser, find_chromium
from regard.bench.stats import Ratio
from regard.compare import (
    CostRow,
    Difference,
    ResultRow,
    RungOutcome,
    SearchPoint,
    compute_verdicts,
    load_result,
)
from regard.report import bundle, load_report, render_page, report_to_json
from regard.report.charts import SPEED, BaselineLevel, near_levels, pareto_front
from regard.report.data import build_report
from regard.report.renderings import MAX_CHARACTERS, MAX_PIXELS, MAX_ROWS, render_html
from regard.report.wav import wav_data_uri
from regard.tasks.probes import ParityTask
from regard.tasks.rendering import (
    Rendered,
    RenderedCurve,
    RenderedImage,
    RenderedParts,
    RenderedSound,
    RenderedTable,
    RenderedText,
)
from test_report import EVIL, PLOTS, decode_png, invented_comparison, parse_html

MIXERS = ("vanilla", "linear", EVIL, "retnet", "top_k")
RATES = (1e-3, 3e-3, 1e-2)
EVERYTHING = RenderedParts(
    [
        RenderedText(f"Miss {EVIL} went to Bath.", [(5, 5 + len(EVIL), EVIL), (-3, 2, "x")]),
        RenderedTable(["a", EVIL], [[1.5, EVIL], [None, 3]]),
        RenderedImage(np.arange(64, dtype=np.uint8).reshape(8, 8), EVIL),
        RenderedCurve({EVIL: [1.0, math.nan, 3.0, 2.0], "b": [0.0, 1.0]}, EVIL),
        RenderedSound(np.sin(np.linspace(0, 900, 4000)), 8000, EVIL),
    ]
)


class EveryRendering(ParityTask):
    """Parity whose examples are shown in every way."""

    def __init__(self, length=64):
        super().__init__(length=length)

    def render(self, example, prediction=None):
        return EVERYTHING


def complete_result(folder, seeds=2):
    """The result of `invented_comparison` with all that a comparison may have."""
    result = load_result(folder)
    differences, search, costs, rungs, rows = [], [], [], [], []
    for row in result.rows:
        if row.is_baseline and row.scores:
            tfidf = replace(row, mixer="TF-IDF + linear", scores=[0.72])
            other = replace(row, mixer="n-grams", scores=[], reason=f"it needs sklearn {EVIL}")
            rows += [row, tfidf, other]
        elif row.mixer in MIXERS:
            number = MIXERS.index(row.mixer)
            speedup = None if row.is_reference else Ratio(1 + number / 4, 1.0, 2.0, 9)
            difference = None
            if not row.is_reference:
                low, high = (0.1 * number - 0.15, 0.1 * number + 0.02)
                difference = Difference(
                    row.mixer,
                    row.task,
                    row.length,
                    "vanilla",
                    0.1 * number - 0.06,
                    low if seeds > 1 else math.nan,
                    high if seeds > 1 else math.nan,
                    0.0004 if seeds > 1 else math.nan,
                    0.0312 if seeds > 1 else math.nan,
                    seeds > 1,
                    0.01,
                    seeds,
                    512,
                )
                differences.append(difference)
            costs.append(
                CostRow(
                    row.mixer,
                    row.task,
                    row.length,
                    step_seconds=0.02 * row.length / (number + 1),
                    step_tokens=512,
                    eval_seconds=0.001,
                    latency=0.001 * row.length / (number + 2),
                    speedup=speedup,
                    latency_speedup=speedup,
                )
            )
            rows.append(
                replace(
                    row,
                    lr=3e-3,
                    latency=costs[-1].latency,
                    speedup=speedup,
                    latency_speedup=speedup,
                    tokens_per_second=costs[-1].tokens_per_second,
                    difference=difference,
                    metrics={"accuracy": row.score, "macro_f1": row.score - 0.1},
                    margin=0.01,
                    rung=0 if row.mixer == "top_k" else 1,
                    eliminated=row.mixer == "top_k",
                )
            )
            for lr in RATES:
                score = 0.5 + 0.05 * number - abs(math.log(lr / 3e-3)) / 20
                failed = row.mixer == "top_k" and lr == 1e-2
                search.append(
                    SearchPoint(
                        row.mixer,
                        row.task,
                        row.length,
                        0,
                        0,
                        lr,
                        100,
                        math.nan if failed else score,
                        chosen=lr == 3e-3,
                        reason=f"Diverged: the loss is nan {EVIL}" if failed else "",
                    )
                )
            if row.mixer != "top_k":
                search += [
                    SearchPoint(
                        row.mixer, row.task, row.length, 1, s, 3e-3, 400, 0.7 + s / 50, True
                    )
                    for s in range(seeds)
                ]
        else:
            rows.append(row)
    for n in result.record.plan.lengths:
        task = rows[0].task
        names = list(MIXERS)
        steps = {name: 100 + 20 * i for i, name in enumerate(names)}
        rungs += [
            RungOutcome(task, n, 0, list(RATES), [0], steps, names, names[:4]),
            RungOutcome(task, n, 1, [], list(range(seeds)), steps, names[:4], names[:4][::-1]),
        ]
        tfidf = Difference("TF-IDF + linear", task, n, "vanilla", -0.1, -0.14, -0.06, 0.001, 0.001)
        differences.append(replace(tfidf, examples=512))
    busy = ["Costs were measured while other processes used 1.3 of 2 cores."]
    return replace(
        result,
        rows=rows,
        verdicts=compute_verdicts(rows, load=busy[0]),
        search=search,
        costs=costs,
        rungs=rungs,
        differences=differences,
        load=busy,
        unique_successes={
            (rows[0].task, 8): {"linear": [4, 9, 11], EVIL: [1], "retnet": []},
            (rows[0].task, 16): {"linear": [10**9]},  # the data have changed
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from regard.tasks import TASKS

    patch = pytest.MonkeyPatch()
    patch.setitem(TASKS, "everything", EveryRendering)
    yield invented_comparison(
        tmp_path_factory.mktemp("complete"), tasks="everything", mixers=MIXERS
    )
    patch.undo()


@pytest.fixture(scope="module")
def report(folder):
    return build_report(folder, complete_result(folder))


@pytest.fixture(scope="module")
def html(report):
    return render_page(report)


def section_of(html, name):
    """The text of one section, without tags."""
    found = re.search(rf'<section id="{name}".*?</section>', html, re.DOTALL)
    return " ".join(parse_html(found.group()).texts)


# ---------------------------------------------------------------------- renderings
def test_every_rendering_is_escaped(html):
    """Fails if a text of the user becomes markup, in any kind of rendering."""
    assert EVIL not in html
    shown = render_html(EVERYTHING)
    reader = parse_html(shown)
    kinds = {name for name, _ in reader.found}
    assert {"pre", "mark", "table", "img", "svg", "audio", "figcaption"} <= kinds
    assert "script" not in kinds and " ".join(reader.texts).count(EVIL) >= 7
    assert reader.all("img")[0]["alt"] == EVIL


def test_spans_mark_the_text():
    """Fails if a span is at the wrong place, or one that overlaps doubles the text."""
    shown = render_html(RenderedText("Ann met Bob", [(8, 11, "PER"), (0, 3, "PER"), (1, 5, "x")]))
    assert "<mark>Ann<small>PER</small></mark> met <mark>Bob<small>PER</small></mark>" in shown
    assert shown.count("met") == 1
    cut = render_html(RenderedText("a" * (MAX_CHARACTERS + 7), [(MAX_CHARACTERS, 9**9, "x")]))
    assert "7 more characters" in cut and "<mark>" not in cut


def test_images_are_png_of_the_pixels():
    """Fails if a pixel has another colour, a small image is tiny, or a large one is whole."""
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    image = parse_html(render_html(RenderedImage(pixels, "caption"))).all("img")[0]
    found = decode_png(image["src"])
    assert (found[..., :3] == pixels).all() and (found[..., 3] == 255).all()
    assert int(image["width"]) == 192 and image["alt"] == "caption"
    gray = parse_html(render_html(RenderedImage(np.full((3, 5), 7, np.uint8)))).all("img")[0]
    assert (decode_png(gray["src"])[..., :3] == 7).all() and "5 × 3" in gray["alt"]
    large = parse_html(render_html(RenderedImage(np.zeros((2000, 900), np.uint8)))).all("img")[0]
    assert max(decode_png(large["src"]).shape) <= MAX_PIXELS
    assert "empty image" in render_html(RenderedImage(np.zeros((0, 4), np.uint8)))


def test_sounds_are_wav_of_the_wave():
    """Fails if the wave is not that of the example, or a long sound is stored whole."""
    values = np.array([0.0, 0.5, -1.0, 3.0, math.nan])
    data = base64.b64decode(wav_data_uri(values, 8000).removeprefix("data:audio/wav;base64,"))
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (8000, 1, 2)
        samples = struct.unpack("<5h", file.readframes(9))
    assert samples == (0, 16384, -32767, 32767, 0)
    shown = render_html(RenderedSound(np.zeros(30_000), 1000, "hum"))
    assert "first 10 s of 30.00 s at 1,000 Hz" in shown and "hum" in shown
    assert len(parse_html(shown).all("audio")[0]["src"]) < 4 * 2 * 10_100 / 3 + 100
    assert "empty sound" in render_html(RenderedSound(np.zeros(0), 1000))


def test_curves_have_gaps_and_long_tables_are_cut():
    """Fails if NaN is drawn, or thousands of rows make the page large."""
    shown = render_html(RenderedCurve({"a": [0.0, 1.0, math.nan, 1.0, 0.0]}))
    path = parse_html(shown).all("path")[0]["d"]
    assert path.count("M") == 2 and "nan" not in path and "from 0 to 1" in shown
    assert "empty curve" in render_html(RenderedCurve({"a": [math.nan]}))
    table = render_html(RenderedTable(["n"], [[i] for i in range(MAX_ROWS + 5)]))
    assert table.count("<tr>") == MAX_ROWS + 1 and "5 more rows" in table


def test_an_unknown_rendering_is_shown_as_text():
    """Fails if a kind of rendering of somebody else breaks the page."""

    class Smell(Rendered):
        def to_text(self):
            return f"roses {EVIL}"

    assert "roses &lt;script&gt;" in render_html(Smell())


# ---------------------------------------------------------------------- sections
def test_baselines_are_marked(html, report):
    """Fails if a baseline looks like a mixer in a table, or lacks the reason for its absence."""
    rows = re.findall(r"<tr[^>]*><th scope=\"row\">(TF-IDF|n-grams|constant).*?</tr>", html)
    assert rows
    table = re.search(r'<section id="table".*?</section>', html, re.DOTALL).group()
    marked = re.findall(r'<th scope="row">([^<]*) <span class="badge">no mixer</span>', table)
    assert set(marked) == {"constant", "TF-IDF + linear", "n-grams"} and len(marked) == 6
    assert "it needs sklearn &lt;script&gt;" in table
    assert "accuracy, higher is better" in section_of(html, "table")
    assert "macro_f1" in section_of(html, "table")


def test_differences_have_intervals(html):
    """Fails if the table lacks the interval, the adjusted p, or the margin that matters."""
    text = section_of(html, "differences")
    assert "Difference to vanilla" in text and "−0.050 to +0.120" in text
    assert "< 0.001" in text and "0.031" in text and "0.010 counts as material" in text
    assert "no intervals" not in text


def test_one_seed_has_no_intervals(folder):
    """Fails if NaN is shown or plotted for a comparison with one seed."""
    result = complete_result(folder, seeds=1)
    only = [each for each in result.differences if each.mixer in MIXERS]
    html = render_page(build_report(folder, replace(result, differences=only)))
    text = section_of(html, "differences")
    assert "One seed only: there are no intervals" in text and "nan" not in text
    assert "NaN" not in html.split("<script>")[0]


def test_the_search_shows_rates_and_rungs(html):
    """Fails if the chosen rate is not marked, or the page hides who was left out, and why."""
    text = section_of(html, "search")
    assert "lr 0.001" in text and "lr 0.01" in text
    found = re.search(r'<section id="search".*?</section>', html, re.DOTALL).group()
    assert found.count("✓</strong>") == 2 * len(MIXERS)  # one for each mixer and length
    assert found.count(">left out<") == 2 and found.count(">continued<") == 8
    assert "5 → 4 mixers" in text and "100 to 180 steps, 1 seed" in text
    assert f"top_k, rung 1, lr 0.01: Diverged: the loss is nan {EVIL}" in text


def test_costs_show_latency_and_load(html, report):
    """Fails if the page hides the latency, or that the machine was busy."""
    text = section_of(html, "costs")
    assert "latency in ms" in text and "1.25 (1.00 to 2.00)" in text
    assert "other processes used 1.3 of 2 cores" in text and "kept the machine busy" not in text
    quiet = replace(report, result=replace(report.result, load=[]))
    assert "No other process kept the machine busy." in render_page(quiet)


def test_examples_that_one_mixer_alone_gets_right(html, report):
    """Fails if the examples are not rendered, or their number is hidden."""
    text = section_of(html, "unique")
    assert "linear 3 examples, 2 shown" in " ".join(text.split())
    assert "test example 4" in text and "test example 9" in text and "went to Bath" in text
    assert [(each.mixer, each.length) for each in report.unique] == [
        ("linear", 8),
        (EVIL, 8),
        ("linear", 16),
    ]


@PLOTS
def test_plots_of_a_complete_comparison(html):
    """Fails if a plot lacks baselines, intervals, latency or measured time."""
    plots = [
        json.loads(text)
        for text in re.findall(r'<script type="application/json">(.*?)</script>', html)
    ]
    # per length: a forest, three trade-offs, two curves; and three of scaling
    assert len(plots) == 2 * (1 + 3 + 2) + 3
    forests = [plot for plot in plots if "minus that of" in plot["description"]]
    data = [layer.get("data", plot.get("data")) for plot in forests for layer in plot["layer"]]
    names = {row["mixer"] for each in data for row in each["values"] if "interval" in row}
    assert names == {*MIXERS[1:], "TF-IDF + linear"}
    text = json.dumps(plots)
    assert "TF-IDF + linear (no mixer)" in text and "milliseconds of inference" in text
    curves = [plot for plot in plots if "seconds of training" in plot["description"]]
    values = [
        row
        for layer in curves[0]["layer"]
        for row in layer.get("data", curves[0].get("data"))["values"]
    ]
    dense = [row for row in values if row["mixer"] == "vanilla"]
    assert all(row["seconds"] == pytest.approx(0.02 * 8 * row["step"]) for row in dense)


def test_missing_evidence_is_said(folder, monkeypatch):
    """Fails if a comparison without search, costs or differences has empty sections."""
    report = load_report(folder)
    html = render_page(report)
    assert "There was no search" in section_of(html, "search")
    assert "not measured apart" in section_of(html, "costs")
    assert "no difference to show" in section_of(html, "differences")
    assert "None. They exist" in section_of(html, "unique")
    if bundle.plots_available():
        assert "Times are those of the runs" in section_of(html, "curves")
    monkeypatch.setattr(bundle, "NEEDED", ("no_such_package",))
    html = render_page(build_report(folder, complete_result(folder)))
    assert "plot" in section_of(html, "differences") and "−0.050 to" in html


def test_json_has_the_evidence(report):
    """Fails if the JSON lacks what the page shows, or has NaN, which is no JSON."""
    found = json.loads(json.dumps(report_to_json(report), allow_nan=False))
    assert found["load"] and len(found["costs"]) == 2 * len(MIXERS)
    assert found["costs"][1]["speedup"]["median"] == 1.25
    assert found["search"][0]["valid"] and None in [each["valid"] for each in found["search"]]
    assert found["rungs"][0]["survived"] == list(MIXERS[:4])
    assert found["unique_successes"][0]["indices"] == [4, 9, 11]
    assert "went to Bath" in found["unique_successes"][0]["shown"][0]


def test_eliminated_mixers_are_not_on_the_pareto_front():
    """Fails if a mixer that trained for less time beats a finalist."""
    rows = [
        ResultRow("a", "t", 8, "accuracy", True, [0.8], tokens_per_second=5.0),
        ResultRow("b", "t", 8, "accuracy", True, [0.9], tokens_per_second=9.0, eliminated=True),
    ]
    assert [row.mixer for row in pareto_front(rows, SPEED)] == ["a"]
    levels = [BaselineLevel("near", 0.75), BaselineLevel("far", 0.1)]
    assert near_levels(rows, levels) == levels[:1]


# ---------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_chromium()
    if path is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    opened = Browser(path, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@PLOTS
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_page_opens_offline(browser, html, tmp_path, width, scheme):
    """Fails if a plot is not drawn, the console has messages, an address is loaded or the page
    overflows."""
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    browser.open(path, width, scheme=scheme)
    browser.wait_for("document.documentElement?.dataset.drawn === 'yes'")
    assert browser.messages == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert path.as_uri() in browser.requests
    plots = browser.evaluate("document.querySelectorAll('.plot svg').length")
    assert plots == html.count('class="plot"') == 15
    drawn = "[...document.querySelectorAll('.plot')].every(p => p.querySelectorAll('path').length"
    assert browser.evaluate(f"{drawn} > 5)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    sizes = browser.evaluate(
        "[...document.querySelectorAll('.plot svg')].map(s => s.getBoundingClientRect().width)"
    )
    assert all(250 < size <= width for size in sizes)
    sounds = browser.evaluate("[...document.querySelectorAll('audio')].every(a => !a.error)")
    assert sounds


def test_the_browser_sees_errors(browser, tmp_path):
    """Fails if the test above would not notice an error or a request."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<img src='http://127.0.0.1:9/x.png'><script>console.log('hm'); nope()</script>"
    )
    browser.open(path, 400)
    browser.wait_for("document.readyState === 'complete'")
    assert any("nope" in text for text in browser.messages)
    assert any("hm" in text for text in browser.messages)
    assert "http://127.0.0.1:9/x.png" in browser.requests
