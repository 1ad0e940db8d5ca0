"""`regard look` from the command line: runs, models, recipes, and what it refuses."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.models import ModuleSpec
from regard.train.run import RunSpec, run_training
from regard.train.settings import TrainSettings

HOSTILE = "</script><script>alert(1)</script> \u202eevil\x00 <img src=x onerror=alert(2)>"


def run(*arguments, code=0):
    """The output of `regard look`, which must end with an exit code and without a traceback."""
    result = CliRunner().invoke(app, ["look", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def train(folder, task, **arguments):
    """A run of two steps."""
    spec = RunSpec(
        task=ModuleSpec(name=task, arguments=arguments),
        dim=16,
        heads=2,
        layers=2,
        settings=TrainSettings(steps=2, batch_size=4, eval_every=2, eval_examples=4),
    )
    run_training(spec, folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of four tasks, by name."""
    root = tmp_path_factory.mktemp("look")
    texts = root / "texts.csv"
    rows = [f"a {'good' if i % 2 else 'bad'} film number {i},{i % 2}" for i in range(60)]
    texts.write_text("text,label\n" + "\n".join(rows) + "\n")
    pairs = root / "pairs.csv"
    rows = [f"{'ab' * (i % 4 + 1)},{'ba' * (i % 4 + 1)}" for i in range(60)]
    pairs.write_text("source,target\n" + "\n".join(rows) + "\n")
    return {
        "recall": train(root / "recall", "recall", length=32, pairs=4),
        "classify": train(root / "classify", "classify", data=str(texts), tokenizer="word"),
        "seq2seq": train(root / "seq2seq", "seq2seq", data=str(pairs), tokenizer="char"),
        "data": texts,
    }


def test_look_at_runs(runs, tmp_path):
    """Fails if a run of a task cannot be looked at, or its page lacks the example."""
    page = tmp_path / "recall.html"
    output = run(runs["recall"], "--example", 1, "-o", page)
    assert "0 to 1" in output and "exact" in output and str(page.name) in output
    assert page.read_text(encoding="utf-8").startswith("<!")
    data = json.loads(run(runs["classify"], "--text", "a good film", "--json"))
    (sequence,) = data["sequences"]
    assert sequence["tokens"] == ["a", "good", "film"]
    assert data["models"][0]["prediction"].startswith("class")
    assert set(data["models"][0]["attribution"]) >= {"occlusion", "rollout"}
    data = json.loads(
        run(runs["seq2seq"], "--text", "abab", "--target", "ba", "--mixer", "linear", "--json")
    )
    assert {each["id"]: each["tokens"] for each in data["sequences"]} == {
        "source": list("abab"),
        "target": ["[START]", "b", "a"],
    }
    assert len(data["models"]) == 2 and data["matches"]


def test_hostile_text_is_text(runs, tmp_path):
    """Fails if a token of a text can end the script of a page, or reaches the terminal raw."""
    page = tmp_path / "page.html"
    output = run(runs["classify"], "--text", HOSTILE, "-o", page)
    assert "\u202e" not in output and "\x00" not in output
    content = page.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in content and "<img src=x" not in content
    assert "\x00" not in content


def test_look_at_a_recipe(tmp_path):
    """Fails if a recipe without weights is not shown on random tokens, or no picture is drawn."""
    picture = tmp_path / "fnet.png"
    assert "influence" in run("fnet", "--length", 8, "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_wrong_calls_are_explained(runs, tmp_path, monkeypatch):
    """Fails if a wrong call is not refused with what to do instead."""
    monkeypatch.chdir(tmp_path)
    recall, classify = runs["recall"], runs["classify"]
    for arguments, code, message in (
        ((classify,), 1, "--text, --image or --example 0"),
        ((classify, "--text", " "), 1, "no tokens"),
        ((classify, "--text", "a", "--example", 0), 2, "one input"),
        ((classify, "--example", 10_000), 1, "no example 10,000"),
        ((recall, "--text", "a"), 1, "--example 0"),
        ((recall, "--example", 0, "--layers", "7"), 1, "no layer 7"),
        ((recall, "--example", 0, "--mixer", "locl"), 1, "local"),
        ((recall, "--example", 0, "--mixer", "local", "--set", "windw=3"), 1, "window"),
        ((recall, "--example", 0, "--set", "window=3"), 2, "--mixer"),
        (("fnet", "--text", "a"), 1, "random tokens"),
        ((classify, "--image", "a.png"), 1, "does not read files"),
        ((classify, "--text", "a", "--open"), 2, "--serve"),
        ((f"{classify}s", "--text", "a"), 1, "did you mean"),
        (("vanilla", "--length", 300_000, "--layers", "0"), 1, "at most"),
        ((tmp_path, "--text", "a"), 1, "config.json"),
    ):
        output = re.sub(r"\s+", " ", run(*arguments, code=code))
        assert message in output, (arguments, output)
    assert not list(tmp_path.iterdir())


def test_a_run_without_its_data(runs, tmp_path):
    """Fails if a run whose data are gone cannot be given a text, or the error does not say so."""
    moved = runs["data"].rename(runs["data"].with_suffix(".moved"))
    try:
        assert "Give an input of your own" in re.sub(
            r"\s+", " ", run(runs["classify"], "--example", 0, code=1)
        )
        run(runs["classify"], "--text", "a good film", "-o", tmp_path / "page.html")
    finally:
        moved.rename(runs["data"])
    assert torch.is_grad_enabled()


def test_a_run_says_what_it_reads(runs):
    """Fails if an input of another type reaches the tokenizer."""
    for raw in (torch.ones(3), ["a text"], None):
        with pytest.raises(TypeError, match="reads a text"):
            regard.look(runs["classify"], raw)
