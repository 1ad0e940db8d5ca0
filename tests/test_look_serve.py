"""`regard look --serve`: who may ask, what is refused, and the page in a browser with a server."""

import http.client
import json
import re
import threading
import time

import pytest

import views
from browser import Browser, find_chromium

pytest.importorskip("fastapi", reason="the server needs the extra web: pip install 'regard[web]'")
uvicorn = pytest.importorskip("uvicorn", reason="the server needs the extra web")

from regard.inspection import serve as serving  # noqa: E402

TOKEN = "a-token-of-the-test"
LENGTH = 600


class FakeSession:
    """A model with known maps: two heads over LENGTH tokens, at first in cells of 10 tokens."""

    def __init__(self):
        self.weights = views.make_map(LENGTH, LENGTH, 2, 0)
        self.tiles_asked = []

    def view(self):
        return self.view_of([f"t{i}" for i in range(LENGTH)])

    def view_of(self, tokens, title="Served <b>"):
        weights = self.weights[:, : len(tokens), : len(tokens)]
        data = views.make_map_data(0, 8, 8, 2) | {"tiles": [views.make_tile(weights, 60)]}
        model = views.make_model([data], prediction="yes")
        return views.make_view([model], [views.text_sequence(tokens)], title, server=True)

    def tile(self, model, map, queries, keys, *, rows, columns):
        if (model, map) != (0, 0) or max(queries[1], keys[1]) > LENGTH:
            raise ValueError(f"there is no map {map} of model {model}")
        assert rows <= queries[1] - queries[0] and columns <= keys[1] - keys[0]
        self.tiles_asked.append((queries, keys))
        return views.make_tile(self.weights, max(rows, columns), q=queries, k=keys)

    def intervene(self, model, edits):
        if any(edit.get("example") == "" for edit in edits):
            raise ValueError("example is empty: <b>write</b> a text")
        before = {"prediction": "yes", "probabilities": [["yes", 0.9], ["no", 0.1]]}
        after = {"prediction": "no", "probabilities": [["no", 0.7], ["yes", 0.3]]}
        metric = {"name": "accuracy", "before": 0.9, "after": 0.1 * len(edits), "examples": 100}
        return {"before": before, "after": after, "metric": metric}

    def look(self, texts):
        if not texts[0]:
            raise ValueError("the text is empty")
        return self.view_of(texts[0].split(), "Another")


@pytest.fixture(scope="module")
def server():
    """A session and the port of its server, which runs in a thread."""
    session, started = FakeSession(), threading.Event()
    found = {}

    def on_start(url):
        found["url"] = url
        started.set()

    servers = []
    run = uvicorn.Server.run

    def keep(self, *arguments, **options):
        servers.append(self)
        run(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", keep)
        patch.setattr(serving.secrets, "token_urlsafe", lambda size: TOKEN)
        thread = threading.Thread(
            target=serving.serve, args=(session,), kwargs={"on_start": on_start}
        )
        thread.start()
        assert started.wait(20)
        yield session, int(found["url"].split(":")[2].split("/")[0])
        servers[0].should_exit = True
        thread.join(20)
    assert not thread.is_alive()


TILE = {"model": 0, "map": 0, "queries": [5, 9], "keys": [0, 3], "rows": 4, "columns": 3}


def send(server, method="POST", path=f"/{TOKEN}/api/tile", body=None, headers=None):
    """Send a request, with a Host header unless there is another; return status and text."""
    port = server[1]
    body = json.dumps(TILE | {"revision": 0}) if body is None and method == "POST" else body
    given = {"Host": f"127.0.0.1:{port}"}
    if method == "POST":
        given |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    given |= headers or {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in given.items():
        if value is not None:
            connection.putheader(name, value.replace("PORT", str(port)))
    connection.endheaders(body.encode() if body else None)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.getheader("referrer-policy") == "no-referrer"
    assert answer.getheader("access-control-allow-origin") is None
    return answer.status, text


def test_answers_to_the_page(server):
    """Fails if a question of the page gets no answer, or the tile is not the one asked for."""
    status, text = send(server, "GET", f"/{TOKEN}/")
    assert status == 200 and "connect-src &#x27;self&#x27;" in text and r"\u003cb\u003e" in text
    status, text = send(server, headers={"Origin": "http://127.0.0.1:PORT"})
    wanted = views.make_tile(server[0].weights, q=(5, 9), k=(0, 3))
    assert status == 200 and json.loads(text) == wanted
    status, _ = send(server, headers={"Host": "localhost:PORT", "Sec-Fetch-Site": "same-origin"})
    assert status == 200


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (421, {"headers": {"Host": "evil.example:PORT"}}),
        (421, {"headers": {"Host": "127.0.0.1"}}),
        (421, {"method": "GET", "path": f"/{TOKEN}/", "headers": {"Host": "evil.example"}}),
        (403, {"headers": {"Origin": "http://evil.example"}}),
        (403, {"headers": {"Origin": "null"}}),
        (403, {"headers": {"Origin": "http://localhost:PORT"}}),  # the Host is 127.0.0.1
        (403, {"headers": {"Sec-Fetch-Site": "cross-site"}}),
        (404, {"path": "/api/tile"}),
        (404, {"path": "/another-token/api/tile"}),
        (404, {"method": "GET", "path": "/"}),
        (404, {"method": "GET", "path": f"/{TOKEN}"}),
        (404, {"method": "GET", "path": f"/{TOKEN}/docs"}),
        (404, {"method": "GET", "path": f"/{TOKEN}/../etc/passwd"}),
        (405, {"method": "GET"}),
        (415, {"headers": {"Content-Type": "text/plain"}}),
        (411, {"headers": {"Content-Length": None, "Transfer-Encoding": "chunked"}, "body": ""}),
        (413, {"headers": {"Content-Length": "4000001"}, "body": ""}),
        (422, {"body": "{"}),
        (422, {"body": "[]"}),
        (422, {"body": json.dumps(TILE)}),
        (422, {"body": json.dumps(TILE | {"revision": 0, "rows": 513})}),
        (422, {"body": json.dumps(TILE | {"revision": 0, "model": -1})}),
        (422, {"body": json.dumps(TILE | {"revision": 0, "keys": [0, 1, 2]})}),
        (422, {"body": json.dumps(TILE | {"revision": 0, "other": 1})}),
        (400, {"body": json.dumps(TILE | {"revision": 7})}),
        (400, {"body": json.dumps(TILE | {"revision": 0, "keys": [3, 3]})}),
        (400, {"body": json.dumps(TILE | {"revision": 0, "model": 5})}),
        (400, {"body": json.dumps(TILE | {"revision": 0, "keys": [0, 10**9]})}),
    ],
)
def test_refusals(server, status, changes):
    """Fails if a request that is not of this page, too large or senseless reaches the model."""
    asked = len(server[0].tiles_asked)
    found, text = send(server, **changes)
    assert found == status, text
    assert len(server[0].tiles_asked) == asked
    assert "Traceback" not in text and TOKEN not in text


def test_port_that_is_taken(server):
    """Fails if a port that is in use, or that is none, ends in a traceback."""
    for port in (server[1], 99_999):
        with pytest.raises(ValueError, match="Cannot listen on port"):
            serving.serve(server[0], port=port)


# -------------------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_chromium()
    if path is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    opened = Browser(path, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def test_page_with_a_server(server, browser):
    """Fails if zooming does not sharpen the map, an intervention shows no change or its error, or
    another text is not shown."""
    session, port = server
    url = f"http://127.0.0.1:{port}/{TOKEN}/"
    browser.open(url, 1280)
    browser.wait_for("document.documentElement?.dataset.drawn === 'yes'")
    tip = "document.querySelector('#head-map .tip').textContent"
    browser.evaluate("document.querySelector('#head-map canvas').focus()")
    assert browser.evaluate(tip).startswith("tokens ")
    for _ in range(5):
        browser.press("+")
        time.sleep(0.05)
    browser.wait_for("document.querySelector('#links .left bdi').textContent.startsWith('t')")
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    browser.wait_for(rf"/^t\d+ \(\d+\) → t\d+ \(\d+\): /.test({tip})")  # the finer tile is there
    said = browser.evaluate(tip)
    q, k = map(int, re.findall(r"\((\d+)\)", said))
    assert said.startswith(f"t{q} ({q}) → t{k} ({k}): ") and q > 290
    weight = session.weights[0, q, k]
    shown = float(re.search(r": ([0-9.e]+)", said.replace("−", "-"))[1])
    assert shown / 100 == pytest.approx(weight, abs=0.006) and session.tiles_asked

    browser.click("#edit-controls button.primary")
    browser.wait_for("document.querySelector('#edit-result .prediction') !== null")
    said = browser.evaluate("document.querySelector('#edit-result').innerText")
    assert "accuracy on 100 examples: 0.90 before, 0.10 with the changes" in said
    assert "70.0%, was 10.0%" in said
    browser.evaluate("document.querySelector('#edit-controls select').value = 'example'")
    browser.click("#edit-controls button:nth-child(3)")
    browser.wait_for("document.querySelector('#edit-result .warning') !== null")
    assert "<b>write</b>" in browser.evaluate("document.querySelector('#edit-result').innerText")
    assert any("400" in message for message in browser.messages)  # of the network, by the browser
    browser.messages.clear()

    text = "one <i>two</i> three"
    browser.evaluate(f"document.querySelector('#another textarea').value = {json.dumps(text)}")
    browser.click("#another button[type=submit]")
    browser.wait_for("document.getElementById('title').textContent === 'Another'")
    tokens = "[...document.querySelectorAll('#links .left bdi')].map(b => b.textContent)"
    browser.wait_for(f"{tokens}.length === 3")
    assert browser.evaluate(tokens) == text.split()
    assert browser.messages == []
    assert all(asked.startswith((url, "data:")) for asked in browser.requests)
    browser.open(url, 1280)  # the server keeps the input
    browser.wait_for("document.getElementById('title')?.textContent === 'Another'")
