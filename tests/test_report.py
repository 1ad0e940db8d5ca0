"""The page of a comparison: what stands on it, that it loads nothing, and how it looks in a browser."""

import base64
import json
import math
import re
import shutil
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.parsing import parse_specs
from regard.compare import ComparisonPlan, ResultRow, Schedule, compute_verdicts
from regard.compare.ledger import Ledger
from regard.compare.record import ComparisonRecord, read_entries, read_record, write_record
from regard.models import ModuleSpec, load
from regard.report import bundle, load_report, render_page, report_to_json
from regard.report.charts import MEMORY, SPEED, pareto_front
from regard.report.curves import points
from regard.report.data import find_caveats
from regard.report.labels import GAP, HEIGHT, LETTER, LINE, WIDTH, axis, place_labels
from regard.report.maps import attention_maps, coarse
from regard.report.markup import SafeHtml, tag
from regard.report.page import CONTENTS
from regard.report.png import pattern_pixels, png_data_uri, weight_pixels
from regard.report.styles import COLOURS, GREY, assign_styles
from regard.tasks import TASKS, create_task
from regard.tasks.probes import ParityTask
from regard.train.run import RunSpec, run_training
from regard.train.settings import TrainSettings

EVIL = "<script>alert('a & b')</script>"
PLOTS = pytest.mark.skipif(
    not bundle.plots_available(), reason="plots need the extra plot (altair and vl-convert-python)"
)


class Rude(ParityTask):
    """Parity that shows its examples as a script, and is judged by bits."""

    metric = "bits"

    def show(self, example):
        return EVIL


def result(score, *, speed=1000.0, memory=5e6, parameters=900, metric="accuracy", seed=0):
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
        "tokens": 2 * speed,
        "parameters": parameters,
        "loss": 1.0,
        "best": score,
        "test": score,
        "metric": metric,
        "stopped": "steps",
        "curve": curve,
        "memory": memory,
        "environment": where,
    }


def made_up(
    folder,
    *,
    tasks="parity",
    lengths=(8, 16),
    mixers=("vanilla", "linear", EVIL),
    metric="accuracy",
    seeds=2,
):
    """A finished comparison with results that nobody measured; `fnet` is refused, `local` failed."""
    plan = ComparisonPlan(
        tasks=parse_specs(tasks),
        mixers=[ModuleSpec(name=m) for m in mixers],
        lengths=lengths,
        seeds=seeds,
    )
    ledger, keys = Ledger(folder / "ledger.sqlite"), []
    for part in plan.tasks:
        for n in lengths:
            for number, mixer in enumerate((*mixers, "fnet", "local")):
                for seed in range(seeds):
                    keys.append(f"{part.name}-{n}-{number}-{seed}")
                    words = {
                        "mixer": {"name": mixer},
                        "task": {"name": part.name, "arguments": {"length": n}},
                    }
                    refusal = f"it cannot be causal: {EVIL}" if mixer == "fnet" else ""
                    ledger.add(
                        keys[-1],
                        f"{mixer} · {n} · {seed}",
                        {**words, "length": n, "seed": seed},
                        refusal=refusal,
                    )
                    if mixer == "local":
                        ledger.fail(keys[-1], "MemoryError: too much")
                    elif mixer != "fnet":
                        cost = {"speed": 900.0 * (number + 1) / n, "memory": 1e6 * n / (number + 1)}
                        ledger.finish(
                            keys[-1],
                            result(
                                0.6 + 0.1 * number + 0.01 * seed, **cost, metric=metric, seed=seed
                            ),
                        )
    ledger.close()
    write_record(
        folder, ComparisonRecord(plan=plan, command=f"regard compare --tasks '{EVIL}'", keys=keys)
    )
    return folder


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return made_up(tmp_path_factory.mktemp("compared"))


@pytest.fixture(scope="module")
def html(comparison):
    return render_page(load_report(comparison))


# ---------------------------------------------------------------------------------------------- the page as text
class Reader(HTMLParser):
    """Keeps the elements, their attributes, and what stands open at the end."""

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


def parsed(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_has_all_sections_in_order(html):
    """Fails if a section is missing, stands elsewhere, or a link of the contents leads nowhere."""
    reader = parsed(html)
    assert [each["id"] for each in reader.all("section")] == list(CONTENTS)
    assert [each["href"] for each in reader.all("a")] == [f"#{name}" for name in CONTENTS]
    assert reader.all("html")[0]["lang"] == "en" and len(reader.all("h1")) == 1


def test_nothing_is_loaded_from_anywhere(html):
    """Fails if a script, picture, style or font has an address other than the page itself."""
    reader = parsed(html)
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
            assert address.startswith(("#", "data:image/png;base64,")), (name, key, address[:80])
        assert name not in ("link", "iframe", "object", "embed", "base"), name
        assert "url(" not in (attributes.get("style") or "")
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert len(styles) == 1 and "url(" not in styles[0] and "@import" not in styles[0]
    policy = next(each["content"] for each in reader.all("meta") if each.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_what_users_write_is_text(html):
    """Fails if the name of a mixer, a refusal or a command becomes a script."""
    reader = parsed(html)
    scripts = reader.all("script")
    assert EVIL not in html
    assert {each.get("type") for each in scripts} <= {None, "application/json"}
    assert sum(each.get("type") is None for each in scripts) == (
        2 if bundle.plots_available() else 0
    )
    text = " ".join(reader.texts)
    assert f"it cannot be causal: {EVIL}" in text and f"--tasks '{EVIL}'" in text


def test_markup_is_escaped_unless_it_is_safe():
    """Fails if text or an attribute can leave its place."""
    assert (
        tag("p", "<b>", SafeHtml("<i>"), class_='"x"')
        == '<p class="&quot;x&quot;">&lt;b&gt;<i></p>'
    )
    assert tag("p", ["a", tag("br")], hidden=True, title=False) == "<p hidden>a<br></p>"


def test_tables_have_headers_and_reasons(html):
    """Fails if a table cannot be read aloud, or a mechanism without a score has no reason."""
    reader = parsed(html)
    assert len(reader.all("table")) == len(reader.all("caption")) == 2
    assert {each.get("scope") for each in reader.all("th")} == {"row", "col"}
    muted = re.findall(r'<tr class="muted">(.*?)</tr>', html)
    assert len(muted) == 4  # two that have no score, at two lengths
    assert any("MemoryError: too much" in row for row in muted) and any(
        "cannot be causal" in row for row in muted
    )
    assert all(each.get("alt") for each in reader.all("img"))


@PLOTS
def test_every_plot_is_there_as_data(html):
    """Fails if a plot misses a mechanism, or gives dense softmax another colour than its own."""
    plots = [
        json.loads(text)
        for text in re.findall(r'<script type="application/json">(.*?)</script>', html)
    ]
    assert (
        len(plots) == 2 * 2 + 2 * 2 + 2
    )  # score against two costs, learning by two, at two lengths; growth of two
    for plot in plots:
        data = [layer.get("data", plot.get("data"))["values"] for layer in plot["layer"]]
        names = {point["mechanism"] for values in data for point in values if "mechanism" in point}
        assert names - {"a constant answer"} == {"vanilla", "linear", EVIL}
        scale = next(
            layer["encoding"]["color"]["scale"]
            for layer in plot["layer"]
            if "color" in layer["encoding"]
        )
        assert dict(zip(scale["domain"], scale["range"], strict=True))["vanilla"] == GREY
        assert plot["description"] and plot["width"] == "container"


def test_without_the_extra_the_page_says_so(comparison, monkeypatch):
    """Fails if the page needs altair, or leaves plots out in silence."""
    monkeypatch.setattr(bundle, "NEEDED", ("altair", "no_such_package"))
    html = render_page(load_report(comparison))
    assert html.count("pip install &#x27;regard[plot]&#x27;") == 3 and "<script" not in html
    assert [each["id"] for each in parsed(html).all("section")] == list(CONTENTS) and len(
        html
    ) < 100_000


def test_one_length_and_bits(tmp_path, monkeypatch):
    """Fails if less is not better for bits, or growth is drawn from one length."""
    monkeypatch.setitem(TASKS, "rude", Rude)
    found = load_report(made_up(tmp_path, tasks="rude", lengths=(8,), metric="bits", seeds=1))
    html = render_page(found)
    assert (
        "run at one length only" in html
        and EVIL not in html
        and found.samples == [("rude", 8, EVIL)]
    )
    assert [v.take.mixer for v in found.verdicts] == [
        v["take"] for v in report_to_json(found)["verdicts"]
    ]
    text = " ".join(parsed(html).texts)
    assert "less is better" in html or not bundle.plots_available()
    assert text.index("vanilla") < text.index("linear", text.index("All results"))


def test_nothing_finished(tmp_path):
    """Fails if a comparison in which all failed has no page."""
    html = render_page(load_report(made_up(tmp_path, mixers=())))
    assert "nothing can be recommended" in html and [
        s["id"] for s in parsed(html).all("section")
    ] == list(CONTENTS)


def test_doubts(comparison):
    """Fails if a recommendation hides that nothing was learned, that seeds are few, or that runs failed."""
    found = load_report(comparison)
    said = " ".join(find_caveats(found, found.verdicts[0]))
    assert "2 seeds" in said and "Some runs failed" in said and "Time was short" not in said
    rows = [
        replace(r, parameters=r.parameters or 100, examples=96 if r.mixer == "linear" else 512)
        for r in found.rows
    ]
    said = " ".join(find_caveats(replace(found, rows=rows), found.verdicts[0]))
    assert "on 96 test examples, others on 512" in said and "from 100 to 900 parameters" in said


def test_where_nothing_was_learned_nothing_is_taken(comparison):
    """Fails if the page recommends what is no better than a constant answer."""
    found = load_report(comparison)
    low = [replace(row, scores=[0.99]) if row.mixer == "constant" else row for row in found.rows]
    html = render_page(replace(found, rows=low, verdicts=compute_verdicts(low)))
    assert "nothing was learned" in html and "nothing yet" in html and "take this" not in html


# ---------------------------------------------------------------------------------------------- its parts
def beats(a, b, cost, sign):
    """Whether a is at least as good in both, and better in one."""
    gain, saving = sign * (a.score - b.score), (1 if cost.more else -1) * (cost.of(a) - cost.of(b))
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
    st.sampled_from(("accuracy", "bits")),
)
def test_the_front_is_what_nothing_beats(values, cost, metric):
    """Fails if the line misses a mechanism that no other beats, or has one that another does.  Of equals, it has one."""
    rows = [
        ResultRow(f"m{i}", "t", 8, metric, [float(s)], speed=float(v), memory=1e6 * m)
        for i, (s, v, m) in enumerate(values)
    ]
    sign = 1 if metric == "accuracy" else -1
    expected = {
        (r.score, cost.of(r)) for r in rows if not any(beats(o, r, cost, sign) for o in rows)
    }
    found = [(r.score, cost.of(r)) for r in pareto_front(rows, cost)]
    assert set(found) == expected and len(found) == len(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)), min_size=1, max_size=4))
def test_names_do_not_lie_on_each_other(where):
    """Fails if two names of a plot overlap, or one leaves it; with four there is always room."""
    named = [(x, y, f"name{i}") for i, (x, y) in enumerate(where)]
    wide, spots = 5 * LETTER, []
    for (x, _, _), label in zip(named, place_labels(named), strict=True):
        start = x * WIDTH + (-GAP - wide if label.left else GAP)
        assert 0 < label.share < 1 and 0 < start < start + wide < WIDTH
        for other, height in spots:
            assert (
                abs(other - start) >= wide - 1e-6
                or abs(height - label.share) * HEIGHT >= LINE - 1e-6
            )
        spots.append((start, label.share))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[3.0], [1.0, 4.0, 9.0], [0.5, 0.5]])
def test_an_axis_holds_all_values(log, values):
    """Fails if a point would stand on the rim of a plot or beyond it."""
    along = axis(values, margin=0.1, log=log)
    assert all(0 < along.share(v) < 1 for v in values)
    if not log:
        assert along.at(along.share(values[0])) == pytest.approx(values[0])
        down = axis(values, margin=0.1, down=True)
        assert down.share(values[-1]) == pytest.approx(1 - along.share(values[-1]))


def test_curves_are_means_over_all_seeds():
    """Fails if a step counts that one seed was not judged at, or the band is not from the worst to the best."""
    runs = [
        [{"step": s, "seconds": s * k, "valid": s + k} for s in steps]
        for k, steps in ((1, (5, 10, 15)), (3, (5, 10, 12)))
    ]
    assert [tuple(p) for p in points(runs)] == [(5, 10.0, 7.0, 6, 8), (10, 20.0, 12.0, 11, 13)]
    assert points([[{"step": 1, "seconds": 1.0, "valid": math.nan}]]) == []


def pixels(address):
    """A PNG read by hand: (rows columns 4)."""
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
    """Fails if a pixel is not as opaque as the root of its weight, or a pattern's cell has another colour."""
    weights = rand(3, 5).abs()
    found = pixels(png_data_uri(weight_pixels(weights)))
    expected = [
        [round(255 * math.sqrt(float(w) / float(weights.max()))) for w in row] for row in weights
    ]
    assert found[..., 3].tolist() == expected and (found[..., :3] == (46, 110, 216)).all()
    part, shade = torch.tensor([[0, -1], [1, 0]]), torch.tensor([[1.0, 0.0], [1.0, 0.25]])
    found = pixels(png_data_uri(pattern_pixels(part, shade, [(1, 2, 3), (4, 5, 6)])))
    assert found.reshape(4, 4).tolist() == [
        [1, 2, 3, 255],
        [0, 0, 0, 0],
        [4, 5, 6, 255],
        [1, 2, 3, 166],
    ]


def test_many_tokens_share_cells(rand):
    """Fails if a cell is not the mean of its tokens, the last ones included."""
    weights = rand(7, 7)
    found = coarse(weights, 4)
    for i in range(4):
        for j in range(4):
            cell = weights[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            assert float(found[i, j]) == pytest.approx(float(cell.sum()) / cell.numel())
    assert coarse(weights, 7) is weights


def test_no_two_of_twenty_mechanisms_look_alike():
    """Fails if two cannot be told apart, or dense softmax is not grey."""
    found = assign_styles(["constant", "vanilla", *(f"m{i}" for i in range(20))])
    assert (
        len(set(found.values())) == len(found) == 21
        and found["vanilla"].colour == GREY not in COLOURS
    )


# ---------------------------------------------------------------------------------------------- real runs
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
            settings=TrainSettings(steps=2, batch=2, evaluate=1, examples=2),
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
    """Fails if the map is not the model's on the first test example, or a mixer without one is passed over in silence."""
    found = {each.mixer: each for each in load_report(real).maps}
    tokens = create_task("parity", length=8).example("test", 0).tokens
    x = load(real / "runs/vanilla/model").eval()
    first = x.attention(tokens[None])[0][0].abs()
    torch.testing.assert_close(found["vanilla"].layers[0], first)
    assert found["vanilla"].tokens == [str(t) for t in tokens.tolist()] and all(
        found["vanilla"].asked
    )
    torch.testing.assert_close(
        attention_maps(real / "runs/vanilla/model", tokens)[1].sum(-1), torch.ones(2, 8)
    )
    assert found["gmlp"].why == "this mixer has no attention map"
    html = render_page(load_report(real))
    assert "this mixer has no attention map" in html and html.count('class="map"') == 1
    weights = {m["mixer"]: m["weights"] for m in report_to_json(load_report(real))["maps"]}
    assert weights["gmlp"] is None and np.allclose(
        weights["vanilla"], first.mean(0).detach(), atol=1e-5
    )


def test_a_model_that_is_gone_is_said(real, tmp_path):
    """Fails if a file that was deleted takes the whole page with it."""
    copy = tmp_path / "copy"
    shutil.copytree(real, copy)
    shutil.rmtree(copy / "runs/vanilla/model")
    (copy / "runs/gmlp/spec.json").unlink()
    found = load_report(copy)
    assert found.maps[0].layers == [] and found.maps[0].why and list(found.specs) == ["vanilla"]
    assert "no spec.json" in render_page(found)


# ---------------------------------------------------------------------------------------------- the command line
def run(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


def test_report_writes_the_page_again(comparison, tmp_path):
    """Fails if the page goes elsewhere, or the JSON is not all that stands on it."""
    path = tmp_path / "deep" / "page.html"
    done = run("report", comparison, "--html", path)
    assert (
        f"wrote {path}" in done.stderr
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


def test_compare_writes_the_page_and_how_to_have_it_again(tmp_path, monkeypatch):
    """Fails if the command on the page is not the plan, or there is no page at the end."""
    monkeypatch.setattr(
        Schedule,
        "run",
        lambda self, cells: [self.ledger.add(c.key, c.name, _words(c)) for c in cells],
    )
    given = [
        "--mixers",
        "linear,local:window=4",
        "--tasks",
        "parity",
        "--lengths",
        "8,16",
        "--no-equal",
        "--rate",
        "0.01",
    ]
    done = run("compare", *given, "--out", tmp_path, "--json")
    assert json.loads(done.stdout)["verdicts"] == [] and (tmp_path / "report.html").is_file()
    assert done.stderr.splitlines()[-1].startswith(f"wrote {tmp_path / 'report.html'}")
    record = read_record(tmp_path)
    assert (
        record.command
        == f"regard compare {' '.join(given[:6])} --rate 0.01 --no-equal --out {tmp_path} --json"
    )
    assert (
        len(read_entries(tmp_path, record)) == len(record.keys) == 6
        and not record.plan.match_params
    )
    elsewhere = tmp_path / "elsewhere.html"
    run("compare", *record.command.split()[2:], "--html", elsewhere)
    assert elsewhere.is_file() and read_record(tmp_path).plan == record.plan


def test_the_demo_has_a_page_too(tmp_path, monkeypatch):
    """Fails if a command that calls `compare` as a function has no command on its page."""
    monkeypatch.setattr(
        Schedule,
        "run",
        lambda self, cells: [self.ledger.add(c.key, c.name, _words(c)) for c in cells],
    )
    run("demo", "--out", tmp_path)
    assert (
        read_record(tmp_path).command.startswith("regard compare --mixers ")
        and (tmp_path / "report.html").is_file()
    )
    assert "Example: regard report" in run("report", "--help").stdout


def _words(cell):
    return {
        "mixer": cell.mixer.model_dump(),
        "task": cell.task.model_dump(),
        "length": cell.length,
        "seed": cell.seed,
    }


def test_what_is_no_comparison_is_refused(tmp_path, comparison):
    """Fails if a wrong folder or file is met with a traceback."""
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


# ---------------------------------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.slow
@PLOTS
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_opens_offline(browser, html, tmp_path, width, scheme):
    """Fails if a plot is not drawn, the console complains, something is asked from a network, or the page is too wide."""
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
    )
    shown, said, asked = context.new_page(), [], []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(path.as_uri())
    shown.wait_for_function("document.documentElement.dataset.drawn === 'yes'", timeout=60_000)
    assert said == [] and [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert (
        shown.evaluate("document.querySelectorAll('.plot svg').length")
        == html.count('class="plot"')
        == 10
    )
    assert shown.evaluate(
        "[...document.querySelectorAll('.plot')].every(p => p.querySelectorAll('path').length > 5)"
    )
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.evaluate(
        "[...document.querySelectorAll('.plot svg')].every(s => s.getBoundingClientRect().width > 250)"
    )
    context.close()
