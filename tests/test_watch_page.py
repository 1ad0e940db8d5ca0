"""The triage page in a real browser: signing in, judging by keyboard, hostile values, all views."""

import json

import pytest

from browser import Browser, find_chromium
from regard.watch.demo import generate_traffic
from regard.watch.demo.run import FIELDS
from regard.watch.detector import Detector
from regard.watch.events import EventParser
from regard.watch.follow.store import WatchStore
from regard.watch.serve import Server, Watch, create_app
from regard.watch.settings import WatchSettings
from regard.watch.sources.source import Record
from watch_cases import HOSTILE, fill_store, make_content

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="needs chromium")

TOKEN = "the token of this server"
LOADED = "document.querySelector('.detail .findings') !== null"
SHOWN = json.dumps(HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(find_chromium(), tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def detector():
    settings = WatchSettings(**FIELDS, levels=("sequence",))
    traffic = generate_traffic(0.5, users=60, attacks=())
    records = [Record(json.dumps(event).encode(), f"a:{i}") for i, event in enumerate(traffic)]
    return Detector.learn(EventParser(settings).parse(records), settings)


@pytest.fixture
def server(tmp_path, browser, detector):
    store = fill_store(tmp_path / "state")
    server = Server(create_app(Watch(store, detector), TOKEN))
    server.start()
    browser.call("Network.clearBrowserCookies")
    yield server
    browser.open("about:blank", 1400)
    server.stop()
    store.close()


def sign_in(browser, server, width=1400, **options):
    browser.open(f"{server.url}/sign-in#{TOKEN}", width, **options)
    browser.wait_for(LOADED)


def press(browser, key):
    """Press a key as a keyboard does."""
    code = {"Escape": 27, "Enter": 13, "ArrowDown": 40}.get(key, ord(key[0].upper()))
    text = {} if len(key) > 1 and key != "Enter" else {"text": "\r" if key == "Enter" else key}
    for kind in ("keyDown", "keyUp"):
        given = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
        browser.call("Input.dispatchKeyEvent", **given, **(text if kind == "keyDown" else {}))


def show(browser, view, ready):
    browser.evaluate(f"location.hash = '#/{view}'")
    browser.wait_for(ready)


def test_sign_in(browser, server):
    """Fails if the token stays in the address, or data are shown without it."""
    browser.open(f"{server.url}/", 1400)
    browser.wait_for("document.querySelector('form.sign-in') !== null")
    assert "u10000" not in browser.evaluate("document.body.innerText")
    browser.evaluate("document.querySelector('#token').value = 'wrong'")
    browser.evaluate("document.querySelector('form.sign-in').requestSubmit()")
    browser.wait_for("document.querySelector('#state').textContent.includes('not the token')")
    sign_in(browser, server)
    address = browser.evaluate("location.href")
    assert TOKEN.split()[0] not in address and "%20token" not in address
    assert browser.evaluate("document.cookie") == ""  # scripts cannot read it
    assert browser.messages == []
    assert all(url.startswith(server.url) for url in browser.requests), browser.requests


def test_hostile_values_are_text(browser, server):
    """Fails if a value of a request becomes an element, runs, or reorders the text around it."""
    sign_in(browser, server)
    browser.wait_for(f"document.querySelector('.detail h2').textContent.includes({SHOWN})")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("/[\\u202e\\u001b]/.test(document.body.textContent)") is False
    for view in ("activity", "users", "series", "rules"):
        show(browser, view, "document.querySelector('#view').children.length > 0")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.messages == []


def test_explained_event(browser, server):
    """Fails if surprise is not coloured, or expected values, the nearest normal event, what-if or
    masks are missing."""
    sign_in(browser, server)
    id = make_content(0)["id"]
    browser.evaluate(f"document.querySelector('[data-id=\"{id}\"]').click()")
    browser.wait_for(f"document.querySelector('.detail footer').textContent.includes('{id}')")
    text = browser.evaluate("document.querySelector('.detail').innerText")
    for expected in (
        "1 in 500,000 normal events",
        "request.query.limit is 50000",
        "51%",
        "Nearest normal event",
        "[masked: token, 19 characters]",
        "missing",
        "1 in 3.2 normal events",
    ):
        assert expected in text, expected
    colour = "getComputedStyle(document.querySelectorAll('.leaves tbody tr')[{}]).backgroundColor"
    alphas = [
        float(browser.evaluate(colour.format(i)).rstrip(")").rpartition("/")[2].split(",")[-1])
        for i in (0, 2, 7)
    ]
    assert alphas[0] < 0.02 < alphas[2] < alphas[1]
    sort = "document.querySelector('.detail .small').click()"
    browser.evaluate(sort)
    first = browser.evaluate("document.querySelector('.leaves tbody th').textContent")
    assert first == "request.query.limit"


def test_judging_by_keyboard(browser, server, tmp_path):
    """Fails if an alert cannot be chosen, labelled, accepted and muted without a mouse."""
    sign_in(browser, server)
    chosen = "document.querySelector('.alert[aria-current]').dataset.id"
    before = browser.evaluate(chosen)
    press(browser, "j")
    browser.wait_for(f"{chosen} !== '{before}'")
    second = browser.evaluate(chosen)
    browser.wait_for(f"document.querySelector('.detail footer').textContent.includes('{second}')")
    press(browser, "a")
    browser.wait_for("document.querySelector('[data-action=attack]').ariaPressed === 'true'")
    store = WatchStore(tmp_path / "state")
    assert store.alert(second).label == "attack"
    press(browser, "ArrowDown")
    browser.wait_for(f"{chosen} !== '{second}'")
    third = browser.evaluate(chosen)
    browser.wait_for(f"document.querySelector('.detail footer').textContent.includes('{third}')")
    press(browser, "l")
    browser.wait_for("document.querySelector('.detail .row').textContent.includes('accepted')")
    assert [each.alert for each in store.accepted_to_learn()] == [third]
    press(browser, "m")
    browser.wait_for("document.querySelector('dialog').open")
    press(browser, "Escape")
    browser.wait_for("!document.activeElement.closest('dialog')")
    press(browser, "m")
    browser.wait_for("document.querySelector('dialog').open")
    browser.evaluate("document.querySelector('dialog [name=reason]').focus()")
    press(browser, "x")
    press(browser, "Enter")
    browser.wait_for("!document.querySelector('dialog').open")
    mute = store.mutes()[-1]
    assert (mute.path, mute.reason) == ("request.query.limit", "x") and mute.expires
    store.close()


def test_filters_and_views(browser, server, tmp_path):
    """Fails if a filter does nothing, or a view lacks its picture."""
    sign_in(browser, server)
    browser.evaluate("location.hash = '#/alerts?entity=u10001'")
    browser.wait_for("document.querySelectorAll('.alert').length === 4")
    browser.evaluate("location.hash = '#/alerts?kind=path'")
    browser.wait_for("document.querySelectorAll('.steps li').length === 3")
    show(browser, "series", "document.querySelectorAll('svg').length === 2")
    assert browser.evaluate("document.querySelectorAll('.band').length") == 1
    assert browser.evaluate("document.querySelectorAll('circle.odd').length") == 1
    show(browser, "users", "document.querySelectorAll('.dot').length === 90")
    assert browser.evaluate("document.querySelectorAll('.dot.moved').length") == 3
    show(browser, "activity", "document.querySelector('svg.graph') !== null")
    assert browser.evaluate("document.querySelectorAll('.odd-edge').length") == 2
    assert browser.evaluate("document.querySelectorAll('.edge').length") > 5
    show(browser, "rules", "document.querySelector('table button') !== null")
    browser.evaluate("document.querySelector('table button').click()")
    browser.wait_for("document.querySelector('#view').textContent.includes('accepted')")
    store = WatchStore(tmp_path / "state")
    assert store.shapes()[0].status == "accepted"
    store.close()
    assert browser.messages == []


def test_narrow_and_dark(browser, server):
    """Fails if a view is wider than a telephone, or dark readers get a white page."""
    sign_in(browser, server, width=390, scheme="dark")
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(20, 23, 28)"
    for view, ready in (
        ("alerts", LOADED),
        ("series", "document.querySelector('svg') !== null"),
        ("users", "document.querySelector('.dot') !== null"),
        ("activity", "document.querySelector('svg.graph') !== null"),
        ("rules", "document.querySelector('table') !== null"),
    ):
        show(browser, view, ready)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390, view
