"""The cache directory: what was edited, cut short or written by others is made anew."""

import os
import threading

import pytest

from regard import disk_cache
from regard.backends import calibration
from regard.report import bundle
from regard.tasks.tokenizers import BPETokenizer

SCRIPT = "stolen(document.cookie)"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    return tmp_path


DAMAGE = {
    "empty": lambda content: b"",
    "edited": lambda content: content + b" ",
    "replaced": lambda content: SCRIPT.encode(),
    "cut short": lambda content: content[:-1],
    "no checksum": lambda content: content.partition(b"\n")[2],
    "other bytes": lambda content: b"\xff\xfe\x00",
    "one bit": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_made_anew(cache, damage):
    """Fails if a cached file is used that is not what we wrote, or if it stays."""
    made = []

    def create():
        made.append(1)
        return "var vega = 1;\n…"

    for _ in range(2):
        assert disk_cache.read_or_create("a.js", create) == "var vega = 1;\n…"
    assert len(made) == 1
    path = cache / "a.js"
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):
        assert disk_cache.read_or_create("a.js", create) == "var vega = 1;\n…"
    assert len(made) == 2 and [file.name for file in cache.iterdir()] == ["a.js"]


def test_file_of_another_name_or_user(cache, monkeypatch):
    """Fails if a file is taken for another one, or for ours although someone else wrote it."""
    disk_cache.write_verified(cache / "a.js", SCRIPT)
    (cache / "a.js").rename(cache / "b.js")
    assert disk_cache.read_verified(cache / "b.js") is None
    disk_cache.write_verified(cache / "a.js", SCRIPT)
    assert disk_cache.read_verified(cache / "a.js") == SCRIPT
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if (cache / "a.js").stat().st_uid:  # files of root are trusted
        assert disk_cache.read_verified(cache / "a.js") is None


def test_full_disk_leaves_no_partial_file(cache, monkeypatch):
    """Fails if a write that fails leaves a file behind, or stops the command."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache.Path, "replace", fail)
    assert disk_cache.read_or_create("a.js", lambda: "text") == "text"
    assert not list(cache.iterdir())


def test_two_writers_at_once(cache):
    """Fails if a reader sees half of a file while it is written."""
    texts = [str(digit) * 300_000 for digit in range(2)]

    def write(text):
        for _ in range(10):
            disk_cache.write_verified(cache / "a.js", text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    write(texts[0])
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert disk_cache.read_verified(cache / "a.js") in texts
    assert [file.name for file in cache.iterdir()] == ["a.js"]


def test_edited_script_does_not_reach_a_page(cache, monkeypatch):
    """Fails if what someone wrote to the cache becomes part of a page."""
    pytest.importorskip("vl_convert", reason="the extra plot is not installed")
    convert = type("Convert", (), {"javascript_bundle": staticmethod(lambda **_: "var vega;")})
    altair = type("Altair", (), {"SCHEMA_VERSION": "v6.1.0"})
    modules = {"altair": altair, "vl_convert": convert}
    monkeypatch.setattr(bundle.importlib, "import_module", modules.__getitem__)
    assert bundle.vega_javascript() == "var vega;"
    (script,) = cache.glob("vega-*.js")
    for content in ("", SCRIPT):
        script.write_text(content)
        assert bundle.vega_javascript() == "var vega;"


def test_damaged_byte_pairs_are_learned_again(cache):
    """Fails if an empty or edited tokenizer ends in a raw exception, and stays."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    first = BPETokenizer.train(lambda: ["aab aab", "b"], 259).to_dict()
    (path,) = cache.glob("bpe-*.json")
    saved = path.read_bytes()
    for content in (b"", b"{}", saved.replace(b'"a"', b'"b"'), saved[:-5]):
        path.write_bytes(content)
        assert BPETokenizer.train(lambda: ["aab aab", "b"], 259).to_dict() == first
        assert path.read_bytes() == saved


def test_edited_costs_are_measured_again(cache, monkeypatch):
    """Fails if costs are believed that were not measured, although they look plausible."""
    count = 8 if calibration.native.library() else 6
    costs = calibration.BackendCosts(*[1e-5] * count)
    monkeypatch.setattr(calibration, "measure_costs", lambda: (costs, 1.0))
    for _ in range(2):
        calibration._machine_costs.cache_clear()
        assert calibration.machine_costs() == costs
        path = calibration.costs_path()
        path.write_text(path.read_text().replace("1e-05", "1e-09", 1))
    calibration._machine_costs.cache_clear()
