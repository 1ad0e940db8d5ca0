"""The page of a comparison: its content, that it loads nothing, and that a browser draws it."""

import base64
import json
import math
import re
import shutil
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.parsing import parse_specs
from regard.compare import ComparisonPlan, ResultRow, Schedule, compute_verdicts
from regard.compare.comparison import Comparison
from regard.compare.formatting import describe_caveats
from regard.compare.ledger import DONE, FAILED, REFUSED, Ledger
from regard.compare.record import ComparisonRecord, load_result, read_record, write_record
from regard.compare.results import entry_labels
from regard.models import ModuleSpec, load
from regard.report import bundle, load_report, render_page, report_to_json
from regard.report.charts import MEMORY, SPEED, pareto_front
from regard.report.curves import average_curves
from regard.report.labels import (
    GAP,
    HEIGHT,
    LETTER_WIDTH,
    LINE_HEIGHT,
    WIDTH,
    fit_axis,
    place_labels,
)
from regard.report.maps import attention_maps, downsample
from regard.report.markup import SafeHtml, tag
from regard.report.page import CONTENTS
from regard.report.png import pattern_pixels, png_data_uri, weight_pixels
from regard.report.styles import COLOURS, GREY, series_styles
from regard.tasks import TASKS, create_task
from regard.tasks.metrics import Bits
from regard.tasks.probes import ParityTask
from regard.tasks.rendering import RenderedText
from regard.train.run import RunSpec, run_training
from regard.train.settings import TrainSettings

EVIL = "<script>alert('a & b')</script>"
PLOTS = pytest.mark.skipif(
    not bundle.plots_available(), reason="plots need the extra plot (altair and vl-convert-python)"
)


class Rude(ParityTask):
    """Parity that shows its examples as a script and is measured in bits."""

    def __init__(self, length=8):
        super().__init__(length=length)
        self.metrics = (Bits(),)

    def render(self, example, prediction=None):
        return RenderedText(EVIL)


def invented_result(score, *, speed=1000.0, memory=5e6, parameters=900, metric="accuracy", seed=0):
    curve = [
        {"step": s, "seconds": s / 10 + seed, "valid": score * s / 20, "loss": 1.0}
        for s in (5, 10, 20)
    ]
    where = {
        "python": "3",
        "torch": "2",
        "threads": 1,
        "machine": "none",
        "cores": 1,
        "system": "made up",
    }
    return {
        "steps": 20,
        "seconds": 2.0,
        "tokens": round(2 * speed),
        "parameters": parameters,
        "loss": 1.0,
        "best": score,
        "test": score,
        "metrics": {metric: score},
        "metric": metric,
        "higher_is_better": metric == "accuracy",
        "stopped": "steps",
        "curve": curve,
        "peak_bytes": round(memory),
        "examples": 0,
        "environment": where,
    }


def invented_comparison(
    folder,
    *,
    tasks="parity",
    lengths=(8, 16),
    mixers=("vanilla", "linear", EVIL),
    metric="accuracy",
    seeds=2,
):
    """A finished comparison with invented results; `fnet` is refused, `local` failed."""
    plan = ComparisonPlan(
        tasks=parse_specs(tasks),
        mixers=[ModuleSpec(name=m) for m in mixers],
        lengths=lengths,
        seeds=seeds,
    )
    ledger, keys = Ledger(folder / "ledger.sqlite"), []
    for task, n, (number, mixer), seed in product(
        plan.tasks, lengths, enumerate((*mixers, "fnet", "local")), range(seeds)
    ):
        key = f"{task.name}-{n}-{number}-{seed}"
        settings = {
            "mixer": {"name": mixer},
            "task": {"name": task.name, "arguments": {"length": n}},
            "length": n,
            "seed": seed,
        }
        refusal = f"it cannot be causal: {EVIL}" if mixer == "fnet" else ""
        ledger.add(key, f"{mixer} · {n} · {seed}", settings, refusal=refusal)
        keys.append(key)
        if mixer == "local":
            ledger.fail(key, "MemoryError: too much")
        elif mixer != "fnet":
            score = 0.6 + 0.1 * number + 0.01 * seed
            cost = {"speed": 900.0 * (number + 1) / n, "memory": 1e6 * n / (number + 1)}
            ledger.finish(key, invented_result(score, **cost, metric=metric, seed=seed))
    ledger.close()
    command = f"regard compare --tasks '{EVIL}'"
    write_record(folder, ComparisonRecord(plan=plan, command=command, keys=keys))
    return folder


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return invented_comparison(tmp_path_factory.mktemp("compared"))


@pytest.fixture(scope="module")
def html(comparison):
    return render_page(load_report(comparison))


# ---------------------------------------------------------------------- the page as text
class Reader(HTMLParser):
    """Collects elements, attributes, text, and the elements that are not closed."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self):
        super().__init__()
        self.found, self.open, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def parse_html(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_has_all_sections_in_order(html):
    """Fails if a section is missing or out of order, or a link of the contents is broken."""
    reader = parse_html(html)
    assert [each["id"] for each in reader.all("section")] == list(CONTENTS)
    assert [each["href"] for each in reader.all("a")] == [f"#{name}" for name in CONTENTS]
    assert reader.all("html")[0]["lang"] == "en" and len(reader.all("h1")) == 1


def test_the_page_loads_nothing(html):
    """Fails if a script, picture, style or font is loaded from another address."""
    reader = parse_html(html)
    for name, attributes in reader.found:
        for key in (
            "src",
            "href",
            "xlink:href",
            "action",
            "data",
            "poster",
            "srcset",
            "background",
        ):
            address = attributes.get(key) or "#"
            data = ("#", "data:image/png;base64,", "data:audio/wav;base64,")
            assert address.startswith(data), (name, key, address[:80])
        assert name not in ("link", "iframe", "object", "embed", "base"), name
        assert "url(" not in (attributes.get("style") or "")
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert len(styles) == 1 and "url(" not in styles[0] and "@import" not in styles[0]
    policy = next(each["content"] for each in reader.all("meta") if each.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_user_text_is_escaped(html):
    """Fails if the name of a mixer, a refusal or a command becomes a script."""
    reader = parse_html(html)
    scripts = reader.all("script")
    assert EVIL not in html
    assert {each.get("type") for each in scripts} <= {None, "application/json"}
    assert sum(each.get("type") is None for each in scripts) == (
        2 if bundle.plots_available() else 0
    )
    text = " ".join(reader.texts)
    assert f"it cannot be causal: {EVIL}" in text and f"--tasks '{EVIL}'" in text


def test_markup_is_escaped_unless_it_is_safe():
    """Fails if text or an attribute can inject markup."""
    assert (
        tag("p", "<b>", SafeHtml("<i>"), class_='"x"')
        == '<p class="&quot;x&quot;">&lt;b&gt;<i></p>'
    )
    assert tag("p", ["a", tag("br")], hidden=True, title=False) == "<p hidden>a<br></p>"


def test_tables_have_headers_and_reasons(html):
    """Fails if a table has no headers for screen readers, or a mixer without a score no reason."""
    reader = parse_html(html)
    assert len(reader.all("table")) == len(reader.all("caption")) == 2
    assert {each.get("scope") for each in reader.all("th")} == {"row", "col"}
    muted = re.findall(r'<tr class="muted">(.*?)</tr>', html)
    assert len(muted) == 4  # two that have no score, at two lengths
    assert any("MemoryError: too much" in row for row in muted) and any(
        "cannot be causal" in row for row in muted
    )
    assert all(each.get("alt") for each in reader.all("img"))


@PLOTS
def test_plots_have_all_mixers(html):
    """Fails if a plot lacks a mixer, or dense softmax is not grey."""
    plots = [
        json.loads(text)
        for text in re.findall(r'<script type="application/json">(.*?)</script>', html)
    ]
    assert len(plots) == 2 * 2 + 2 * 2 + 2  # two trade-offs and two curves per length, two scaling
    for plot in plots:
        data = [layer.get("data", plot.get("data"))["values"] for layer in plot["layer"]]
        names = {point["mixer"] for values in data for point in values if "mixer" in point}
        assert names - {"constant (no mixer)"} == {"vanilla", "linear", EVIL}
        scale = next(
            layer["encoding"]["color"]["scale"]
            for layer in plot["layer"]
            if "color" in layer["encoding"]
        )
        assert dict(zip(scale["domain"], scale["range"], strict=True))["vanilla"] == GREY
        assert plot["description"] and plot["width"] == "container"


def test_page_without_the_plot_extra(comparison, monkeypatch):
    """Fails if the page needs altair, or does not say why plots are missing."""
    monkeypatch.setattr(bundle, "NEEDED", ("altair", "no_such_package"))
    html = render_page(load_report(comparison))
    assert html.count("pip install &#x27;regard[plot]&#x27;") == 3 and "<script" not in html
    assert [each["id"] for each in parse_html(html).all("section")] == list(CONTENTS)
    assert len(html) < 100_000


def test_one_length_and_bits(tmp_path, monkeypatch):
    """Fails if more bits are better, or scaling is plotted for a single length."""
    monkeypatch.setitem(TASKS, "rude", Rude)
    found = load_report(
        invented_comparison(tmp_path, tasks="rude", lengths=(8,), metric="bits_per_byte", seeds=1)
    )
    html = render_page(found)
    assert "All tasks were run at one length." in html
    assert EVIL not in html and found.samples == [("rude", 8, RenderedText(EVIL))]
    assert [v.recommended.mixer for v in found.result.verdicts] == [
        v["recommended"] for v in report_to_json(found)["verdicts"]
    ]
    text = " ".join(parse_html(html).texts)
    assert "bits_per_token, lower is better" in html
    assert text.index("vanilla") < text.index("linear", text.index("All results"))


def test_nothing_finished(tmp_path):
    """Fails if a comparison whose runs all failed has no page."""
    html = render_page(load_report(invented_comparison(tmp_path, mixers=())))
    assert "there is no recommendation" in html
    assert [each["id"] for each in parse_html(html).all("section")] == list(CONTENTS)


def test_caveats(comparison):
    """Fails if a verdict hides few seeds, failed runs, few test examples or unequal models."""
    result = load_result(comparison)
    text = " ".join(describe_caveats(result.verdicts[0].caveats))
    assert "2 seeds" in text and "Some runs failed" in text and "Out of time" not in text
    rows = [
        replace(
            row,
            parameters=100 if row.mixer == "linear" else 900,
            test_examples=96 if row.mixer == "linear" else 512,
        )
        for row in result.rows
    ]
    text = " ".join(describe_caveats(compute_verdicts(rows)[0].caveats))
    assert "tested on 96 examples, others on 512" in text
    assert "from 100 to 900 parameters" in text and "failed" not in text
    unfinished = compute_verdicts(rows, {DONE, REFUSED, "waiting"})[0].caveats
    assert "Some runs have not finished." in describe_caveats(unfinished)
    assert compute_verdicts(rows, {DONE, FAILED})[0].caveats.failed_runs


def test_no_recommendation_if_nothing_was_learned(comparison):
    """Fails if the page recommends what does not beat the constant baseline."""
    report = load_report(comparison)
    rows = [
        replace(row, scores=[0.99]) if row.mixer == "constant" else row
        for row in report.result.rows
    ]
    result = replace(report.result, rows=rows, verdicts=compute_verdicts(rows))
    html = render_page(replace(report, result=result))
    assert "nothing was learned" in html and ": none</h3>" in html and "← recommended" not in html
    assert "← recommended" in render_page(report)


# ---------------------------------------------------------------------- plots and pictures
def dominates(a, b, cost, sign):
    """Whether a is at least as good in both score and cost, and better in one."""
    gain = sign * (a.score - b.score)
    saving = (1 if cost.higher_is_better else -1) * (cost.value(a) - cost.value(b))
    return gain >= 0 and saving >= 0 and (gain > 0 or saving > 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
        min_size=1,
        max_size=8,
        unique=True,
    ),
    st.sampled_from((SPEED, MEMORY)),
    st.sampled_from(("accuracy", "bits_per_byte")),
)
def test_the_pareto_front_is_not_dominated(values, cost, metric):
    """Fails if the front lacks a row that no other dominates, or has one that another does.

    Of equal rows it has one.
    """
    rows = [
        ResultRow(
            f"m{i}",
            "t",
            8,
            metric,
            metric == "accuracy",
            [float(score)],
            tokens_per_second=speed,
            peak_bytes=1e6 * size,
        )
        for i, (score, speed, size) in enumerate(values)
    ]
    sign = 1 if metric == "accuracy" else -1
    expected = {
        (row.score, cost.value(row))
        for row in rows
        if not any(dominates(other, row, cost, sign) for other in rows)
    }
    front = [(row.score, cost.value(row)) for row in pareto_front(rows, cost)]
    assert set(front) == expected and len(front) == len(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)), min_size=1, max_size=4))
def test_labels_do_not_overlap(where):
    """Fails if two labels of a plot overlap, or one leaves it; for four there is always room."""
    points = [(x, y, f"name{i}") for i, (x, y) in enumerate(where)]
    width, placed = 5 * LETTER_WIDTH, []
    for (x, _, _), label in zip(points, place_labels(points), strict=True):
        start = x * WIDTH + (-GAP - width if label.left else GAP)
        assert 0 < label.height < 1 and 0 < start < start + width < WIDTH
        for other_start, other_height in placed:
            beside = abs(other_start - start) >= width - 1e-6
            distance = abs(other_height - label.height) * HEIGHT
            assert beside or distance >= LINE_HEIGHT - 1e-6
        placed.append((start, label.height))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[3.0], [1.0, 4.0, 9.0], [0.5, 0.5]])
def test_an_axis_shows_all_values(log, values):
    """Fails if a point would be on the border of a plot or outside."""
    axis = fit_axis(values, margin=0.1, log=log)
    assert all(0 < axis.fraction(value) < 1 for value in values)
    if not log:
        assert axis.value(axis.fraction(values[0])) == pytest.approx(values[0])
        reverse = fit_axis(values, margin=0.1, reverse=True)
        assert reverse.fraction(values[-1]) == pytest.approx(1 - axis.fraction(values[-1]))


def test_curves_are_means_over_all_seeds():
    """Fails if a step counts at which a seed is missing, or the band is not from worst to best."""
    runs = [
        [{"step": s, "seconds": s * k, "valid": s + k} for s in steps]
        for k, steps in ((1, (5, 10, 15)), (3, (5, 10, 12)))
    ]
    expected = [(5, 10.0, 7.0, 6, 8), (10, 20.0, 12.0, 11, 13)]
    assert [tuple(point) for point in average_curves(runs)] == expected
    assert average_curves([[{"step": 1, "seconds": 1.0, "valid": math.nan}]]) == []


def decode_png(address):
    """Decode a PNG: (rows, columns, 4)."""
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (
            zlib.crc32(kind + body),
        )
        chunks[kind], at = body, at + 12 + size
    wide, high = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(high, 1 + 4 * wide)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:].reshape(high, wide, 4)


def test_pictures_are_png_of_the_weights(rand):
    """Fails if an opacity is not the root of its weight, or a cell has the wrong colour."""
    weights = rand(3, 5).abs()
    found = decode_png(png_data_uri(weight_pixels(weights)))
    expected = [
        [round(255 * math.sqrt(float(w) / float(weights.max()))) for w in row] for row in weights
    ]
    assert found[..., 3].tolist() == expected and (found[..., :3] == (46, 110, 216)).all()
    part, shade = torch.tensor([[0, -1], [1, 0]]), torch.tensor([[1.0, 0.0], [1.0, 0.25]])
    found = decode_png(png_data_uri(pattern_pixels(part, shade, [(1, 2, 3), (4, 5, 6)])))
    assert found.reshape(4, 4).tolist() == [
        [1, 2, 3, 255],
        [0, 0, 0, 0],
        [4, 5, 6, 255],
        [1, 2, 3, 166],
    ]


def test_many_tokens_share_cells(rand):
    """Fails if a cell is not the mean of its tokens, the last ones included."""
    weights = rand(7, 7)
    found = downsample(weights, 4)
    for i in range(4):
        for j in range(4):
            cell = weights[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            assert float(found[i, j]) == pytest.approx(float(cell.sum()) / cell.numel())
    assert downsample(weights, 7) is weights


def test_styles_are_distinct():
    """Fails if two of twenty mixers have the same style, or dense softmax is not grey."""
    found = series_styles(["vanilla", *(f"m{i}" for i in range(20))])
    assert (
        len(set(found.values())) == len(found) == 21
        and found["vanilla"].colour == GREY not in COLOURS
    )


# ---------------------------------------------------------------------- real runs
@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two tiny models, trained for two steps: one with a map, one without."""
    folder = tmp_path_factory.mktemp("real")
    plan = ComparisonPlan(tasks=parse_specs("parity"), mixers=parse_specs("gmlp"), lengths=(8,))
    ledger = Ledger(folder / "ledger.sqlite")
    for name in ("vanilla", "gmlp"):
        spec = RunSpec(
            task=ModuleSpec(name="parity", arguments={"length": 8}),
            mixer=ModuleSpec(name=name),
            dim=8,
            heads=2,
            layers=2,
            settings=TrainSettings(steps=2, batch_size=2, eval_every=1, eval_examples=2),
        )
        ledger.add(
            name,
            name,
            {"mixer": {"name": name}, "task": spec.task.model_dump(), "length": 8, "seed": 0},
        )
        ledger.finish(name, run_training(spec, folder / "runs" / name))
    ledger.close()
    write_record(
        folder, ComparisonRecord(plan=plan, command="regard compare", keys=["vanilla", "gmlp"])
    )
    return folder


def test_maps_are_those_of_the_trained_model(real):
    """Fails if the map is not that of the first test example, or a missing one has no reason."""
    found = {each.mixer: each for each in load_report(real).maps}
    tokens = create_task("parity", length=8).example("test", 0).inputs["x"]
    x = load(real / "runs/vanilla/model").eval()
    first = x.attention_maps(tokens[None])[0][0].abs()
    torch.testing.assert_close(found["vanilla"].layers[0], first)
    assert found["vanilla"].tokens == [str(t) for t in tokens.tolist()] and all(
        found["vanilla"].has_target
    )
    torch.testing.assert_close(
        attention_maps(real / "runs/vanilla/model", tokens)[1].sum(-1), torch.ones(2, 8)
    )
    assert found["gmlp"].reason == "this mixer has no attention map"
    html = render_page(load_report(real))
    assert "this mixer has no attention map" in html and html.count('class="map"') == 1
    weights = {m["mixer"]: m["weights"] for m in report_to_json(load_report(real))["maps"]}
    assert weights["gmlp"] is None and np.allclose(
        weights["vanilla"], first.mean(0).detach(), atol=1e-5
    )


def test_a_deleted_model_is_reported(real, tmp_path):
    """Fails if a deleted file breaks the whole page."""
    copy = tmp_path / "copy"
    shutil.copytree(real, copy)
    shutil.rmtree(copy / "runs/vanilla/model")
    (copy / "runs/gmlp/spec.json").unlink()
    found = load_report(copy)
    assert found.maps[0].layers == [] and found.maps[0].reason and list(found.specs) == ["vanilla"]
    assert "no spec.json" in render_page(found)


# ---------------------------------------------------------------------- the command line
def run(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


def test_report_writes_the_page_again(comparison, tmp_path):
    """Fails if the page is written elsewhere, or the JSON lacks something that it shows."""
    path = tmp_path / "deep" / "page.html"
    done = run("report", comparison, "--html", path)
    assert (
        f"Wrote {path}" in done.stderr
        and re.search(r"\(\d\.\d MB\)", done.stderr)
        and path.read_text().startswith("<!doctype")
    )
    found = json.loads(run("report", comparison, "--json").stdout)
    assert set(found) == {
        "version",
        "command",
        "plan",
        "rows",
        "verdicts",
        "differences",
        "search",
        "rungs",
        "costs",
        "load",
        "unique_successes",
        "curves",
        "maps",
        "samples",
        "specs",
        "environments",
    }
    assert {row["mixer"] for row in found["rows"]} == {
        "vanilla",
        "linear",
        EVIL,
        "fnet",
        "local",
        "constant",
    }


def test_compare_writes_the_page_and_the_command(tmp_path, monkeypatch):
    """Fails if the command does not reproduce the plan, or there is no page."""
    monkeypatch.setattr(
        Schedule,
        "run",
        lambda self, runs: [self.ledger.add(r.key, r.name, r.settings()) for r in runs],
    )
    given = [
        "--mixers",
        "linear,local:window=4",
        "--tasks",
        "parity",
        "--lengths",
        "8,16",
        "--no-match-params",
        "--lr",
        "0.01",
    ]
    done = run("compare", *given, "--out", tmp_path, "--json")
    assert json.loads(done.stdout)["verdicts"] == [] and (tmp_path / "report.html").is_file()
    assert done.stderr.splitlines()[-1].startswith(f"Wrote {tmp_path / 'report.html'}")
    record = read_record(tmp_path)
    options = f"--lr 0.01 --no-match-params --out {tmp_path} --json"
    expected = f"regard compare {' '.join(given[:6])} {options}"
    assert sorted(record.command.split()) == sorted(expected.split())
    entries = load_result(tmp_path).entries
    assert len(entries) == len(record.keys)
    assert len({entry_labels(entry) for entry in entries}) == 6
    assert not record.plan.match_params
    elsewhere = tmp_path / "elsewhere.html"
    run("compare", *record.command.split()[2:], "--html", elsewhere)
    assert elsewhere.is_file() and read_record(tmp_path).plan == record.plan


def test_the_demo_writes_a_page(tmp_path, monkeypatch):
    """Fails if calling `compare` as a function stores no command."""

    def prepare(self, begin=None):
        write_record(self.root, self.record)

    monkeypatch.setattr(Comparison, "prepare", prepare)
    monkeypatch.setattr(Comparison, "run", lambda self, on_rung=None: None)
    run("demo", "--out", tmp_path)
    command = read_record(tmp_path).command
    assert command.startswith("regard compare ") and "--mixers " in command
    assert (tmp_path / "report.html").is_file()
    assert "Example: regard report" in run("report", "--help").stdout


def test_report_errors(tmp_path, comparison):
    """Fails if a wrong folder or file gives a traceback."""
    assert "it has no plan.json" in run("report", tmp_path, code=1).stderr
    assert (
        "leave out --html"
        in run("report", comparison, "--json", "--html", tmp_path / "x", code=1).stderr
    )
    for text, words in (
        ("{", "Invalid JSON"),
        ('{"plan": {}}', "plan.tasks"),
        ('{"plam": 1}', "did you mean 'plan'"),
    ):
        (tmp_path / "plan.json").write_text(text)
        assert words in run("report", tmp_path, code=1).stderr
    write_record(tmp_path, read_record(comparison))
    assert "it has no ledger.sqlite" in run("report", tmp_path, code=1).stderr
