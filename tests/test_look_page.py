"""The page of `regard look` in a real browser: offline, with hostile texts, by mouse and keys."""

import base64
import json
import re
import time
from itertools import pairwise

import numpy as np
import pytest

import views
from browser import TIMEOUT, Browser, find_chromium
from regard.inspection.page import notebook_html, render_page, write_page
from regard.inspection.page.render import script_json

READY = "document.documentElement?.dataset.drawn === 'yes'"
HOSTILE = [
    "<img src=x onerror='window.ran=1'>",
    "</script><script>window.ran=1</script>",
    "<!--<script>",
    "]]>&lt;b&gt;\u2028\u2029",
    "\u202etfel ot thgir\u2066",
    "zero\0byte\x1b[31m\x9b",
    "half \ud800 of a pair",
    "10,000 " + "x" * 9993,
    "",
    "  ",
    "\n",
    "${window.ran=1}`'\"",
]
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_chromium()
    if path is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    opened = Browser(path, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def open_page(browser, view, path, *, width=1280, scheme="light", address=""):
    """Write a view, open it, and check that nothing was said or loaded."""
    write_page(view, path)
    browser.open(path.as_uri() + address, width, scheme=scheme)
    browser.wait_for(f"{READY} && location.href.startsWith({json.dumps(path.as_uri())})")
    assert browser.messages == []


def text_of(browser, selector):
    return browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def settle(browser):
    """Wait until what was chosen is drawn."""
    browser.call("Runtime.evaluate", expression=SETTLED, awaitPromise=True)
    assert browser.messages == []


SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


# ---------------------------------------------------------------------------------- opening
SECTIONS = {
    "text": "heads tokens layers numbers spectrum importance attribution lens results",
    "image": "heads picture tokens layers numbers spectrum",
    "translation": "heads tokens layers numbers spectrum",
    "pair": "heads compare tokens layers numbers spectrum importance attribution lens results",
    "long": "heads tokens layers numbers spectrum",
}


@pytest.mark.parametrize("name", SECTIONS)
def test_page_opens_offline(browser, tmp_path, name):
    """Fails if a section is missing or empty, an address is loaded, the console has a message, a
    control has no name, or the page is wider than the window."""
    view = getattr(views, f"{name}_view")()
    for width, scheme in ((1280, "light"), (400, "dark")):
        open_page(browser, view, tmp_path / "view.html", width=width, scheme=scheme)
        settle(browser)
        shown = "[...document.querySelectorAll('main > section:not([hidden])')].map(s => s.id)"
        assert browser.evaluate(f"{shown}.join(' ')") == SECTIONS[name]
        loaded = [url for url in browser.requests if not url.startswith(("file:", "data:"))]
        assert loaded == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        drawn = """[...document.querySelectorAll('.heat canvas')].every(canvas => {
          const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(pixels.data.buffer)).size > 20;
        })"""
        assert browser.evaluate(drawn)
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = ("button", "combobox", "checkbox", "spinbutton", "link", "image", "option", "img")
    nameless = [
        node
        for node in tree
        if node.get("role", {}).get("value") in controls
        and not node["ignored"]
        and not node["name"]["value"]
    ]
    assert nameless == []


def test_page_of_many_heads_is_small(browser, tmp_path):
    """Fails if 100 tokens, 12 layers and 12 heads take 5 MB, or do not open."""
    view = views.text_view([f"t{i}" for i in range(100)], layers=12, heads=12)
    path = tmp_path / "view.html"
    assert write_page(view, path) < 5_000_000
    open_page(browser, view, path)
    assert browser.evaluate("document.querySelectorAll('#overview button').length") == 144


def test_page_in_a_notebook(browser, tmp_path):
    """Fails if the page does not draw in the frame that a notebook shows, which has no address."""
    path = tmp_path / "notebook.html"
    path.write_text(notebook_html(views.text_view()), encoding="utf-8")
    browser.open(path, 1000)
    drawn = f"{READY} && document.querySelectorAll('#overview button').length"
    deadline, found = time.monotonic() + TIMEOUT, None
    while not found:
        assert time.monotonic() < deadline, browser.messages
        time.sleep(0.1)
        targets = browser.send("Target.getTargets")["targetInfos"]
        for frame in (each["targetId"] for each in targets if each["type"] == "iframe"):
            session = browser.send("Target.attachToTarget", targetId=frame, flatten=True)
            found = browser.send("Runtime.evaluate", session["sessionId"], expression=drawn)
            found = found["result"]["value"]
    assert found == 12
    assert browser.messages == []


def test_views_that_are_refused(tmp_path):
    """Fails if a page is written that would load a picture, or cannot be read back."""
    view = views.image_view()
    view["sequences"][0]["image"] = "https://example.com/a.png"
    with pytest.raises(ValueError, match="must be data URIs"):
        render_page(view)
    with pytest.raises(ValueError, match="format 99"):
        render_page(views.text_view() | {"format": 99})
    with pytest.raises(ValueError, match="no model"):
        render_page(views.text_view() | {"models": []})
    (tmp_path / "link.html").symlink_to(tmp_path / "target.html")
    with pytest.raises(ValueError, match="symbolic link"):
        write_page(views.text_view(), tmp_path / "link.html")


def test_models_without_maps(browser, tmp_path):
    """Fails if a model without a layer, or without any map, is not shown with its reason."""
    none = {"kind": "none", "error": None, "tiles": [], "metrics": {}, "chance": {}}
    none |= {"reason": "its <b>layers</b> have no maps", "spectrum": []}
    data = views.make_map_data(0, 5, 5) | none
    sequence = views.text_sequence("abcde")
    path = tmp_path / "view.html"
    open_page(browser, views.make_view([views.make_model([data])], [sequence]), path)
    assert "its <b>layers</b> have no maps" in text_of(browser, "#head-kind")
    open_page(browser, views.make_view([views.make_model([])], [sequence]), path)
    assert browser.evaluate("document.querySelectorAll('main > section:not([hidden])').length") == 0
    one = views.make_map_data(0, 1, 1, 1)
    open_page(browser, views.make_view([views.make_model([one])], [views.text_sequence("a")]), path)


# ----------------------------------------------------------------------------- hostile texts
def test_hostile_texts_stay_text(browser, tmp_path):
    """Fails if a text of the user is run, read as HTML, reverses the page or makes it wider."""
    view = views.text_view(HOSTILE, layers=2)
    view["title"] = "</title>" + "".join(HOSTILE)
    view["notes"] = list(HOSTILE)
    model = view["models"][0]
    model |= {"name": HOSTILE[1], "prediction": HOSTILE[0]}
    model["attribution"] = {HOSTILE[0]: [1.0] * len(HOSTILE)}
    model["tables"][0] |= {"title": HOSTILE[1], "caption": HOSTILE[4], "columns": HOSTILE[:2]}
    model["tables"][0]["rows"] = [[text, text] for text in HOSTILE]
    model["figures"][0] |= {"title": HOSTILE[0], "caption": HOSTILE[1]}
    for data in model["maps"]:
        data |= {"name": HOSTILE[0], "mixer": HOSTILE[4] + HOSTILE[5], "reason": HOSTILE[1]}
        data["metrics"] = {text: [0.5] * 4 for text in HOSTILE if text}
    other = json.loads(json.dumps(model)) | {"name": HOSTILE[0]}
    view["models"].append(other)
    view["matches"] = [{"first": [0, 0], "second": [1, 1], "similarity": 1, "same_place": 0.5}]

    for width in (1280, 400):
        open_page(browser, view, tmp_path / "view.html", width=width)
        assert browser.evaluate("typeof window.ran") == "undefined"
        assert browser.evaluate("document.querySelectorAll('img, script, b').length") == 1 + 3
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        shown = browser.evaluate("document.body.innerText + document.title")
        assert "<img src=x" in shown and "</script><script>" in shown and r"\u{202e}tfel" in shown
        assert not CONTROLS.search(shown)
        assert "x" * 2000 not in shown
    assert browser.evaluate("document.querySelectorAll('#links .slot').length") == 2 * len(HOSTILE)
    assert text_of(browser, "#links .slot:nth-child(9)") == "∅"


def test_json_in_the_page_is_the_view():
    """Fails if the data could end their element, or differ from the view."""
    view = views.text_view(HOSTILE)
    text = script_json(view)
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == json.loads(json.dumps(view))
    page = render_page(view)
    assert page.count("</script>") == 3 and page.count("<script") == 3


def test_policy_lets_only_the_scripts_of_the_page_run(browser, tmp_path):
    """Fails if a script that got into the page would run, or could send what it found."""
    path = tmp_path / "view.html"
    page = render_page(views.text_view())
    injected = "<script>window.ran = 1</script><img src='data:,' onerror='window.ran = 1'>"
    path.write_text(page.replace("<noscript>", injected + "<noscript>"), encoding="utf-8")
    browser.open(path, 800)
    browser.wait_for(READY)
    assert browser.evaluate("typeof window.ran") == "undefined"
    assert any("Content Security Policy" in message for message in browser.messages)
    send = "fetch('http://127.0.0.1:9/').then(() => 'sent', error => 'refused')"
    found = browser.call("Runtime.evaluate", expression=send, awaitPromise=True)
    assert found["result"]["value"] == "refused"
    assert "http://127.0.0.1:9/" not in browser.requests


# ------------------------------------------------------------------------------- interaction


def weight_of(view, q, k, head, model=0, layer=0):
    """The weight of a cell as it is in the first tile."""
    tile = view["models"][model]["maps"][layer]["tiles"][0]
    values = np.frombuffer(base64.b64decode(tile["weights"]), np.uint8)
    values = values.reshape(-1, tile["rows"], tile["columns"])
    return values[head, q, k] / 255 * tile["scale"][head]


def test_keys_move_over_the_map(browser, tmp_path):
    """Fails if arrow keys, zoom keys or Enter do not work on the map, or it says a wrong weight."""
    view = views.text_view()
    open_page(browser, view, tmp_path / "view.html", address="#token=0")
    browser.evaluate("document.querySelector('#head-map canvas').focus()")
    for key in ["ArrowDown"] * 3 + ["ArrowRight"] * 2:
        browser.press(key)
    said = text_of(browser, "#head-map .tip")
    weight = weight_of(view, 3, 2, 0)
    shown = f"{weight:.0%}" if weight >= 0.0995 else f"{weight:.1%}"
    assert said == f"not (3) → did (2): {shown}"
    browser.wait_for(f"document.getElementById('live').textContent === {json.dumps(said)}")
    browser.press("Enter")
    settle(browser)
    assert browser.evaluate("location.hash") == "#token=3"
    assert "not looks at" in text_of(browser, "#in-out")
    browser.press("+")
    settle(browser)
    assert re.search(r"zoom=\d+-\d+%2C\d+-\d+", browser.evaluate("location.hash"))
    browser.press("0")
    settle(browser)
    assert browser.evaluate("location.hash") == "#token=3"


def test_mouse(browser, tmp_path):
    """Fails if hovering tells no weight, or a click on a head, a token, a row or a bar opens
    nothing."""
    view = views.text_view()
    open_page(browser, view, tmp_path / "view.html")
    x, y = browser.middle("#head-map canvas")
    browser.hover(x, y)
    said = text_of(browser, "#head-map .tip")
    q, k = map(int, re.findall(r"\((\d+)\)", said))
    weight = weight_of(view, q, k, 0)
    assert said.endswith(f"{weight:.0%}" if weight >= 0.0995 else f"{weight:.1%}") or weight < 5e-4

    browser.click("#overview .thumbnail-row:nth-child(2) button:nth-child(3)")
    settle(browser)
    assert browser.evaluate("location.hash") == "#map=1&head=2"
    assert text_of(browser, "#head-title").startswith("Layer 1, head 2")

    browser.click("#links .side.left .slot:nth-child(2)")
    settle(browser)
    assert browser.evaluate("location.hash") == "#map=1&head=2&token=1"
    shaded = "[...document.querySelectorAll('#links .right .slot')].filter(s => s.style.background)"
    assert browser.evaluate(f"{shaded}.length") > 5

    browser.click("#table thead th:nth-child(3) button")
    numbers = browser.evaluate(
        "[...document.querySelectorAll('#table tbody td:nth-child(3)')].map(td => td.row ?? "
        "parseFloat(td.firstChild.textContent))"
    )
    assert numbers == sorted(numbers, reverse=True)
    assert browser.evaluate("document.querySelectorAll('th[aria-sort=descending]').length") == 1
    browser.click("#table tbody tr:nth-child(4) th button")
    settle(browser)
    opened = text_of(browser, "#table tbody tr:nth-child(4) th")
    assert text_of(browser, "#head-title").startswith(opened)

    browser.click("#importance-bars li:first-child button")
    settle(browser)
    assert text_of(browser, "#head-title").startswith(
        text_of(browser, "#importance-bars li:first-child .bar-name")
    )


def test_address_keeps_the_view(browser, tmp_path):
    """Fails if an address does not bring back what was chosen, or a broken one breaks the page."""
    view, path = views.pair_view(), tmp_path / "view.html"
    address = "#model=1&map=1&head=all&token=4&side=key&contrast=even&pair=7&zoom=2-8%2C3-9"
    open_page(browser, view, path, address=address)
    assert text_of(browser, "#head-title").startswith("Layer 11, all heads")
    assert text_of(browser, "#token-picker .token-name") == "cross"
    assert browser.evaluate("document.querySelectorAll('#links .left .slot').length") == 6
    assert text_of(browser, "#pair figure:nth-child(2) h3").startswith("another model: Layer 11")
    assert "Influence" in text_of(browser, "#head-kind")
    assert text_of(browser, "#bar .choice") == "a modelanother model"
    browser.click("#bar .stepper:nth-child(3) button:first-child")
    settle(browser)
    assert "head=3&token=4&side=key&contrast=even&pair=7" in browser.evaluate("location.hash")
    for broken in ("#map=999&head=-1&token=1e9", "#zoom=9-1%2C0-0&model=x", "#%00=%FF", "#at=<b>"):
        open_page(browser, view, path, address=broken)
        assert text_of(browser, "#head-title").startswith("Layer")


def test_cells_of_several_tokens(browser, tmp_path):
    """Fails if the tokens of a cell are not those of Python, where sizes do not divide, or a finer
    tile is not used where there is one."""
    weights = views.make_map(10, 10, 1, 0)
    data = views.make_map_data(0, 10, 10, 1)
    data["tiles"] = [views.make_tile(weights, 3), views.make_tile(weights, q=(4, 7), k=(4, 7))]
    view = views.make_view([views.make_model([data])], [views.text_sequence("abcdefghij")])
    open_page(browser, view, tmp_path / "view.html", address="#token=0")
    browser.evaluate("document.querySelector('#head-map canvas').focus()")
    starts = [i * 10 // 3 for i in range(4)]
    cell = [f"{a}–{b - 1}" for a, b in pairwise(starts)]
    assert text_of(browser, "#head-map .tip").startswith(f"tokens {cell[0]} → {cell[0]}: ")
    seen = set()
    for _ in range(10):
        browser.press("ArrowDown")
        seen.add(text_of(browser, "#head-map .tip").partition(":")[0])
    assert seen == {f"tokens {rows} → {cell[0]}" for rows in cell}
    browser.evaluate("location.hash = '#token=5'")
    settle(browser)
    bars = "[...document.querySelectorAll('#in-out ol:nth-of-type(1) .bar-name')]"
    assert browser.evaluate(f"{bars}.length") == 8


def test_zooming_into_a_long_map(browser, tmp_path):
    """Fails if zooming by buttons does not reach single tokens in the finer tile."""
    view = views.long_view()
    open_page(browser, view, tmp_path / "view.html", address="#zoom=0-64%2C0-64&token=3")
    said = "document.querySelector('#head-map .tip').textContent"
    browser.evaluate("document.querySelector('#head-map canvas').focus()")
    assert browser.evaluate(said).startswith("3 (3) → 3 (3): ")
    assert browser.evaluate("document.querySelectorAll('#links .left .slot').length") == 64
    for _ in range(3):
        browser.click("#head-map .under button:last-child")
    settle(browser)
    assert browser.evaluate("document.querySelectorAll('#links .left .slot').length") == 64
    assert "these are groups" in text_of(browser, "#links")
    assert "A cell is the mean of 128 × 128 tokens" in text_of(browser, "#head-map .coarseness")
    browser.click("#head-map .coarseness button")
    settle(browser)
    assert browser.evaluate("location.hash").startswith("#token=3&zoom=0-256%2C0-256")
    assert text_of(browser, "#head-map .coarseness") == ""
